"""What a tensor is of the batch, and where operations put the batch's axis that move it.

A tensor is known by a `Trait`. It has the `rows` of the batch along one axis, or is one `row` of
them in its turn; is a `mean` or a `sum` over them, or the `total` over all replicas'; a `count` of
them or a `part` of such a count, or the `shape` with one; or a list of `random` numbers, or of the
numbers of rows that a condition has `chosen`. An operation that makes its result of
several rows, or takes some of them by their place, is `RELATED`: a share gives other numbers.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf


class Trait(NamedTuple):
    """What a tensor is of the batch.

    Args:
        kind: "rows", "row", "mean", "sum", "total", "count", "part", "shape", "random", "chosen";
            "lost" where there are rows and nobody knows along which axis.
        axis: The axis of rows, or where a shape has their number.
        blocks: How many batches follow one another along the axis; 0 if they are mixed with
            others, None if that is not known.
        where: The user's line that made a mean or sum; None if it is Keras's.
    """

    kind: str
    axis: int = 0
    blocks: int | None = 1
    where: str | None = None


RELATED = Trait("related")
"""The answer of a rule for an operation that relates rows."""

ROW = Trait("row")
"""Its answer for one that takes an example in its turn, as loops do."""


@dataclasses.dataclass
class Operation:
    """An operation that was made or run, with what is known of its inputs.

    Attributes:
        rows: The inputs that have rows, and where they stand.
        has_row: Whether an input is made of one example.
        figures: The means and sums among the inputs.
        counts: The numbers of rows among them.
    """

    kind: str
    inputs: Any
    attributes: Any
    outputs: Any
    traits: list[Trait | None]
    length: int | None

    def __post_init__(self) -> None:
        self.rows = [(i, t) for i, t in enumerate(self.traits) if t and t.kind == "rows"]
        self.has_row = any(t and t.kind == "row" for t in self.traits)
        self.figures = [t for t in self.traits if t and t.kind in ("mean", "sum")]
        self.counts = [t for t in self.traits if t and t.kind in ("count", "part")]

    def value(self, index: int) -> Any:
        """An input as a number or an array; None if it is known only when the graph runs."""
        return tf.get_static_value(self.inputs[index])

    def numbers(self, index: int) -> list[int] | None:
        value = self.value(index)
        return None if value is None else [int(number) for number in value.reshape(-1)]

    def axes(self, index: int, of: int = 0) -> list[int] | None:
        """An input as the axes that it names of another one."""
        named = self.numbers(index)
        rank = self.inputs[of].shape.rank
        return None if named is None or rank is None else [a % rank for a in named if rank]

    def attribute(self, name: str, default: Any = 0) -> Any:
        """An attribute of the operation: an integer, a boolean or bytes."""
        output = self.outputs[0]
        if tf.is_symbolic_tensor(output):
            known = output.op.node_def.attr
        else:
            known = dict(zip(self.attributes[::2], self.attributes[1::2], strict=False))
        value = known.get(name, default)
        if hasattr(value, "WhichOneof"):
            value = getattr(value, value.WhichOneof("value") or "i")
        return value

    @property
    def is_in_vectorized_map(self) -> bool:
        """Whether TensorFlow made it of a function of one row, which takes each in its turn."""
        output = self.outputs[0]
        return bool(tf.is_symbolic_tensor(output)) and "loop_body/" in output.name

    @property
    def divides_by_rows(self) -> bool:
        """Whether the second input is the number of rows, which has no trait if it is constant."""
        if self.traits[1]:
            return self.traits[1].kind == "count"
        constant = self.value(1)
        return bool(self.length and np.size(constant) == 1 and constant == self.length)


def transposed(op: Operation) -> Trait | None:
    """Axes in another order."""
    trait, order = op.traits[0], op.numbers(1)
    return None if order is None or trait is None else trait._replace(axis=order.index(trait.axis))


def reshaped(op: Operation) -> Trait | None:
    """Another shape: the first axis goes on as the first, perhaps with others merged into it."""
    trait, old, new = op.traits[0], op.inputs[0].shape, op.outputs[0].shape
    if trait is None or old.rank is None or new.rank is None:
        return None
    if trait.axis:
        return Trait("lost")
    if trait.blocks and trait.blocks > 1 and old[1:] != new[1:]:
        return trait._replace(blocks=None)
    return trait


def expanded(op: Operation) -> Trait | None:
    """A new axis of length 1."""
    trait, place, rank = op.traits[0], op.numbers(1), op.outputs[0].shape.rank
    if trait is None or place is None or rank is None:
        return None
    return trait._replace(axis=trait.axis + (place[0] % rank <= trait.axis))


def squeezed(op: Operation) -> Trait | None:
    """Axes of length 1 left out."""
    trait, shape = op.traits[0], op.inputs[0].shape
    if trait is None or shape.rank is None:
        return None
    named = op.attribute("squeeze_dims", None)
    named = getattr(named, "i", named)
    axes = [a % shape.rank for a in named or []] or [a for a, d in enumerate(shape) if d == 1]
    return trait._replace(axis=trait.axis - sum(a < trait.axis for a in axes))


def packed(op: Operation) -> Trait | None:
    """Tensors on top of one another, along a new axis."""
    axis, rank = op.attribute("axis"), op.outputs[0].shape.rank
    trait = op.rows[0][1]
    if rank is None or any(other.axis != trait.axis for _, other in op.rows):
        return None
    return trait._replace(axis=trait.axis + (axis % rank <= trait.axis))


def unpacked(op: Operation) -> Trait | None:
    """A tensor taken apart along an axis."""
    trait, axis = op.rows[0][1], op.attribute("axis") % (op.inputs[0].shape.rank or 1)
    if axis == trait.axis:
        return ROW
    return trait._replace(axis=trait.axis - (axis < trait.axis))


def concatenated(op: Operation) -> Trait | None:
    """Tensors one after another along an axis that exists."""
    axes, rows = op.axes(len(op.inputs) - 1), op.rows
    trait = rows[0][1]
    if axes is None or any(other.axis != trait.axis for _, other in rows):
        return None
    if axes[0] != trait.axis:
        return trait
    # Such as two views of a batch, one after the other, for a contrastive loss.
    of_all = len(rows) == len(op.inputs) - 1 and all(other.blocks for _, other in rows)
    return trait._replace(blocks=sum(other.blocks or 0 for _, other in rows) if of_all else 0)


def split(op: Operation) -> Trait | None:
    """A tensor cut into equal pieces: right where each is a batch."""
    data = 1 if op.kind == "Split" else 0
    trait, axes = op.traits[data], op.axes(0 if op.kind == "Split" else 2, of=data)
    if trait is None or axes is None or trait.axis not in axes:
        return trait if axes else None
    if not trait.blocks:
        return trait
    return (
        RELATED
        if trait.blocks % len(op.outputs)
        else trait._replace(blocks=trait.blocks // len(op.outputs))
    )


def sliced(op: Operation) -> Trait | None:
    """`Slice` with a beginning and a size for each axis."""
    trait, begin, size = op.traits[0], op.numbers(1), op.numbers(2)
    if trait is None or begin is None or size is None:
        return None
    if begin[trait.axis] == 0 and size[trait.axis] == -1:
        return trait
    return cut(op, trait, begin[trait.axis], begin[trait.axis] + size[trait.axis])


def slice_of_strides(op: Operation) -> Trait | None:
    """`x[...]` with all that may stand in the brackets."""
    trait, rank = op.traits[0], op.inputs[0].shape.rank
    count = op.inputs[1].shape[0]
    if trait is None or rank is None or count is None:
        return None
    masks = {
        name: int(op.attribute(f"{name}_mask"))
        for name in ("begin", "end", "ellipsis", "new_axis", "shrink_axis")
    }
    real = sum(not ((masks["new_axis"] | masks["ellipsis"]) >> i) & 1 for i in range(count))
    axis, place = 0, 0
    for i in range(count):
        is_in = {name: bool(mask >> i & 1) for name, mask in masks.items()}
        if is_in["ellipsis"]:
            skipped = rank - real
            if axis <= trait.axis < axis + skipped:
                return trait._replace(axis=place + trait.axis - axis)
            axis, place = axis + skipped, place + skipped
        elif is_in["new_axis"]:
            place += 1
        elif axis == trait.axis:
            found = of_range(op, trait, i, is_in)
            return found._replace(axis=place) if found and found.kind == "rows" else found
        else:
            axis, place = axis + 1, place + (not is_in["shrink_axis"])
    return trait._replace(axis=place + trait.axis - axis)


def of_range(op: Operation, trait: Trait, index: int, is_in: dict[str, bool]) -> Any:
    """The batch's axis cut by one part of the brackets."""
    begin, end, stride = (tf.get_static_value(op.inputs[i], partial=True) for i in (1, 2, 3))
    first, last, step = (
        None if values is None or values[index] is None else int(values[index])
        for values in (begin, end, stride)
    )
    if is_in["shrink_axis"]:
        # An index that only the running graph knows is the counter of a loop.
        return ROW if first is None else RELATED if trait.blocks else None
    if step not in (None, 1):
        return RELATED
    if is_in["begin"] or first == 0:
        if is_in["end"]:
            return trait
        first = 0
    return cut(op, trait, first, FAR if is_in["end"] else last)


