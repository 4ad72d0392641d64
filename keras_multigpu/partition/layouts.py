"""`Layout`: how a tensor of the step is distributed over the replicas.

    REPLICATED          every replica has the whole value
    Rows(axis, blocks)  each replica has its rows of one axis
    PARTIAL             the value is the sum of the replicas' parts: an open sum
    Items(element)      a list of tensors in one of these layouts

Any tensor can have any of these; the choice affects only the speed.

Each replica has a range of the examples of a batch, perhaps an empty one. An axis in rows consists
of blocks, one after another. In a block, each example has `factor` rows side by side. The images of
a batch are one block with the factor 1. Two views of them, concatenated, are two blocks. And
[batch, time, units], reshaped to [batch * time, units], is one block with the factor `time`.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from keras_multigpu.batch_sizes import share_bounds, smaller
from keras_multigpu.partition.sizes import AnySize


class Shard(NamedTuple):
    """An axis of a variable that replicas divide: a batch, whose examples are its rows.

    Args:
        length: The length of the axis.
        unit: How many rows stay together. Processors handle several numbers at once, and a
            remainder one by one, which may round otherwise.
    """

    length: int
    unit: int = 1

    def bounds(self, replica: Any, replicas: int) -> tuple[Any, Any]:
        """A replica's first row and the one after its last, for a number or a scalar tensor."""
        found = share_bounds(-(-self.length // self.unit), replica, replicas)
        first, stop = (smaller(units * self.unit, self.length) for units in found)
        return first, stop


class Block(NamedTuple):
    """Consecutive rows of all examples of a batch.

    Args:
        batch: The name of the batch, or a `Shard`.
        factor: How many rows each example has.
    """

    batch: str | Shard
    factor: AnySize = 1


@dataclass(frozen=True)
class Layout:
    """How a tensor is distributed over the replicas."""


@dataclass(frozen=True)
class Replicated(Layout):
    """Every replica has the whole value."""


@dataclass(frozen=True)
class Partial(Layout):
    """The value is the sum of the replicas' parts."""


@dataclass(frozen=True)
class Rows(Layout):
    """A replica has the rows of its own examples: first those of the first block, and so on.

    Args:
        axis: The axis, counted from the first.
        blocks: The blocks of the axis.
    """

    axis: int
    blocks: tuple[Block, ...]

    def at(self, axis: int) -> "Rows":
        """The same rows along another axis."""
        return Rows(axis, self.blocks)


@dataclass(frozen=True)
class Items(Layout):
    """A list of tensors.

    Args:
        element: The layout of each; None until one is written.
    """

    element: Layout | None = None


REPLICATED, PARTIAL = Replicated(), Partial()


def is_sharded(layout: Layout | None) -> bool:
    """Whether a tensor is in rows of variables that replicas divide."""
    return isinstance(layout, Rows) and all(
        isinstance(block.batch, Shard) for block in layout.blocks
    )


def is_one_shard(layout: Layout) -> bool:
    """Whether a tensor is in rows of one variable."""
    return isinstance(layout, Rows) and is_sharded(layout) and len(layout.blocks) == 1


def stacked(element: Layout | None) -> Layout:
    """The layout of elements in this layout, stacked along a new first axis."""
    if isinstance(element, Rows):
        return element.at(element.axis + 1)
    return REPLICATED if element is None else element


def joined(one: Layout, other: Layout) -> Layout:
    """A layout for a value that has either of two layouts, as after a condition."""
    if one == other:
        return one
    if isinstance(one, Items) and isinstance(other, Items):
        if one.element is None or other.element is None:
            return one if other.element is None else other
        return Items(joined(one.element, other.element))
    special = [layout for layout in (one, other) if layout != REPLICATED]
    return special[0] if len(special) == 1 and not isinstance(special[0], Items) else REPLICATED
