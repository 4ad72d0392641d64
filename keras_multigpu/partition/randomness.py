"""A replica's rows of random numbers: those that one device draws, without drawing the others.

TensorFlow's stateless generators run Philox with a counter: block n of a draw follows from the
counter's start plus n. So a draw can begin in the middle, to the bit. What rejects samples, such as
a truncated normal or a gamma, takes an unknown number of blocks, and is drawn whole.
"""

import tensorflow as tf

from keras_multigpu.partition.layouts import Block, Rows
from keras_multigpu.partition.local_numbers import LocalNumbers
from keras_multigpu.partition.plan import Facts

# The place of the counter and of the algorithm among their inputs is 2 and 3.
SLICED = {
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
}
# What is drawn whole, and by the others that have a state: by one replica for all.
DRAWS = {
    *SLICED,
    "StatelessTruncatedNormalV2",
    "StatelessRandomGammaV3",
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}
PHILOX, CHOSEN_BY_DEVICE = 1, 3


def has_slices(op: tf.Operation, compiled: bool) -> bool:
    """Whether an operation can draw a part of its random numbers.

    Args:
        op: The operation.
        compiled: Whether XLA compiles it.
    """
    # XLA makes pairs of normal numbers of the two halves of a tensor, so its shape decides.
    if op.type not in SLICED or (compiled and op.type == "StatelessRandomNormalV2"):
        return False
    algorithm = tf.get_static_value(op.inputs[3])
    if algorithm is None:
        # What a device chooses is Philox, unless XLA compiles for a TPU.
        return op.inputs[3].op.type == "StatelessRandomGetAlg"
    return int(algorithm) in (PHILOX, CHOSEN_BY_DEVICE)


def skipped_ahead(state: tf.Tensor, numbers: tf.Tensor) -> tf.Tensor:
    """The state of a `tf.random.Generator` after this many numbers were drawn by Philox."""
    low, high, key = tf.unstack(state, num=3)
    # Kernels take 256 blocks for each, which is enough for what rejects samples.
    after = low + 256 * tf.cast(numbers, tf.int64)
    # The counter has 128 bits, without a sign.
    carried = after + tf.int64.min < low + tf.int64.min
    return tf.stack([after, high + tf.cast(carried, tf.int64), key])


def rows_drawn(op: tf.Operation, facts: Facts) -> Rows | None:
    """The layout of a draw with one row for each example, such as the noise of a GAN."""
    dims = facts.dims(op.outputs[0]) if op.type in DRAWS else None
    # One number for each example may be there to put them in another order, which needs all.
    if dims is None or len(dims) < 2:
        return None
    for batch, size in facts.batches.items():
        if dims[0] == size:
            return Rows(0, (Block(batch),))
    return None


def drawn(
    op: tf.Operation, inputs: list[tf.Tensor], rows: Rows, numbers: LocalNumbers
) -> tf.Tensor:
    """A replica's rows of the first axis of a draw.

    Args:
        op: The operation that draws all.
        inputs: Its inputs.
        rows: The layout that is wanted, on the first axis.
        numbers: What the replica knows of its rows.
    """
    shape, key, counter, algorithm, *bounds = inputs
    dtype = op.outputs[0].dtype
    # A block makes four values of 32 bits or fewer, or two of 64.
    values = 2 if dtype.size == 8 else 4
    rest = shape[1:]
    width = tf.reduce_prod(tf.cast(rest, tf.int64))
    parts = []
    for start, length in numbers.ranges(rows.blocks):
        first = tf.cast(start, tf.int64) * width
        block = first // values
        surplus = first - block * values
        count = tf.cast(length, tf.int64) * width
        attributes = {"minval": bounds[0], "maxval": bounds[1]} if bounds else {"dtype": dtype}
        drawn_from = tf.stack([counter[0] + tf.cast(block, tf.uint64), counter[1]])
        if op.type == "StatelessRandomUniformFullIntV2":
            attributes = {"dtype": dtype}
        flat = getattr(tf.raw_ops, op.type)(
            # As many for each replica: to XLA on a TPU sizes must not depend on which it is.
            shape=tf.reshape(values - 1 + count, [1]),
            key=key,
            counter=drawn_from,
            alg=algorithm,
            **attributes,
        )
        own = tf.concat([[tf.cast(length, rest.dtype)], rest], axis=0)
        taken = tf.slice(flat, tf.reshape(surplus, [1]), tf.reshape(count, [1]))
        parts.append(tf.reshape(taken, own))
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
