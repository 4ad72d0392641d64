"""Global batches, and the replicas' shares of them.

Shares are contiguous and in replica order; see `keras_multigpu.batch_sizes`. A leaf as long as the
batch's first one has a row for each example. These rows are shared out, and a replica may get none.
Every replica gets all other leaves whole, such as one with a single row, which belongs to all
examples, as in broadcasting. In a batch of one example it is that example's, and goes to the first
replica.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds

Batch = tuple[Any, Any, Any]
"""A global batch, `(x, y, sample_weight)`: tensors or their specs."""


class BatchForm(NamedTuple):
    """A batch that did not come in the form in which Keras packs it, such as `(x,)` for `x`."""

    x: Any
    y: Any
    sample_weight: Any


class OneGiven(BatchForm):
    """A batch that came as a tuple of one."""


class TwoGiven(BatchForm):
    """A batch that came as a tuple of two."""


class ThreeGiven(BatchForm):
    """A batch that came as a tuple of three."""


GIVEN = {1: OneGiven, 2: TwoGiven, 3: ThreeGiven}

# The last one is `tf.NoneTensorSpec`, a name that TensorFlow 2.19 does not have.
ABSENT = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
"""The placeholder for a missing array in a dataset."""


class Whole:
    """Marks the spec of a leaf of open length that is not as long as the batch."""


WHOLE = {
    kind: type(f"Whole{kind.__name__}", (Whole, kind), {})
    for kind in (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)
}
"""The specs of leaves that each replica gets whole, by those of others."""


def is_one_row(leaf: Any) -> bool:
    """Whether a leaf is known to have a single row."""
    return leaf is not None and leaf.shape.rank != 0 and leaf.shape[0] == 1


def length_of(leaf: Any) -> int | tf.Tensor | None:
    """The number of rows of a leaf: an integer where it is static, None of an open spec."""
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    if isinstance(leaf, tf.TypeSpec):
        return None
    ragged = isinstance(leaf, tf.RaggedTensor)
    return leaf.nrows(tf.int32) if ragged else tf.shape(leaf, tf.int32)[0]


def first_leaf(leaves: Sequence[Any]) -> int:
    """The place of the leaf whose rows are the examples."""
    places = [n for n, leaf in enumerate(leaves) if leaf is not None and leaf.shape.rank != 0]
    if not places:
        raise ValueError(
            "The batch holds no array with a batch axis. Expected at least one tensor of rank 1 or "
            f"more, with the examples along its first axis. Received: batch={leaves}"
        )
    # A leaf of one row may belong to all examples, so it comes last.
    return min(places, key=lambda place: is_one_row(leaves[place]))


def batch_size_of(batch: Any) -> int | tf.Tensor | None:
    """The number of examples in a batch: an integer where it is static, None in open specs."""
    leaves = keras.tree.flatten(batch)
    return length_of(leaves[first_leaf(leaves)])


def have_rows(batch: Any) -> list[bool]:
    """For each leaf of a batch, whether it has a row for each example, as far as is known."""
    leaves = keras.tree.flatten(batch)
    size = leaves[first_leaf(leaves)].shape[0]

    def has_rows(leaf: Any) -> bool:
        if leaf is None or leaf.shape.rank == 0 or is_one_row(leaf) or isinstance(leaf, Whole):
            return False
        return size is None or leaf.shape[0] in (None, size)

    return [has_rows(leaf) for leaf in leaves]


def are_cut(batch: Any) -> list[bool]:
    """For each leaf of a batch, whether its rows are shared out."""
    leaves = keras.tree.flatten(batch)
    if is_one_row(leaves[first_leaf(leaves)]):
        return list(map(is_one_row, leaves))
    return have_rows(batch)


class Rows(NamedTuple):
    """A replica's rows of a global batch, perhaps none.

    Attributes:
        data: The rows of each leaf; None if another process has them.
        examples: How many examples these are.
        global_batch_size: How many there are in all.
    """

    data: Any
    examples: tf.Tensor
    global_batch_size: tf.Tensor


class Shares(NamedTuple):
    """The shares of a batch.

    Attributes:
        leaves: For each replica its leaves of the batch; none if they are in another process.
        spec: The specs of the global batch.
        is_usual: Whether all batches of the source have these specs.
        size: The number of examples, if this process has its own replicas' rows only.
    """

    leaves: Sequence[Sequence[Any]]
    spec: Batch
    is_usual: bool = False
    size: tf.Tensor | None = None

    @property
    def counts(self) -> list[int]:
        """How many examples each replica has."""
        return list(map(int, self.numbers))

    @property
    def numbers(self) -> list[tf.Tensor]:
        """How many examples each replica has, as tensors.

        A tensor's length is known on the host, even if it is on a GPU. To read a number from there,
        a step would wait for all that the GPU has been told to do before.
        """
        if self.size is not None:
            count = len(self.leaves)
            return list(tf.unstack(share_sizes(self.size, count), count))
        place = first_leaf(present_leaves(self.spec))
        return [number_of(leaves[place]) for leaves in self.leaves]

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The rows of each replica, and how many they are."""
        numbers, total = self.numbers, self.size
        if total is None:
            total = numbers[0] if len(numbers) == 1 else tf.add_n(numbers)
        return tuple(
            Rows(with_leaves(self.spec, leaves) if leaves else None, number, total)
            for leaves, number in zip(self.leaves, numbers, strict=True)
        )


