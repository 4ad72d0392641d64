"""Global batches, and the replicas' shares of them.

Shares are contiguous and in replica order; see `keras_multigpu.batch_sizes`. Each leaf is cut by
its own number of rows, and a replica may get none. A leaf whose first axis is known to be 1
belongs to all examples, as in broadcasting, so every replica gets it whole. In a batch of one
example it is that example's, and goes to the first replica.
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


class Given(NamedTuple):
    """A batch that did not come in the form in which Keras packs it, such as `(x,)` for `x`."""

    x: Any
    y: Any
    sample_weight: Any


class OneGiven(Given):
    """A batch that came as a tuple of one."""


class TwoGiven(Given):
    """A batch that came as a tuple of two."""


class ThreeGiven(Given):
    """A batch that came as a tuple of three."""


GIVEN = {1: OneGiven, 2: TwoGiven, 3: ThreeGiven}

# The last one is `tf.NoneTensorSpec`, a name that TensorFlow 2.19 does not have.
ABSENT = (tf.experimental.Optional, tf.OptionalSpec, type(tf.type_spec_from_value(None)))
"""The placeholder for a missing array in a dataset."""


def is_one_row(leaf: Any) -> bool:
    """Whether a leaf is known to have a single row."""
    return leaf is not None and leaf.shape.rank != 0 and leaf.shape[0] == 1


def is_cut(leaf: Any) -> bool:
    """Whether replicas share the rows of a leaf."""
    return leaf is not None and leaf.shape.rank != 0 and not is_one_row(leaf)


def length_of(leaf: Any) -> int | tf.Tensor | None:
    """The number of rows of a leaf: an integer where it is static, None of an open spec."""
    if leaf.shape[0] is not None:
        return int(leaf.shape[0])
    if isinstance(leaf, tf.TypeSpec):
        return None
    ragged = isinstance(leaf, tf.RaggedTensor)
    return leaf.nrows(tf.int32) if ragged else tf.shape(leaf, tf.int32)[0]


def lengths_of(batch: Any) -> list[Any]:
    """The number of rows of each leaf that replicas share."""
    return [length_of(leaf) for leaf in keras.tree.flatten(batch) if is_cut(leaf)]


Groups = tuple[int, ...]
"""Which leaves of a batch have equally many rows: a group's number for each leaf that is cut.

