"""Lists of image files with labels: Python lists, CSV files and pandas tables."""

import csv
import io
import os
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.data.addresses import exists, fetch, is_address, join, split_path
from keras_multigpu.data.sources.file_table import FileTable

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# How many files to look for: enough to tell a wrong folder from a few missing files.
_SAMPLED = 16


class FileList(NamedTuple):
    """Files with their labels and weights.

    Attributes:
        paths: The paths as given.
        labels: A label for each file, or None.
        weights: A weight for each file, or None.
        columns: The names of the numbers in each label, if they are columns of a table.
        root: The folder that relative paths start from.
        name: A short description of the list.
    """

    paths: list[str]
    labels: Any
    weights: Any
    columns: list[str] | None
    root: str
    name: str

    def table(self, paths: Sequence[Any] | None = None) -> FileTable:
        """A table of the files, or of other files relative to the same folder."""
        paths = self.paths if paths is None else paths
        # A name such as `~draft.jpg` stays.
        expanded = (os.path.expanduser(path) if path.startswith("~/") else path for path in paths)
        table = FileTable(split_path(join(self.root, path)) for path in expanded)
        require_found(table, paths, self.root)
        return table


def read_list(paths: Any, labels: Any, weights: Any, root: Any) -> FileList:
    """The files of a list or a table; the arguments are those of `from_files`."""
    root = None if root is None else os.path.expanduser(root)
    if isinstance(paths, str | os.PathLike):
        path = os.path.expanduser(paths)
        # A pipe can be read only once, and a device without end.
        found = exists(path) if is_address(path) else os.path.isfile(path)
        if os.path.splitext(path)[1].lower() not in _DELIMITERS or not found:
            raise value_error(
                "`paths` is neither a list nor an existing table in a file.",
                "Expected a list of paths, a .csv or .tsv file, or a pandas table.",
                f"Check the spelling; pass [{path!r}] for one image, and a folder to "
                "`from_directory`.",
                paths=path,
                working_folder=os.getcwd(),
            )
        root = split_path(path)[0] if root is None else root
        return from_table(CsvTable(path), labels, weights, root, path)
    if hasattr(paths, "columns"):  # A pandas table or a similar one.
        return from_table(paths, labels, weights, root or "", "a table")
    labels, weights = as_sequence(labels, "labels"), as_sequence(weights, "sample_weight")
    files = path_texts(as_sequence(paths, "paths"), "paths")
    for name, values in (("labels", labels), ("sample_weight", weights)):
        if values is not None and len(values) != len(files):
            raise value_error(
                f"`{name}` and `paths` differ in length.",
                "Expected one entry for each file.",
                paths=len(files),
                **{name: len(values)},
            )
    return FileList(files, labels, weights, None, root or "", "a list of files")


class CsvTable:
    """The columns of a CSV file with a header; separated by tabs if it ends in `.tsv`."""

    def __init__(self, path: str) -> None:
        line = 1
        rows: list[list[str]] = []
        binary: Any = io.BytesIO(fetch(path)) if is_address(path) else open(path, "rb")
        # "utf-8-sig" accepts the byte order mark that Excel writes.
        with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=_DELIMITERS[os.path.splitext(path)[1].lower()])
            try:
                for row in reader:
                    if row and len(row) != len((rows or [row])[0]):
                        raise value_error(
                            f"Line {line} has {len(row)} fields.",
                            f"Expected {len(rows[0])}, as in the header.",
                            "Put fields that hold a comma in quotation marks.",
                            path=path,
                            line=row,
                        )
                    rows += [row] if row or not rows else []
                    line = reader.line_num + 1
            except (UnicodeDecodeError, csv.Error) as error:
                raise value_error(
                    f"The row of line {line} cannot be read: {error}.",
                    "Expected text in UTF-8, and a closing quotation mark for each opening one.",
                    "Look for a stray quotation mark in that row, or read the file with pandas and "
                    "its `encoding`, and pass the table.",
                    path=path,
                ) from None
        self.columns, *self._rows = rows or [[]]

    def __getitem__(self, name: str) -> list[str]:
        place = self.columns.index(name)
        return [row[place] for row in self._rows]


