"""How replicas agree on variables that a forward pass changes.

Each replica starts a step with equal values and ends it with its own: BatchNorm's moving
statistics, counters, spectral norms, the state of metrics. `contribution` is what a replica
adds to a sum over replicas; from the sum, `merged` makes the common new value.

    aggregation="sum", as
    the state of metrics     old value + what all replicas added
    float variables          mean of the replicas' values, weighted by their examples
    integers, booleans, and
    "only_first_replica"     the first replica's value

On a single replica each of them is the new value itself. A replica without examples adds
nothing, so it cannot poison the others.
"""

import keras
import tensorflow as tf


def contribution(
    variable: keras.Variable,
    old: tf.Tensor,
    new: tf.Tensor,
    fraction: tf.Tensor,
    replica: tf.Tensor,
) -> tf.Tensor:
    """One replica's summand of a variable's common value.

    Args:
        variable: The variable, for its aggregation.
        old: The value before the step, equal on all replicas.
        new: The value after this replica's forward pass.
        fraction: The replica's examples divided by the global batch size.
        replica: The replica's index.
    """
    first = tf.equal(replica, 0)
    new, old = (tf.cast(value, summable(value.dtype)) for value in (new, old))
    if variable.aggregation == "sum":
        return new - tf.where(first, tf.zeros_like(old), old)
    if not new.dtype.is_floating or variable.aggregation == "only_first_replica":
        return tf.where(first, new, tf.zeros_like(new))
    return new * tf.cast(fraction, new.dtype)


def merged(old: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """The common new value, from the sum of all contributions."""
    return tf.cast(total, old.dtype)


def summable(dtype: tf.DType) -> tf.DType:
    """The type in which values are summed: one that all devices can sum, without loss."""
    if dtype in (tf.float16, tf.bfloat16):
        return tf.float32
    # TensorFlow keeps int32 on the host, and sums what is on the host apart from the rest.
    return tf.int64 if dtype.is_integer or dtype.is_bool else dtype
