"""`Items`: items read by number from any object with a length."""

import abc
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import type_error, value_error


class Items(abc.ABC):
    """Items read by number, from several threads.

    Attributes:
        name: A short description.
    """

    name: str

    @abc.abstractmethod
    def __len__(self) -> int: ...

    @abc.abstractmethod
    def get(self, index: int) -> Any:
        """One item. If it raises any error, the item counts as damaged."""

    def get_many(self, indices: list[int]) -> list[Any] | None:
        """Several items at once; None if they must be read one by one."""
        return None

    def item_name(self, index: int) -> str:
        return f"item {index} of {self.name}"

    @abc.abstractmethod
    def identity(self, exact: bool) -> dict[str, Any]:
        """As `Source.identity`, for the items alone."""


class AnyItems(Items):
    """Any object with `__len__` and `__getitem__`, and perhaps `__getitems__` for several items."""

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
        except Exception:  # One item is damaged. Reading them one by one finds which.
            return None
        return items if len(items) == len(indices) else None

    def identity(self, exact: bool) -> dict[str, Any]:
        if exact and self._version is None:
            raise value_error(
                f"A cache folder cannot tell whether {self.name} has changed.",
                "Expected a `version` with `cache`: a text that changes when the items do.",
                'Pass for example version="2026-11", or cache="memory".',
                version=None,
            )
        return {"kind": self.name, "version": self._version}


def require_items(source: Any) -> None:
    """Raise a `TypeError` unless an object has numbered items."""
    try:
        numbered = len(source) >= 0 and hasattr(source, "__getitem__")
    except TypeError:
        numbered = False
    # In pandas, `len` counts rows and `[]` selects columns.
    others = keras.utils.PyDataset | tf.data.Dataset | Mapping
    if not numbered or hasattr(source, "iloc") or isinstance(source, others):
        raise type_error(
            "`source` does not offer its items by number.",
            "Expected an object with a length whose item number i is `source[i]`.",
            "Use `from_flow` for generators and other batches, `from_dataset` for a "
            "`tf.data.Dataset`, `from_arrays` for a dict of arrays. Pass a pandas table as "
            "`table.to_dict('records')`, one entry of a dict, or the `dataset` of a loader.",
            source=type(source).__name__,
        )
