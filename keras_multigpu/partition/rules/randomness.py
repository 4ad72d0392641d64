"""A replica's rows of random numbers: those of one device, without drawing the other rows.

TensorFlow's stateless generators run Philox with a counter: block n of a draw depends only on the
start of the counter plus n. So a draw can begin in the middle, and is the same bit for bit. Draws
that reject samples, such as a truncated normal or a gamma, take an unknown number of blocks; every
replica draws all of them.
"""

import math

import tensorflow as tf

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.layouts import Block, Rows
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.replica import Replica

# Input 2 is the counter, and input 3 the algorithm.
SLICED = {
    "StatelessRandomUniformV2",
    "StatelessRandomNormalV2",
    "StatelessRandomUniformIntV2",
    "StatelessRandomUniformFullIntV2",
}
# Of the others every replica draws all rows; of those with a state, the first replica for all.
STATELESS = {*SLICED, "StatelessTruncatedNormalV2", "StatelessRandomGammaV3"}
DRAWS = {
    *STATELESS,
    "RandomStandardNormal",
    "RandomUniform",
    "RandomUniformInt",
    "TruncatedNormal",
}
PHILOX, CHOSEN_BY_DEVICE = 1, 3


def has_slices(op: Operation, compiled: bool) -> bool:
    """Whether an operation, perhaps compiled by XLA, can draw a part of its random numbers."""
    # XLA pairs the normal numbers of the two halves of a tensor, so they depend on its shape.
    if op.type not in SLICED or (compiled and op.type == "StatelessRandomNormalV2"):
        return False
    algorithm = op.inputs[3].constant
    if algorithm is None:
        # The device chooses, and all but TPUs choose Philox.
        return op.inputs[3].op.type == "StatelessRandomGetAlg"
    return int(algorithm) in (PHILOX, CHOSEN_BY_DEVICE)


def skip_ahead(state: tf.Tensor, count: tf.Tensor) -> tf.Tensor:
    """The state of a `tf.random.Generator` after Philox has drawn this many numbers."""
    low, high, key = tf.unstack(state, num=3)
    # Kernels skip 256 blocks for each, which is enough for those that reject samples.
    after = low + 256 * tf.cast(count, tf.int64)
    # The counter has 128 bits without a sign.
    carried = after + tf.int64.min < low + tf.int64.min
    return tf.stack([after, high + tf.cast(carried, tf.int64), key])


def rows_drawn(op: Operation, facts: Facts) -> Rows | None:
    """The layout of a draw with one row for each example, such as the noise of a GAN."""
    dims = facts.dims(op.outputs[0]) if op.type in DRAWS else None
    # One number for each example often serves to shuffle the examples, which needs all of them.
    if dims is None or len(dims) < 2:
        return None
    for batch, size in facts.batches.items():
        if dims[0] == size:
            return Rows(0, (Block(batch),))
    return None


def draw_rows(op: Operation, inputs: list[tf.Tensor], rows: Rows, replica: Replica) -> tf.Tensor:
    """A replica's rows, along the first axis, of what an operation draws."""
    shape, key, counter, algorithm, *bounds = inputs
    dtype = op.outputs[0].dtype
    attributes = {"minval": bounds[0], "maxval": bounds[1]} if bounds else {"dtype": dtype}
    # A block makes four values of up to 32 bits, or two of 64.
    values = 2 if dtype.size == 8 else 4
    with replica.on_host():
        dims = enumerate(op.outputs[0].shape[1:], start=1)
        rest = [shape[n] if dim is None else dim for n, dim in dims]
        width = math.prod(tf.cast(dim, tf.int64) for dim in rest)
    parts = []
    for start, length in replica.ranges(rows.blocks):
        with replica.on_host():
            first = tf.cast(start, tf.int64) * width
            block = first // values
            surplus = tf.reshape(first - block * values, [1])
            count = tf.reshape(tf.cast(length, tf.int64) * width, [1])
            # Not `surplus + count`: to XLA on a TPU, sizes must not depend on the replica.
            drawn = values - 1 + count
            own = tf.stack([tf.cast(length, shape.dtype), *rest])
        flat = getattr(tf.raw_ops, op.type)(
            shape=drawn,
            key=key,
            counter=tf.stack([counter[0] + tf.cast(block, tf.uint64), counter[1]]),
            alg=algorithm,
            **attributes,
        )
        parts.append(tf.reshape(tf.slice(flat, surplus, count), own))
    return parts[0] if len(parts) == 1 else tf.concat(parts, axis=0)
