"""Lists of image files with labels: Python lists, CSV files and pandas tables."""

import csv
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.data.addresses import exists, is_address, join, open_address, split
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
        table = FileTable(split(join(self.root, path)) for path in expanded)
        require_found(table, paths, self.root)
        return table


class Columns(NamedTuple):
    """The names of the columns of a table: the arguments of `from_files`."""

    path: str
    labels: str | Sequence[str] | None
    weight: str | None


def read_list(paths: Any, labels: Any, weights: Any, columns: Columns, root: Any) -> FileList:
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
        root = split(path)[0] if root is None else root
        return from_table(CsvTable(path), labels, weights, columns, root, path)
    if hasattr(paths, "columns"):  # A pandas table or a similar one.
        return from_table(paths, labels, weights, columns, root or "", "a table")
    labels, weights = as_sequence(labels, "labels"), as_sequence(weights, "sample_weight")
    files = path_texts(as_sequence(paths, "paths"), "paths")
    for name, values in (("labels", labels), ("sample_weight", weights)):
        if values is not None and len(values) != len(files):
            raise value_error(
                f"`{name}` and `paths` differ in length.",
                "Expected one entry for each file.",
                f"Pass as many entries in `{name}` as in `paths`.",
                paths=len(files),
                **{name: len(values)},
            )
    return FileList(files, labels, weights, None, root or "", "a list of files")


class CsvTable:
    """The columns of a CSV file with a header; separated by tabs if it ends in `.tsv`."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._delimiter = _DELIMITERS[os.path.splitext(path)[1].lower()]
        self.columns = next((row for _, row in self._rows()), [])

    def read(self, names: list[str]) -> dict[str, Any]:
        places = [self.columns.index(name) for name in names]
        values: list[list[str]] = [[] for _ in names]
        for line, row in itertools.islice(self._rows(), 1, None):
            if not row:
                continue
            if len(row) != len(self.columns):
                raise value_error(
                    f"Line {line} has {len(row)} fields.",
                    f"Expected {len(self.columns)}, as in the header.",
                    "Put fields that hold a comma in quotation marks.",
                    path=self._path,
                    line=row,
                )
            for column, place in zip(values, places, strict=True):
                column.append(row[place])
        return dict(zip(names, values, strict=True))

    def _rows(self) -> Iterator[tuple[int, list[str]]]:
        """Each row with the line that it begins in; errors name the table."""
        line = 1
        # "utf-8-sig" accepts the byte order mark that Excel writes.
        binary: Any = open_address(self._path) if is_address(self._path) else open(self._path, "rb")
        with io.TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=self._delimiter)
            try:
                for row in rows:
                    yield line, row
                    line = rows.line_num + 1
            except (UnicodeDecodeError, csv.Error) as error:
                raise value_error(
                    f"The row of line {line} cannot be read: {error}.",
                    "Expected text in UTF-8, and a closing quotation mark for each opening one.",
                    "Look for a stray quotation mark in that row, or read the file with pandas and "
                    "its `encoding`, and pass the table.",
                    path=self._path,
                ) from None


def from_table(
    table: Any, labels: Any, weights: Any, columns: Columns, root: str, name: str
) -> FileList:
    for argument, values in (("labels", labels), ("sample_weight", weights)):
        if values is not None:
            raise value_error(
                f"`{argument}` was given together with a table.",
                "Expected them to be columns of the table.",
                "Name the columns with `label_columns` and `weight_column`.",
                **{argument: type(values).__name__},
            )
    known = list(table.columns)
    chosen, weight = label_columns(known, columns)
    several = not isinstance(chosen, str)
    label_names = [chosen] if isinstance(chosen, str) else list(chosen)
    names = [columns.path, *label_names, *([weight] if weight else [])]
    unknown = [column for column in names if known.count(column) != 1]
    if unknown:
        raise value_error(
            f"The table has no column, or several columns, of the name {unknown[0]!r}.",
            f"Expected one among its columns: {known}.",
            "Pass the names as `path_column`, `label_columns` and `weight_column`.",
            path_column=columns.path,
            label_columns=columns.labels,
            weight_column=columns.weight,
        )
    is_csv = isinstance(table, CsvTable)
    read = table.read(names) if is_csv else {name: np.asarray(table[name]) for name in names}
    found = [parse_numbers(read[column]) for column in label_names]
    try:
        numbers = [np.asarray(column, np.float64) for column in found] if several else []
    except (ValueError, TypeError) as error:
        raise value_error(
            f"Some of several label columns do not hold numbers: {error}.",
            "Expected numbers in each of them.",
            "Check the columns, or name a single one.",
            label_columns=label_names,
        ) from error
    return FileList(
        paths=path_texts(read[columns.path], columns.path),
        labels=None if not found else np.stack(numbers, axis=1) if several else found[0],
        weights=parse_numbers(read[weight]) if weight else None,
        columns=label_names if several and found else None,
        root=root,
        name=name,
    )


def label_columns(
    present: Sequence[str], columns: Columns
) -> tuple[str | Sequence[str], str | None]:
    """The label columns and the weight column: those that were named, or the usual ones."""
    weight = columns.weight or ("weight" if "weight" in present else None)
    if columns.labels is not None:
        return columns.labels, weight
    if "label" in present:
        return "label", weight
    others = [name for name in present if name not in (columns.path, weight)]
    if others:
        raise value_error(
            'The table has no column "label".',
            "Expected the name of the column with the labels, or a list of such names.",
            "Pass `label_columns`; an empty list if there are no labels.",
            label_columns=None,
            columns=others,
        )
    return [], weight


def parse_numbers(values: Any) -> np.ndarray:
    """Texts as integers or floats if all can be converted; anything else as it is."""
    if isinstance(values, np.ndarray):
        return values
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
        "Pass a list, or an array.",
        **{name: type(values).__name__},
    )


def path_texts(paths: Iterable[Any], name: str) -> list[str]:
    texts = []
    for row, path in enumerate(paths):
        if not isinstance(path, str | os.PathLike) or path == "":
            raise value_error(
                f"Row {row} of `{name}` holds no path.",
                "Expected a string or a `pathlib.Path`.",
                "Fill it in, or leave the row out.",
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
