"""What the tests of each class of Keras look it up with."""

import inspect
from collections.abc import Callable, Collection
from typing import Any

from exactness.cases import Case

Make = Callable[[Any], Any]
"""What makes an instance of a class."""

ROWS, BATCH = 6, 5
"""With a batch of five and one of a single example, so that a replica is empty."""


def of(*args: Any, **options: Any) -> Make:
    """What makes an instance of a class with these arguments."""
    return lambda kind: kind(*args, **options)


def parts_of(table: dict[str, dict[str, Make]], module: Any) -> list[tuple[str, str]]:
    """The rows of a table that this version of Keras has."""
    return [(on, name) for on, own in table.items() for name in own if hasattr(module, name)]


def missing(module: Any, known: Collection[str]) -> list[str]:
    """The classes of a module of Keras that have none of their names here."""
    names: dict[Any, set[str]] = {}
    for name, value in vars(module).items():
        if inspect.isclass(value):
            names.setdefault(value, set()).add(name)
    return [kind.__name__ for kind, own in names.items() if not own & {*known}]


def trained_once(model: Any, compile: Any, data: Any, epochs: int = 1, **more: Any) -> Case:
    fit = {"batch_size": BATCH, "fit": lambda directory: {"epochs": epochs}}
    return Case("", model, compile, data, **{"after": (), **fit, **more})
