"""The entries of slices as Python writes them, `x[:, 1:, None]`."""

from typing import Any, NamedTuple

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.sizes import AnySize, is_number

MASKS = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")

OPEN = "open"
"""A bound that is left out, so that the slice begins or ends with the axis."""


class Entry(NamedTuple):
    """The slice of one axis, or a new axis.

    Args:
        axis: The input's axis; None for a new one.
        place: Its place among the entries that are written; None if it has none of its own.
        begin: The begin: a size, `OPEN`, or None if it is not known.
        end: The end, in the same way.
        stride: The stride; None if it is not known.
        shrinks: Whether the output lacks the axis.
    """

    axis: int | None
    place: int | None = None
    begin: Any = OPEN
    end: Any = OPEN
    stride: Any = 1
    shrinks: bool = False

    @property
    def takes_all(self) -> bool:
        """Whether it takes all of the axis, perhaps backwards."""
        return self.begin is OPEN and self.end is OPEN and self.stride in (1, -1)

    def bounds(self, dim: AnySize | None) -> tuple[AnySize | None, AnySize | None]:
        """The begin and the end in an axis of this length; None if they are not known."""
        if self.stride != 1:
            return None, None
        return inside(self.begin, 0, dim), inside(self.end, dim, dim)


def inside(bound: Any, default: AnySize | None, dim: AnySize | None) -> AnySize | None:
    """A bound, counted from the start of an axis of this length."""
    if bound is OPEN:
        return default
    if not is_number(bound):
        return bound
    if isinstance(dim, int):
        return slice(int(bound), None).indices(dim)[0]
    if bound >= 0:
        return bound
    return None if dim is None else dim + bound


def entries_of(op: Operation, facts: Facts, rank: int) -> list[Entry] | None:
    """The entries of a `StridedSlice` or its gradient, one for each old or new axis.

    Args:
        op: The operation.
        facts: The facts of its graph.
        rank: The number of axes of the tensor that is sliced.
    """
    count = op.inputs[1].shape.num_elements()
    if count is None:
        return None
    values = [facts.value(tensor) for tensor in op.inputs[1:4]]
    bounds = [[None] * count if value is None else list(value) for value in values]
    opens, ends, dots, new, shrunk = (
        [op.get_attr(name) >> place & 1 for place in range(count)] for name in MASKS
    )
    unnamed = rank - dots.count(0) + sum(n for n, dot in zip(new, dots, strict=True) if not dot)
    entries: list[Entry] = []
    axis = 0
    for place, (begin, end, stride) in enumerate(zip(*bounds, strict=True)):
        if dots[place]:
            entries += [Entry(each) for each in range(axis, axis + unnamed)]
            axis += unnamed
        elif new[place]:
            entries.append(Entry(None))
        else:
            begin, end = OPEN if opens[place] else begin, OPEN if ends[place] else end
            entries.append(Entry(axis, place, begin, end, stride, bool(shrunk[place])))
            axis += 1
    return [*entries, *(Entry(each) for each in range(axis, rank))]
