"""Parts of a source: some of its examples, in an order of their own."""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_multigpu.checks import require_positive_integer, value_error
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.order import Order
from keras_multigpu.data.pipeline.settings import Batching
from keras_multigpu.data.pipeline.source import Source, Stream
from keras_multigpu.identities import identify_array


class Subset(Source):
    """Some of a source's examples, in the order of `indices`."""

    source: Source
    indices: np.ndarray

    def __init__(self, source: Source, indices: np.ndarray) -> None:
        # A part of a part is a part of the whole.
        if isinstance(source, Subset):
            indices = source.indices[indices]
            source = source.source
        self.source = source
        self.indices = indices
        self.describe_as(source)
        self.name = f"a part of {source.name}"
        self.num_examples = len(indices)
        self.draws = source.draws

    @functools.cached_property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]
        """The classes, which the source may have to read first."""
        labels = self.source.labels
        return None if labels is None else labels[self.indices]

    def prepare(self, rows: np.ndarray | None = None) -> None:
        self.source.prepare(self.indices if rows is None else self.indices[rows])

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        return self.source.read(out, self.indices[indices], seeds)

    def stages(self) -> dict[int, Source]:
        return {epoch: Subset(one, self.indices) for epoch, one in self.source.stages().items()}

    def without_draws(self) -> Source:
        return Subset(self.source.without_draws(), self.indices)

    def example_name(self, index: int) -> str:
        return self.source.example_name(int(self.indices[index]))

    def identity(self, exact: bool = False) -> dict[str, Any]:
        return {
            "part": identify_array(self.indices, whole=exact),
            "of": self.source.identity(exact),
        }


def take(source: Source | Stream, count: int, settings: Batching) -> Source:
    """The first examples of a source, or random ones if it is shuffled."""
    require_positive_integer("num_examples", count)
    source = with_random_access(source, "take")
    # Training never uses epoch -1, or -2 as in `split`, so the choice is independent of all orders.
    order = Order(source.num_examples, seed=settings["seed"], shuffle=settings["shuffle"])
    positions = np.arange(min(count, source.num_examples))
    return Subset(source, np.sort(order.examples(-1, positions)[0]))


def split(source: Source | Stream, fraction: float, settings: Batching) -> tuple[Source, Source]:
    """Two disjoint parts with equal class proportions; the second has this fraction."""
    source = with_random_access(source, "split")
    if not isinstance(fraction, int | float | np.floating) or not 0 < fraction < 1:
        raise value_error(
            "`fraction` is not a fraction of the examples.",
            "Expected a number between 0 and 1, exclusive.",
            fraction=fraction,
        )
    order, _ = Order(source.num_examples, seed=settings["seed"]).examples(
        -2, np.arange(source.num_examples)
    )
    labels = np.zeros(len(order), int) if source.labels is None else source.labels[order]
    by_class = order[np.argsort(labels, kind="stable")]
    # With the classes in a row, example k belongs to the second part if `fraction * k` rounds to a
    # new number there. So the total is exact, and each class is within one example of it.
    count = np.arange(source.num_examples)
    second = np.zeros(source.num_examples, bool)
    second[by_class] = np.floor((count + 1) * fraction + 0.5) > np.floor(count * fraction + 0.5)
    if not second.any() or second.all():
        raise value_error(
            "One of the two parts would be empty.",
            f"Expected at least one example in each; there are {source.num_examples}.",
            fraction=fraction,
        )
    return Subset(source, np.flatnonzero(~second)), Subset(source, np.flatnonzero(second))


def with_random_access(source: Source | Stream, method: str) -> Source:
    """The source; a `ValueError` if it is a stream."""
    if isinstance(source, Source):
        return source
    raise value_error(
        f"`{method}` was called on a stream: {source.name}.",
        "Expected a source whose examples can be read in any order.",
        "Split earlier: the list of files, the arrays, or the TFDS split (`train[:80%]`).",
        source=source.name,
    )