The first leaf is in group 0; a leaf without rows is in group -1. Empty if there is one group only.
"""


def groups_of(lengths: Sequence[int | None]) -> Groups:
    """The groups of leaves with equally many rows; unknown numbers count as equal."""
    known = {lengths[0]: 0} if lengths else {}
    found = tuple(
        -1 if n == 0 and n not in known else known.setdefault(n, len(known)) for n in lengths
    )
    return found if any(found) else ()


class Rows(NamedTuple):
    """Some rows of a global batch: a replica's share, perhaps none, or a piece of it.

    Attributes:
        data: The rows of each leaf.
        own: How many rows the first leaf has here, as `counted`; or each leaf that is cut, where
            leaves may differ in length.
        whole: How many rows they have in the batch.
    """

    data: tuple[Any, Any, Any]
    own: tuple[tf.Tensor, ...]
    whole: tuple[tf.Tensor, ...]

    @property
    def examples(self) -> tf.Tensor:
        """How many examples these are."""
        return number_in(self.own[0])

    @property
    def global_batch_size(self) -> tf.Tensor:
        return number_in(self.whole[0])

    @property
    def is_here(self) -> bool:
        """Whether this process has the rows; otherwise it knows only how many they are."""
        return not all(
            leaf is None or isinstance(leaf, ABSENT) for leaf in keras.tree.flatten(self.data)
        )


class Shares(NamedTuple):
    """The shares of a batch.

    Attributes:
        rows: The rows of each replica, in all processes; of some only their numbers are known here.
        spec: The specs of the global batch; None if its source has one spec for all batches.
    """

    rows: tuple[Rows, ...]
    spec: Batch | None

    @property
    def groups(self) -> Groups:
        return groups_of([int(number_in(each)) for each in self.rows[0].whole])

    @property
    def sizes(self) -> int | list[int]:
        """How many rows the leaves of the batch have, or each leaf that is cut."""
        sizes = [int(number_in(each)) for each in self.rows[0].whole]
        return sizes if len(sizes) > 1 else sizes[0]


Here = tuple[bool, ...]
"""Which shares of a batch are in this process; empty if all are."""


def shares_here(rows: Sequence[Any]) -> Here:
    """Which shares, or specs of shares, are in this process."""
    # Shares that wait on the devices have lost their type, and are all here.
    here = tuple(not isinstance(each, Rows) or each.is_here for each in rows)
    return () if all(here) else here


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
    if len(shares) == 1:
        return shares[0].data

    def whole(leaf: Any, *parts: Any) -> Any:
        if not is_cut(leaf):
            return parts[0]
        if isinstance(leaf, tf.SparseTensorSpec):
            return tf.sparse.concat(axis=0, sp_inputs=list(parts))
        return tf.concat(parts, axis=0)

    flat = (keras.tree.flatten(part) for part in (spec, *(rows.data for rows in shares)))
    leaves = [whole(*each) for each in zip(*flat, strict=True)]
    batch: Batch = keras.tree.pack_sequence_as(spec, leaves)
    return batch


def shares_of(batch: Batch, replicas: int) -> tuple[Rows, ...]:
    """The rows of a global batch that belong to each replica."""
    size = batch_size_of(batch)
    leaves = keras.tree.flatten(batch)
    one_example = isinstance(size, int) and size == 1
    cuts = [is_cut(leaf) or (one_example and is_one_row(leaf)) for leaf in leaves]
    sizes = [length_of(leaf) for leaf, is_so in zip(leaves, cuts, strict=True) if is_so]
    alike = len({n if isinstance(n, int) else id(n) for n in sizes}) < 2
    sizes = [size] if alike else sizes
    counts = [share_sizes(n, replicas) for n in sizes]
    rest = itertools.cycle(counts)
    parts = [
        parts_of(leaf, next(rest)) if is_so else [leaf] * replicas
        for leaf, is_so in zip(leaves, cuts, strict=True)
    ]
    data = [keras.tree.pack_sequence_as(batch, list(own)) for own in zip(*parts, strict=True)]
    whole = tuple(map(counted, sizes))
    return tuple(
        Rows(own, tuple(counted(each[number]) for each in counts), whole)
        for number, own in enumerate(data)
    )


def counted(number: Any) -> tf.Tensor:
    """An empty tensor whose length is a number of rows.

    It goes with the rows to their device, and there its shape is known on the host, where steps
    need the number to make shapes. To read it from a GPU's memory they would wait for all that the
    GPU has been told to do before.
    """
    return tf.zeros([0, number])


def number_in(counted: tf.Tensor) -> tf.Tensor:
    """The number that `counted` was given."""
    if counted.shape[1] is not None:
        return tf.constant(counted.shape[1])
    # Beside its operation: elsewhere its shape would be known only after a copy.
    with counted.graph.colocate_with(counted.op):
        return tf.shape(counted)[1]


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


def shares_from_parts(parts: Sequence[Batch]) -> Shares:
    """The shares of a batch that was cut elsewhere."""
    sizes: list[Any] = [batch_size_of(part) for part in parts]
    # In a part of one example, a leaf of one row could belong to all examples.
    spec = open_spec(parts[int(np.argmax(sizes))])
    places = [place for place, leaf in enumerate(keras.tree.flatten(spec)) if is_cut(leaf)]
    leaves = [keras.tree.flatten(part) for part in parts]
    lengths = np.array([[length_of(own[place]) for place in places] for own in leaves])
    if np.all(lengths == lengths[:, :1]):
        lengths = lengths[:, :1]
    whole = tuple(map(counted, lengths.sum(axis=0)))
    shares = [
        Rows(part, tuple(map(counted, own)), whole)
        for part, own in zip(parts, lengths, strict=True)
    ]
    return Shares(tuple(shares), spec)


def batch_size_of(batch: Any) -> int | tf.Tensor | None:
    """The number of examples in a batch: an integer where it is static, None in open specs."""
    leaves = [leaf for leaf in present_leaves(batch) if leaf.shape.rank != 0]
    # A leaf of one row may belong to all examples, so it comes last.
    for leaf in sorted(leaves, key=is_one_row):
        return length_of(leaf)
    raise ValueError(
        "The batch holds no array with a batch axis. Expected at least one tensor of rank 1 or "
        f"more, with the examples along its first axis. Received: batch={batch}"
    )


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


def share_spec(spec: tuple[Any, Any, Any], replicas: int, groups: Groups = ()) -> Rows:
    """The specs of a replica's rows of a global batch; static where that divides evenly."""
    numbers = (tf.TensorSpec((0, None)),) * max(1, len(groups))

    def share(leaf: Any) -> Any:
        if replicas == 1 or leaf is None or leaf.shape.rank == 0:
            return leaf
        size = leaf.shape[0]
        return with_length(leaf, size // replicas if size and size % replicas == 0 else None)

    return Rows(keras.tree.map_structure(share, spec), numbers, numbers)


def open_spec(batch: Batch) -> Batch:
    """The specs of a batch with its number of examples left open."""
    one_example = batch_size_of(batch) == 1

    def opened(leaf: Any) -> Any:
        spec = specs_of(leaf)
        if spec is None or not spec.shape.rank or (is_one_row(spec) and not one_example):
            return spec
        return with_length(spec, None)

    return keras.tree.map_structure(opened, batch)


def sized_spec(spec: Batch, examples: int | Sequence[int]) -> Batch:
    """Specs whose open lengths are this number of examples, or a number for each leaf."""
    sizes = itertools.repeat(examples) if isinstance(examples, int) else iter(examples)

    def sized(leaf: Any) -> Any:
        if leaf is None or not leaf.shape.rank or is_one_row(leaf):
            return leaf
        size = next(sizes)
        return with_length(leaf, size) if leaf.shape[0] is None else leaf

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
        return sparse_tensor(leaf.tocoo())
    leaf = np.asarray(leaf) if not hasattr(leaf, "dtype") else leaf
    if np.issubdtype(leaf.dtype, np.floating) and leaf.dtype.itemsize > 2:
        return tf.convert_to_tensor(leaf, keras.config.floatx())
    return tf.convert_to_tensor(leaf)


def sparse_tensor(matrix: Any) -> tf.SparseTensor:
    indices = np.stack([matrix.row, matrix.col], axis=1).astype("int64")
    return tf.sparse.reorder(tf.SparseTensor(indices, as_tensor(matrix.data), matrix.shape))


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
    shape = [length, *spec.shape[1:]]
    if isinstance(spec, tf.RaggedTensorSpec):
        return tf.RaggedTensorSpec(shape, spec.dtype, spec.ragged_rank, spec.row_splits_dtype)
    return type(spec)(shape, spec.dtype)


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
