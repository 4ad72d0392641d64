"""How replicas agree on variables that a forward pass changes.

Each replica starts a step with equal values and ends it with its own: BatchNorm's moving
statistics, counters, spectral norms. `contribution` is what a replica adds to a sum over
replicas; from the sum, `merged` makes the common new value.

    float variables          mean of the replicas' values, weighted by their examples
    aggregation="sum"        old value + what all replicas added
    integers, booleans, and
    "only_first_replica"     the first replica's value

A replica without examples adds nothing, so it cannot poison the others.
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
    if variable.aggregation == "sum":
        return new - old
    if not new.dtype.is_floating or variable.aggregation == "only_first_replica":
        summable = tf.cast(new, tf.int32) if new.dtype == tf.bool else new
        return tf.where(tf.equal(replica, 0), summable, tf.zeros_like(summable))
    return new * tf.cast(fraction, new.dtype)


def merged(variable: keras.Variable, old: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """The common new value, from the sum of all contributions."""
    if variable.aggregation == "sum":
        return old + total
    return tf.cast(total, old.dtype)