def number_of(leaf: Any) -> tf.Tensor:
    """The number of rows of a leaf, as a tensor beside it."""
    if tf.executing_eagerly() or leaf.shape[0] is not None:
        return tf.convert_to_tensor(length_of(leaf))
    # Elsewhere the leaf would be copied for its shape.
    first = tf.nest.flatten(leaf, expand_composites=True)[0]
    with first.graph.colocate_with(first.op):
        return length_of(leaf)


def are_here(rows: Sequence[Rows]) -> bool:
    """Whether this process has the rows of all replicas."""
    return all(each.data is not None for each in rows)


def present_leaves(structure: Any) -> list[Any]:
    return [leaf for leaf in keras.tree.flatten(structure) if leaf is not None]


def with_leaves(structure: Any, leaves: Sequence[Any]) -> Any:
    """A structure with these leaves in place of those that are not None."""
    remaining = iter(leaves)
    return keras.tree.map_structure(
        lambda leaf: None if leaf is None else next(remaining), structure
    )


def join_shares(shares: Sequence[Rows], spec: Batch) -> Batch:
    """The global batch of these specs, from the rows of all replicas."""
    batch: Batch = shares[0].data
    if len(shares) == 1:
        return batch
    parts = zip(*(present_leaves(rows.data) for rows in shares), strict=True)
    are_so = have_rows(present_leaves(spec))
    leaves = [joined(each) if is_so else each[0] for each, is_so in zip(parts, are_so, strict=True)]
    batch = with_leaves(spec, leaves)
    return batch


def joined(parts: Sequence[Any]) -> Any:
    """Consecutive rows of a leaf, together."""
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=list(parts))
    return tf.concat(parts, axis=0)


def shares_of(batch: Batch, replicas: int) -> list[list[Any]]:
    """The leaves that each replica gets of a global batch."""
    leaves = present_leaves(batch)
    parts = [
        parts_of(leaf, share_sizes(length_of(leaf), replicas)) if is_so else [leaf] * replicas
        for leaf, is_so in zip(leaves, are_cut(leaves), strict=True)
    ]
    return list(map(list, zip(*parts, strict=True)))


def share_sizes(size: int | tf.Tensor, replicas: int) -> Any:
    # What NumPy computes is a constant of the graph.
    numbers = np.arange(replicas) if isinstance(size, int) else tf.range(replicas)
    starts, stops = share_bounds(size, numbers, replicas)
    return stops - starts


def parts_of(leaf: Any, counts: Any) -> list[Any]:
    """A leaf of a batch cut into consecutive parts of these sizes."""
    (count,) = counts.shape
    if count == 1:
        return [leaf]
    if isinstance(leaf, tf.Tensor):
        return list(tf.split(leaf, counts, num=count))
    # `tf.split` takes dense tensors only.
    stops = tf.unstack(tf.cumsum(counts), count)
    return [cut(leaf, *each) for each in itertools.pairwise([0, *stops])]


def cut(leaf: Any, start: Any, stop: Any) -> Any:
    """Rows of a leaf of a batch; scalars and None as they are."""
    if leaf is None or leaf.shape.rank == 0:
        return leaf
    if isinstance(leaf, tf.SparseTensor):
        start, stop = tf.cast(start, tf.int64), tf.cast(stop, tf.int64)
        begin = tf.concat([[start], tf.zeros([leaf.shape.rank - 1], tf.int64)], axis=0)
        size = tf.concat([[stop - start], leaf.dense_shape[1:]], axis=0)
        return tf.sparse.slice(leaf, begin, size)
    return leaf[start:stop]