FAR = 2**31 - 1
"""The end of an axis."""


def cut(op: Operation, trait: Trait, first: int | None, last: int | None) -> Trait | None:
    """Some of the rows: whole batches, or related by their place."""
    if any(t and t.kind == "part" for t in op.traits[1:]):
        return RELATED
    known = [number for number in (first, last) if number not in (None, 0, FAR)]
    length = op.length
    whole = length is not None and all(number % length == 0 for number in known)
    if known and not whole:
        return RELATED
    return trait._replace(blocks=None)


def gathered(op: Operation) -> Trait | None:
    """Rows of a table, or of the batch, by their indices."""
    table, indices = op.traits[0], op.traits[1]
    axes = op.axes(2) if len(op.inputs) > 2 else [0]
    if axes is None:
        return None
    table = table if table and table.kind == "rows" else None
    if table is None:
        rows = indices is not None and indices.kind == "rows"
        return indices._replace(axis=indices.axis + axes[0]) if indices and rows else None
    if axes[0] == table.axis:
        if indices is not None and indices.kind != "random":
            return table._replace(axis=indices.axis, blocks=None)
        # As in `of_range`: the counter of a loop.
        if op.inputs[1].shape.rank == 0 and op.value(1) is None:
            return ROW
        return table if indices is None and op.is_in_vectorized_map else RELATED
    if op.attribute("batch_dims"):
        return table
    rank = op.inputs[1].shape.rank
    return table._replace(axis=table.axis + (rank - 1 if axes[0] < table.axis else 0))


