"""`PartInputs`: which tensors of a batch hold rows, and how a part of the step takes its own."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.layouts import Block, Rows
from keras_multigpu.partition.local_step import Leaf, LocalStep, Outcome
from keras_multigpu.partition.sizes import AnySize, Size
from keras_multigpu.training.shares import Batch, cut, have_rows, is_one_row, present_leaves

BATCH = "batch"
"""The name of the batch, and of its size."""


class PartInputs:
    """The tensors of a batch, as one part of the step takes them.

    Args:
        spec: The specs of the batch.
        shared: Whether several parts share the rows.
        in_pieces: Whether replicas take their shares in pieces.

    Attributes:
        size: How many examples there are: a number if the step is made for that alone.
        takes_any_size: Whether the step is made for batches of every size, of which any rows are
            one.
        whole_leaves: The places of the batch's leaves that each replica takes whole, if it does not
            read them.
        leaves: What the partition has to know of each tensor.
        specs: Their specs.
        hold_rows: Whether each tensor has a row for each example; otherwise it belongs to all.
    """

    def __init__(self, spec: Batch, shared: bool, in_pieces: bool = False) -> None:
        leaves = present_leaves(spec)
        dense = [not is_composite(leaf) for leaf in leaves]
        known = list(zip(leaves, dense, have_rows(leaves), strict=True))
        sizes = {leaf.shape[0] for leaf, *is_cut in known if all(is_cut)} - {None}
        self.size: AnySize = sizes.pop() if sizes else Size.of(BATCH)
        others = [leaf for leaf, _, has_rows in known if leaf.shape.rank and not has_rows]
        self.takes_any_size = isinstance(self.size, Size) and all(map(is_one_row, others))
        self.whole_leaves = [
            place for place, leaf in enumerate(leaves) if not dense[place] or is_one_row(leaf)
        ]
        self._in_pieces = in_pieces
        self.leaves: list[Leaf] = []
        self.specs: list[tf.TensorSpec] = []
        self.hold_rows: list[bool] = []
        for leaf, is_dense, has_rows in known:
            holds_rows = is_dense and has_rows
            first = len(self.leaves)
            for part in tf.nest.flatten(leaf, expand_composites=True):
                size = self.size if shared and holds_rows else None
                self.leaves.append(described(part, len(self.leaves), size))
                # A part has fewer rows than the batch.
                self.specs.append(part if size is None else with_open_length(part))
                self.hold_rows.append(holds_rows)
            if has_rows:
                self.leaves[first:] = with_batch_size(leaf, self.leaves[first:], self.size)

    @property
    def places_of_rows(self) -> list[int]:
        """The places of the tensors that are cut."""
        return [n for n, leaf in enumerate(self.leaves) if isinstance(leaf.layout, Rows)]

    def cut(self, data: Sequence[tf.Tensor], start: Any, stop: Any) -> list[tf.Tensor]:
        """These rows of the tensors that are cut, and all others whole."""
        found = list(data)
        for place in self.places_of_rows:
            found[place] = cut(data[place], start, stop)
        return found

    def lengths(self, tensors: Sequence[Any]) -> dict[str, Any]:
        """For pieces: the lengths of the axes that vary and are not cut, by name.

        Args:
            tensors: The replica's tensors, or their specs.
        """
        found: dict[str, Any] = {}
        if not self._in_pieces:
            return found
        for leaf, tensor in zip(self.leaves, tensors, strict=True):
            for axis, dim in enumerate(leaf.dims or ()):
                is_cut = isinstance(leaf.layout, Rows) and leaf.layout.axis == axis
                if isinstance(dim, Size) and not is_cut:
                    is_spec = isinstance(tensor, tf.TypeSpec)
                    found[repr(dim)] = tensor if is_spec else tf.shape(tensor)[axis]
        return found


class PartArguments(NamedTuple):
    """What one part of the step takes.

    Attributes:
        number: The part's number among all parts.
        counts: How many examples it has, and how many the parts before it have.
        total: How many examples there are.
        place: The number of its replica.
        keeps_terms: Whether it has a term of its own of each open sum in a variable.
        lengths: The lengths of other axes, which the pieces of a share have in common.
        data: Its rows of the batch's tensors.
        values: The values of the variables.
    """

    number: Any
    counts: Any
    total: Any
    place: Any
    keeps_terms: Any
    lengths: dict[str, Any]
    data: Sequence[Any]
    values: Sequence[Any]

    def run(self, step: LocalStep) -> Outcome:
        """Add the part to the graph that is being traced."""
        # The total apart: what is made of it alone does not belong to one replica.
        counts = [[*tf.unstack(self.counts), self.total]]
        given = self.number, counts, self.data, self.values, self.lengths
        return step(*given, place=self.place, keeps_terms=self.keeps_terms)


BEFORE_DATA = 5
"""How many tensors a part takes before lengths and data."""


def is_composite(leaf: Any) -> bool:
    return not isinstance(leaf, (tf.Tensor, tf.TensorSpec))


def with_open_length(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape[1:]] if spec.shape.rank else spec.shape, spec.dtype)


def described(spec: tf.TensorSpec, number: int, size: AnySize | None) -> Leaf:
    """What the partition has to know of a tensor; `size` if it holds the rows of the batch."""
    if spec.shape.rank is None:
        return Leaf(None)
    dims: list[Any] = [
        Size.of(f"axis_{axis}_of_{number}") if length is None else length
        for axis, length in enumerate(spec.shape)
    ]
    return Leaf(dims) if size is None else Leaf([size, *dims[1:]], Rows(0, (Block(BATCH),)))


def with_batch_size(leaf: Any, parts: list[Leaf], size: AnySize) -> list[Leaf]:
    """The components of a leaf, with what those of a composite tensor say of the batch's size."""
    if isinstance(leaf, tf.SparseTensorSpec) and leaf.shape.rank:
        *others, shape = parts
        value = np.array([size, *leaf.shape[1:], None], object)[:-1]
        return [*others, shape._replace(value=value)]
    if isinstance(leaf, tf.RaggedTensorSpec) and leaf.ragged_rank:
        values, splits, *others = parts
        return [values, splits._replace(dims=[size + 1]), *others]
    return parts
