"""What items by their number have to offer, and three kinds that do: any object, tables, arrays."""

import abc
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import type_error, value_error
from keras_multigpu.identities import of_array


class Items(abc.ABC):
    """Items by their number, which several threads may ask for.

    Attributes:
        name: What they are, in a few words.
    """

    name: str

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def get(self, index: int) -> Any:
        """One item; whatever is raised, it counts as damaged."""

    def get_many(self, indices: list[int]) -> list[Any] | None:
        """Several items at once; None where they have to be read one by one."""
        return None

    def item_name(self, index: int) -> str:
        return f"item {index} of {self.name}"

    @abc.abstractmethod
    def identity(self, exact: bool) -> dict[str, Any]:
        """As `Source.identity`, without what is made of the items."""


class AnyItems(Items):
    """What has `__len__` and `__getitem__`; `__getitems__`, which some have, reads several."""

    def __init__(self, source: Any, version: Any) -> None:
        require_items(source)
        self.name = type(source).__name__
        self._source = source
        self._version = version

    def __len__(self) -> int:
        return len(self._source)

    def get(self, index: int) -> Any:
        return self._source[index]

    def get_many(self, indices: list[int]) -> list[Any] | None:
        many = getattr(self._source, "__getitems__", None)
        if many is None:
            return None
        try:
            items = list(many(indices))
        except Exception:  # One of them is damaged, and alone it is named.
            return None
        return items if len(items) == len(indices) else None

    def identity(self, exact: bool) -> dict[str, Any]:
        if exact and self._version is None:
            raise value_error(
                f"A cache folder cannot tell whether {self.name} has changed.",
                "Expected a `version` beside `cache`: a text that changes when the items do.",
                'Pass for example version="2026-11", or cache="memory".',
                version=None,
            )
        return {"kind": self.name, "version": self._version}


class TableItems(Items):
    """The rows of a pandas table, each a dict with an entry for each column; or of one column."""

    def __init__(self, table: Any, version: Any) -> None:
        self.name = type(table).__name__
        self._table = table
        self._version = version
        # A row of pandas has one type for all of its columns.
        self._columns = (
            {name: table[name].to_numpy() for name in table.columns}
            if hasattr(table, "columns")
            else table.to_numpy()
        )

    def __len__(self) -> int:
        return len(self._table)

    def get(self, index: int) -> Any:
        if isinstance(self._columns, dict):
            return {name: column[index] for name, column in self._columns.items()}
        return self._columns[index]

    def identity(self, exact: bool) -> dict[str, Any]:
        columns = keras.tree.map_structure(lambda each: of_array(each, whole=exact), self._columns)
        return {"kind": self.name, "version": self._version, "columns": columns}


def items_of(source: Any, version: Any) -> Items:
    """The items of an object; a `TypeError` with what to do instead if it has none."""
    # Of pandas `len` and `[]` are about rows and about columns.
    return (TableItems if hasattr(source, "iloc") else AnyItems)(source, version)


def require_items(source: Any) -> None:
    fix = None
    if isinstance(source, keras.utils.PyDataset):
        fix = "It gives batches: use `from_flow`."
    elif isinstance(source, tf.data.Dataset):
        fix = "Use `from_dataset`."
    elif isinstance(source, Mapping):
        some = ", ".join(map(repr, list(source)[:3]))
        fix = f"Choose one of its entries ({some}), or use `from_arrays` for a dict of arrays."
    elif not hasattr(source, "__getitem__") and hasattr(source, "dataset"):
        fix = "It makes batches itself: pass what it reads, its `dataset`."
    elif not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        fix = "What can only be iterated over goes to `from_dataset` or `from_flow`."
    else:
        try:
            len(source)
        except TypeError as error:
            fix = f"Its length is missing ({error}): use `from_flow` for a generator of batches."
    if fix is not None:
        raise type_error(
            "`source` does not offer its items by number.",
            "Expected an object with a length whose item number i is `source[i]`.",
            fix,
            source=type(source).__name__,
        )