def multiplied(op: Operation) -> Trait | None:
    """Products of matrices, or of many."""
    names = ("transpose_a", "transpose_b") if op.kind == "MatMul" else ("adj_x", "adj_y")
    if op.kind == "MatMul" and any(trait and trait.kind == "lost" for trait in op.traits):
        return RELATED  # Wherever the rows of the one are, those of the other meet them.
    kept, contracted, outer = [], 0, []
    for i, trait in op.rows:
        rank = op.inputs[i].shape.rank
        if rank is None:
            return None
        place = trait.axis - rank
        if place < -2:
            # One of the axes that both have in common, such as that of `tf.linalg.matmul` on
            # batches.
            outer.append(trait._replace(axis=place))
            continue
        if op.attribute(names[i]):
            place = -3 - place
        if place == (-2, -1)[i]:
            kept.append(trait._replace(axis=place))
        else:
            contracted += 1
    if op.figures:
        return RELATED
    if contracted:
        # Rows meet rows: each adds its product, as in the gradient of a weight.
        return RELATED if kept or outer or contracted == 1 else Trait("sum")
    return of_one_axis(op, kept + outer)


def of_one_axis(op: Operation, found: list[Trait]) -> Trait | None:
    """The batch's axis, counted from the last, if it is the same for all that have one."""
    if len({trait.axis for trait in found}) > 1:
        return RELATED
    rank = op.outputs[0].shape.rank
    return None if rank is None else found[0]._replace(axis=found[0].axis + rank)


def einsum(op: Operation) -> Trait | None:
    equation = tf.compat.as_str(op.attribute("equation", b"")).replace(" ", "")
    if "." in equation or "->" not in equation:
        return None
    inputs, result = equation.split("->")
    letters = {inputs.split(",")[i][trait.axis] for i, trait in op.rows}
    if op.figures or len(letters & set(result)) > 1 or (len(letters) > 1):
        return RELATED
    (letter,) = letters
    if letter not in result:
        return Trait("sum") if len(op.rows) == len(op.inputs) else RELATED
    return op.rows[0][1]._replace(axis=result.index(letter))


def spread(op: Operation) -> Trait | None:
    """`BroadcastTo`: new axes come first."""
    trait, old, new = op.traits[0], op.inputs[0].shape.rank, op.outputs[0].shape.rank
    if trait is None or old is None or new is None:
        return None
    return trait._replace(axis=trait.axis + new - old)


def repeated(op: Operation) -> Trait | None:
    """`Tile`."""
    trait, times = op.traits[0], op.numbers(1)
    if trait is None:
        return None
    once = times is not None and times[trait.axis] == 1
    return trait if once else trait._replace(blocks=0)


MOVES: dict[str, Callable[[Operation], Trait | None]] = {
    "Transpose": transposed,
    "Reshape": reshaped,
    "ExpandDims": expanded,
    "Squeeze": squeezed,
    "Pack": packed,
    "Unpack": unpacked,
    "ConcatV2": concatenated,
    **dict.fromkeys(("Split", "SplitV"), split),
    "Slice": sliced,
    "StridedSlice": slice_of_strides,
    **dict.fromkeys(("GatherV2", "Gather", "ResourceGather"), gathered),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), multiplied),
    "Einsum": einsum,
    "BroadcastTo": spread,
    "Tile": repeated,
}
"""What each of them makes of operations that have rows."""