def share_spec(spec: Batch, replicas: int) -> list[Any]:
    """The specs of a replica's leaves of a global batch; static where that divides evenly."""

    def share(leaf: Any, has_rows: bool) -> Any:
        if replicas == 1 or not (has_rows or is_one_row(leaf)):
            return leaf
        size = leaf.shape[0]
        return with_length(leaf, size // replicas if size and size % replicas == 0 else None)

    leaves = present_leaves(spec)
    return list(map(share, leaves, have_rows(leaves)))


def open_spec(batch: Batch) -> Batch:
    """The specs of a batch with its number of examples left open."""

    def opened(leaf: Any, is_so: bool) -> Any:
        spec = spec_of(leaf)
        if not spec.shape.rank or (is_one_row(spec) and not is_so):
            return spec
        return with_length(spec if is_so else whole_spec(spec), None)

    leaves = present_leaves(batch)
    found: Batch = with_leaves(batch, list(map(opened, leaves, are_cut(leaves))))
    return found


def whole_spec(spec: Any) -> Any:
    """The spec of a leaf that each replica gets whole."""
    return with_shape(spec, spec.shape, WHOLE.get(type(spec)))


def sized_spec(spec: Batch, examples: int) -> Batch:
    """The specs with this number of examples, where it is open."""

    def sized(leaf: Any) -> Any:
        if leaf is None or not leaf.shape.rank or leaf.shape[0] is not None:
            return leaf
        return with_length(leaf, examples)

    return keras.tree.map_structure(sized, spec)


def normalized(batch: Any) -> Batch:
    """A batch as `(x, y, sample_weight)` of tensors or specs; None for missing parts."""
    parts = tuple(keras.tree.lists_to_tuples(keras.utils.unpack_x_y_sample_weight(batch)))
    if isinstance(batch, (tuple, list)):
        packed = keras.utils.pack_x_y_sample_weight(*parts)
        if not isinstance(packed, tuple) or len(packed) != len(batch):
            parts = GIVEN[len(batch)](*parts)
    return keras.tree.map_structure(as_tensor, parts)


def as_given(batch: Batch) -> Any:
    """A batch in the form in which it came, as Keras gives it to a step."""
    for count, form in GIVEN.items():
        if isinstance(batch, form):
            return tuple(batch)[:count]
    return keras.utils.pack_x_y_sample_weight(*batch)


def as_tensor(leaf: Any) -> Any:
    """A leaf of a batch as a tensor, in Keras's float type where it is a float array."""
    if leaf is None or isinstance(leaf, ABSENT):
        return None
    if tf.is_tensor(leaf) or isinstance(leaf, tf.TypeSpec):
        return leaf
    # A SciPy matrix, recognised by its methods: SciPy need not be installed.
    if hasattr(leaf, "tocoo"):
        matrix = leaf.tocoo()
        indices = np.stack([matrix.row, matrix.col], axis=1).astype("int64")
        return tf.sparse.reorder(tf.SparseTensor(indices, as_tensor(matrix.data), matrix.shape))
    leaf = np.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
    if np.issubdtype(leaf.dtype, np.floating) and leaf.dtype.itemsize > 2:
        return tf.convert_to_tensor(leaf, keras.config.floatx())
    return tf.convert_to_tensor(leaf)


def specs_of(tensors: Any) -> Any:
    return keras.tree.map_structure(spec_of, tensors)


def spec_of(value: Any) -> Any:
    if value is None or isinstance(value, tf.TypeSpec):
        return value
    if isinstance(value, keras.Variable):
        return tf.TensorSpec(value.shape, value.dtype)
    return tf.type_spec_from_value(value)


def with_length(spec: Any, length: int | None) -> Any:
    """The same spec with another length of its first axis."""
    return with_shape(spec, [length, *spec.shape[1:]])


def with_shape(spec: Any, shape: Sequence[int | None], kind: Any = None) -> Any:
    """The same spec with another shape, perhaps of another kind."""
    more = []
    if isinstance(spec, tf.RaggedTensorSpec):
        more = [spec.ragged_rank, spec.row_splits_dtype]
    return (kind or type(spec))(shape, spec.dtype, *more)


def symbolic(specs: Any) -> Any:
    """Specs in the form that `model_internals.symbolic_call` takes."""

    def stand_in(spec: Any) -> Any:
        if spec is None or isinstance(spec, tf.RaggedTensorSpec):
            return spec
        sparse = isinstance(spec, tf.SparseTensorSpec)
        return keras.KerasTensor(spec.shape, spec.dtype.name, sparse=sparse)

    return keras.tree.map_structure(stand_in, specs)


def tensors_of(structure: Any) -> list[tf.Tensor]:
    """The tensors in a nested structure, including the components of sparse and ragged ones."""
    leaves = tf.nest.flatten(structure, expand_composites=True)
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


def held_until(time: tf.Tensor, structure: Any) -> Any:
    """The structure, with tensors that wait until this time has been taken."""
    with tf.control_dependencies([time]):
        return tf.nest.map_structure(
            lambda leaf: tf.identity(leaf) if isinstance(leaf, tf.Tensor) else leaf,
            structure,
            expand_composites=True,
        )
