"""Lists of image files with labels: Python lists, CSV files and tables of pandas."""

import csv
import io
import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.data.addresses import exists, is_address, joined, opened, split
from keras_multigpu.data.files.image_files import FileTable

_DELIMITERS = {".csv": ",", ".tsv": "\t"}
# Enough to distinguish a wrong folder from a few missing files.
_LOOKED_FOR = 16


class FileList(NamedTuple):
    """Files with what is known of each.

    Attributes:
        paths: The path of each file, as it was given.
        labels: The label of each file; a list of columns if `columns` has their names; or None.
        weights: The weight of each file, or None.
        columns: The names of the columns of a label that has several numbers, or None.
        root: What relative paths start from.
        name: What this list is, in a few words.
    """

    paths: list[str]
    labels: Any
    weights: Any
    columns: list[str] | None
    root: str
    name: str

    def table(self, paths: Sequence[Any] | None = None) -> FileTable:
        """A table of the files, or of others that are relative to the same folder."""
        paths = self.paths if paths is None else paths
        table = FileTable(split(joined(self.root, at_home(path))) for path in paths)
        require_found(table, paths, self.root)
        return table


class Columns(NamedTuple):
    """The names of the columns of a table: the arguments of `from_files`."""

    path: str
    labels: str | Sequence[str] | None
    weight: str | None


def listed(paths: Any, labels: Any, weights: Any, columns: Columns, root: Any) -> FileList:
    """The files of a list or a table; the arguments are those of `from_files`."""
    root = None if root is None else os.path.expanduser(root)
    if isinstance(paths, str | os.PathLike):
        path = os.path.expanduser(paths)
        require_table_file(path)
        root = split(path)[0] if root is None else root
        return from_table(CsvTable(path), labels, weights, columns, root, path)
    if hasattr(paths, "columns"):  # A table of pandas, or another that offers them in the same way.
        return from_table(paths, labels, weights, columns, root or "", "a table")
    labels, weights = in_order(labels, "labels"), in_order(weights, "sample_weight")
    files = texts_of(in_order(paths, "paths"), "paths")
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
        with binary(path) as start:
            # Texts of 16 bits a letter, which can pass for UTF-8.
            if b"\0" in start.read(4096):
                raise self._no_text("it holds zero bytes, as UTF-16 does")
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
        """The rows, each with the line that it begins in; errors name the table."""
        line = 1
        # With a byte order mark, as Excel writes it, or without.
        with io.TextIOWrapper(binary(self._path), encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, delimiter=self._delimiter)
            try:
                for row in rows:
                    yield line, row
                    line = rows.line_num + 1
            except UnicodeDecodeError as error:
                raise self._no_text(str(error)) from None
            except csv.Error as error:
                raise value_error(
                    f"The row of line {line} cannot be read: {error}.",
                    "Expected short fields, and a closing quotation mark for each opening one.",
                    "Look for a stray quotation mark in that row.",
                    path=self._path,
                ) from None

    def _no_text(self, cause: str) -> ValueError:
        return value_error(
            f"The table is not text in UTF-8: {cause}.",
            "Expected a file in UTF-8.",
            "Save it as UTF-8, or read it with pandas and its `encoding`, and pass the table.",
            path=self._path,
        )


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
    found = [typed(read[column]) for column in label_names]
    return FileList(
        paths=texts_of(read[columns.path], columns.path),
        labels=None if not found else found if several else found[0],
        weights=typed(read[weight]) if weight else None,
        columns=label_names if several and found else None,
        root=root,
        name=name,
    )


def label_columns(
    present: Sequence[str], columns: Columns
) -> tuple[str | Sequence[str], str | None]:
    """The names of the label's and the weight's columns, chosen or found."""
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


def typed(values: Any) -> np.ndarray:
    """Texts as integers or floats if all of them are, otherwise as they are; also other values."""
    if isinstance(values, np.ndarray):
        return values
    # Python takes "1_0" for a number, which it is not as the name of a class.
    plain = not any("_" in value for value in values)
    for kind in (np.int64, np.float64) if plain else ():
        try:
            return np.array(values, dtype=kind)
        except (ValueError, OverflowError):
            continue
    return np.array(values, dtype=object)


def in_order(values: Any, name: str) -> Any:
    """A sequence with an entry for each file, such as a generator's; None stays None."""
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


def texts_of(paths: Iterable[Any], name: str) -> list[str]:
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


def at_home(path: str) -> str:
    """A path with the home folder in the place of `~/`; a name such as `~draft.jpg` stays."""
    return os.path.expanduser(path) if path.startswith("~/") else path


def binary(path: str) -> Any:
    return opened(path) if is_address(path) else open(path, "rb")


def require_table_file(path: str) -> None:
    if os.path.splitext(path)[1].lower() in _DELIMITERS and (
        os.path.isfile(path) or (is_address(path) and exists(path))
    ):
        return
    if os.path.isdir(path):
        what, fix = "`paths` is a folder.", "For a folder use `from_directory`."
    elif os.path.exists(path):
        what, fix = "`paths` is one file that is not a table.", f"For one image pass [{path!r}]."
    else:
        what, fix = "`paths` names a file that does not exist.", "Check its spelling."
    raise value_error(
        what,
        "Expected a list of paths, a .csv or .tsv file, or a pandas table.",
        fix,
        paths=path,
        working_folder=os.getcwd(),
    )


def require_found(table: FileTable, paths: Sequence[Any], root: str) -> None:
    """Raise a `ValueError` if none of a few files exist; single ones count as damage later."""
    if not len(table):
        return
    indices = np.unique(np.linspace(0, len(table) - 1, _LOOKED_FOR).astype(int)).tolist()
    paths_looked_for = map(table.path, indices)
    if any(exists(path) if is_address(path) else os.path.exists(path) for path in paths_looked_for):
        return
    raise value_error(
        f"None of {len(indices)} files that were looked for exists: {table.path(0)!r}, ...",
        "Expected absolute paths, or paths relative to `root`.",
        "Pass the folder that they are relative to as `root`.",
        first=str(paths[0]),
        root=root,
        working_folder=os.getcwd(),
    )
