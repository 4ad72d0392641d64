"""`Batches`: which tensors of a batch hold rows, and how a part of the step takes its own.

Leaves of a batch may differ in length, as sentences and their words do. Those of one length are a
batch of their own here, with a name; in most steps there is only `BATCH`.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.layouts import Block, Rows
from keras_multigpu.partition.local_step import Leaf, LocalStep, Outcome
from keras_multigpu.partition.sizes import AnySize, Size
from keras_multigpu.training.shares import (
    Batch,
    Groups,
    cut,
    is_cut,
    is_one_row,
    number_in,
    present_leaves,
)
from keras_multigpu.training.shares import Rows as ShareRows

BATCH = "batch"


class Batches:
    """The batches that a step takes at once.

    Args:
        spec: The specs of the leaves.
        groups: Which leaves have equally many rows, see `shares`.

    Attributes:
        leaves: The specs of all leaves.
        of_leaves: The batch whose rows each leaf holds; None where it belongs to all examples.
        names: The names of the batches.
        sizes: How many examples each has, by name: a number if the step is made for that alone.
    """

    def __init__(self, spec: Batch, groups: Groups) -> None:
        self.leaves = present_leaves(spec)
        numbers = iter(groups or itertools.repeat(0))
        self.of_leaves: list[str | None] = []
        for leaf in self.leaves:
            number = next(numbers) if is_cut(leaf) else -1
            own = f"{BATCH}_{number}" if number else BATCH
            self.of_leaves.append(None if number < 0 else own)
        # Where each batch's numbers are among those of the leaves that are cut.
        self._places = [groups.index(number) for number in dict.fromkeys(groups) if number >= 0]
        self.names = list(dict.fromkeys([BATCH, *(each for each in self.of_leaves if each)]))
        self.sizes: dict[str, AnySize] = {name: Size.of(name) for name in self.names}
        for leaf, name in zip(self.leaves, self.of_leaves, strict=True):
            if name is not None and not is_composite(leaf) and leaf.shape[0] is not None:
                self.sizes[name] = leaf.shape[0]

    @property
    def takes_any_size(self) -> bool:
        """Whether the step is made for batches of every size."""
        return len(self.names) == 1 and not isinstance(self.sizes[BATCH], int)

    @property
    def whole_leaves(self) -> list[int]:
        """The places of the leaves that each replica takes whole, if it does not read them."""
        return [
            place
            for place, leaf in enumerate(self.leaves)
            if is_composite(leaf) or is_one_row(leaf)
        ]

    def counts(self, rows: ShareRows) -> list[tf.Tensor]:
        """For each batch, how many examples these rows are; and how many there are in all."""
        places = self._places or [0]
        return [
            tf.stack([number_in(numbers[place]) for place in places])
            for numbers in (rows.own, rows.whole)
        ]


class PartInputs:
    """The tensors of a batch, as one part of the step takes them.

    Args:
        batches: The batches of the step.
        shared: Whether several parts share the rows.
        in_pieces: Whether replicas take their shares in pieces.

    Attributes:
        leaves: What the partition has to know of each tensor.
        specs: Their specs.
        batch_of: The batch whose rows each tensor holds; None where it is not cut.
    """

    def __init__(self, batches: Batches, shared: bool, in_pieces: bool = False) -> None:
        self._names, self._in_pieces = batches.names, in_pieces
        self.leaves: list[Leaf] = []
        self.specs: list[tf.TensorSpec] = []
        self.batch_of: list[str | None] = []
        for leaf, of_batch in zip(batches.leaves, batches.of_leaves, strict=True):
            name = None if is_composite(leaf) else of_batch
            first = len(self.leaves)
            for spec in tf.nest.flatten(leaf, expand_composites=True):
                size = batches.sizes[name] if shared and name is not None else None
                self.leaves.append(described(spec, len(self.leaves), name or "", size))
                # A part has fewer rows than the batch.
                self.specs.append(spec if size is None else with_open_length(spec))
                self.batch_of.append(name)
            if of_batch is not None:
                parts = self.leaves[first:]
                self.leaves[first:] = with_batch_size(leaf, parts, batches.sizes[of_batch])

    @property
    def places_of_rows(self) -> list[int]:
        """The places of the tensors that are cut."""
        return [n for n, leaf in enumerate(self.leaves) if isinstance(leaf.layout, Rows)]

    def cut(self, data: Sequence[tf.Tensor], start: Any, stop: Any) -> list[tf.Tensor]:
        """Rows of the tensors, given where they begin and end in each batch."""
        found = list(data)
        for place in self.places_of_rows:
            layout: Any = self.leaves[place].layout
            batch = self._names.index(layout.blocks[0].batch)
            found[place] = cut(data[place], start[batch], stop[batch])
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
        counts: For each batch, how many examples it has and how many the parts before it have.
        totals: How many examples each batch has.
        lengths: The lengths of other axes, which the pieces of a share have in common.
        data: Its rows of the batch's tensors.
        values: The values of the variables.
    """

    number: Any
    counts: Any
    totals: Any
    lengths: dict[str, Any]
    data: Sequence[Any]
    values: Sequence[Any]

    def run(self, step: LocalStep) -> Outcome:
        """Add the part to the graph that is being traced."""
        # Apart from each other: what is made of totals alone does not belong to one replica.
        pairs = zip(tf.unstack(self.counts), tf.unstack(self.totals), strict=True)
        counts = [[*tf.unstack(own), total] for own, total in pairs]
        return step(self.number, counts, self.data, self.values, self.lengths)


BEFORE_DATA = 3
"""How many tensors a part takes before lengths and data."""


def is_composite(leaf: Any) -> bool:
    return not isinstance(leaf, (tf.Tensor, tf.TensorSpec))


def with_open_length(spec: tf.TensorSpec) -> tf.TensorSpec:
    return tf.TensorSpec([None, *spec.shape[1:]] if spec.shape.rank else spec.shape, spec.dtype)


def described(spec: tf.TensorSpec, number: int, batch: str, size: AnySize | None) -> Leaf:
    """What the partition has to know of a tensor; `size` if it holds the rows of a batch."""
    if spec.shape.rank is None:
        return Leaf(None)
    dims: list[Any] = [
        Size.of(f"axis_{axis}_of_{number}") if length is None else length
        for axis, length in enumerate(spec.shape)
    ]
    return Leaf(dims) if size is None else Leaf([size, *dims[1:]], Rows(0, (Block(batch),)))


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