def values_of(column: Any) -> np.ndarray:
    """A column as an array; the texts of a CSV file become numbers if all of them are."""
    return parse_numbers(column) if isinstance(column, list) else np.asarray(column)


def from_table(table: Any, labels: Any, weights: Any, root: str, name: str) -> FileList:
    """The files of a table; `labels` and `weights` name columns, or are None for the usual ones."""
    known = list(table.columns)
    path = "path" if "path" in known else next(iter(known), "path")
    if labels is None:
        others = [column for column in known if column not in (path, weights, "weight")]
        labels = "label" if "label" in known or others else []
    if weights is None and "weight" in known:
        weights = "weight"
    several = not isinstance(labels, str)
    label_names = list(labels) if several else [labels]
    wanted = [path, *label_names, *([] if weights is None else [weights])]
    unknown = [column for column in wanted if known.count(column) != 1]
    if unknown:
        raise value_error(
            f"The table has no column, or several columns, of the name {unknown[0]!r}.",
            f"Expected one among its columns: {known}.",
            "Pass the name of its label column as `labels`, a list of names, or [] for no labels; "
            "and that of the weights as `sample_weight`.",
            labels=labels,
            sample_weight=weights,
        )
    found = [values_of(table[column]) for column in label_names]
    try:
        numbers = [np.asarray(column, np.float64) for column in found] if several else []
    except (ValueError, TypeError) as error:
        raise value_error(
            f"Some of several label columns do not hold numbers: {error}.",
            "Expected numbers in each of them.",
            labels=label_names,
        ) from error
    return FileList(
        paths=path_texts(table[path], path),
        labels=None if not found else np.stack(numbers, axis=1) if several else found[0],
        weights=None if weights is None else values_of(table[weights]),
        columns=label_names if several and found else None,
        root=root,
        name=name,
    )


def parse_numbers(values: list[str]) -> np.ndarray:
    """Texts as integers or floats if all can be converted."""
    # "1_0" is a number for Python, but here it is a class name.
    plain = not any("_" in value for value in values)
    for kind in (np.int64, np.float64) if plain else ():
        try:
            return np.array(values, dtype=kind)
        except (ValueError, OverflowError):
            continue
    return np.array(values, dtype=object)


def as_sequence(values: Any, name: str) -> Any:
    """A sequence of the entries, such as those of a generator; None stays None."""
    if values is None:
        return None
    is_single = isinstance(values, str) or getattr(values, "shape", None) == ()
    if isinstance(values, Iterable) and not is_single and not isinstance(values, set | frozenset):
        return values if hasattr(values, "__len__") else list(values)
    raise value_error(
        f"`{name}` has no entries in a fixed order.",
        "Expected one entry for each file, in the order of the files.",
        **{name: type(values).__name__},
    )


def path_texts(paths: Iterable[Any], name: str) -> list[str]:
    texts = []
    for row, path in enumerate(paths):
        if not isinstance(path, str | os.PathLike) or path == "":
            raise value_error(
                f"Row {row} of `{name}` holds no path.",
                "Expected a string or a `pathlib.Path`.",
                path=path,
            )
        texts.append(os.fsdecode(path))
    return texts


def require_found(table: FileTable, paths: Sequence[Any], root: str) -> None:
    """Raise a `ValueError` if none of a few files exists; single missing files count as damage."""
    if not len(table):
        return
    indices = np.unique(np.linspace(0, len(table) - 1, _SAMPLED).astype(int)).tolist()
    if any(exists(table.path(index)) for index in indices):
        return
    raise value_error(
        f"None of {len(indices)} files that were looked for exists: {table.path(0)!r}, ...",
        "Expected absolute paths, or paths relative to `root`.",
        "Pass the folder that they start from as `root`.",
        first=str(paths[0]),
        root=root,
        working_folder=os.getcwd(),
    )
