"""How a tensor of the step is distributed over the replicas.

    REPLICATED          every replica has the whole value
    Rows(axis, blocks)  each replica has its rows of one axis
    PARTIAL             the value is the sum of what the replicas have
    Items(element)      a list of tensors in one of these layouts

Any of these is right for any tensor: the choice decides speed alone.

The examples of a batch are numbered, and each replica has a range of the numbers, perhaps an empty
one. An axis in rows is made of blocks, one after another; in a block, each example has `factor`
rows side by side. The images of a batch are one block with the factor 1; when two views of them are
concatenated, these are two blocks; and where [batch, time, units] was reshaped to
[batch * time, units], it is one block with the factor `time`.
"""

from dataclasses import dataclass
from typing import NamedTuple

from keras_multigpu.partition.sizes import AnySize


class Block(NamedTuple):
    """Consecutive rows of all examples of a batch.

    Args:
        batch: The name of the batch's size.
        factor: How many rows each example has.
    """

    batch: str
    factor: AnySize = 1


@dataclass(frozen=True)
class Layout:
    """How a tensor is distributed over the replicas."""


@dataclass(frozen=True)
class Replicated(Layout):
    """Every replica has the whole value."""


@dataclass(frozen=True)
class Partial(Layout):
    """The value is the sum of what the replicas have."""


@dataclass(frozen=True)
class Rows(Layout):
    """A replica has, of each block, the rows of its own examples; one after another.

    Args:
        axis: The axis, counted from the first.
        blocks: What the axis is made of.
    """

    axis: int
    blocks: tuple[Block, ...]

    def at(self, axis: int) -> "Rows":
        """The same rows as another axis."""
        return Rows(axis, self.blocks)


@dataclass(frozen=True)
class Items(Layout):
    """A list of tensors.

    Args:
        element: How they lie; None while nothing has been written.
    """

    element: Layout | None = None


REPLICATED, PARTIAL = Replicated(), Partial()


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
