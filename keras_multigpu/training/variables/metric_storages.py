"""Where the values of metrics live: once, or in parts on the replicas.

Keras's steps update a metric once, with the global batch. A step that the user has written updates
it on every replica, with the replica's rows, and its value is the sum of the parts. A model may
train in one way and be evaluated in the other, so values move between the two.
"""

from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.training.replica_group import home_device
from keras_multigpu.training.replica_group import scope_of
from keras_multigpu.training.variables.placement import copied


class MetricStorages:
    """The two storages of each metric variable, made when they are first needed.

    Steps are compiled for one of the two, so none is ever made twice.

    Args:
        strategy: Where the model lives.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        local = len(strategy.extended.worker_devices)
        self._is_spread = local < strategy.num_replicas_in_sync
        self._made: dict[tuple[int, bool], tuple[keras.Variable, tf.Variable]] = {}

    def use(self, variables: Sequence[keras.Variable], in_parts: bool) -> None:
        """Let variables live once, or in parts on the replicas; their values are kept."""
        in_parts = in_parts and home_device(self._strategy) is None
        for variable in variables:
            storage = keras_internals.variable_storage(variable)
            if storage is None or is_in_parts(storage) == in_parts:
                continue
            value = storage.numpy()
            # The variable is kept too, so that no other one gets its identity.
            self._made[id(variable), not in_parts] = variable, storage
            if (id(variable), in_parts) not in self._made:
                self._made[id(variable), in_parts] = variable, self._new(variable, in_parts)
            _, storage = self._made[id(variable), in_parts]
            give(storage, value, everywhere=self._is_spread)
            keras_internals.set_variable_storage(variable, storage)

    def _new(self, variable: keras.Variable, in_parts: bool) -> tf.Variable:
        zeros = np.zeros(
            variable.shape, keras_internals.variable_storage(variable).dtype.as_numpy_dtype
        )
        if in_parts and self._is_spread:
            # Processes would have to meet whenever one of them reads a value in parts.
            return copied(variable, zeros, self._strategy)
        options = {"dtype": zeros.dtype, "name": variable.name}
        if not in_parts:
            with tf.init_scope(), keras_internals.single_device():
                return tf.Variable(zeros, **options)
        with tf.init_scope(), scope_of(self._strategy):
            return tf.Variable(
                zeros,
                aggregation=tf.VariableAggregation.SUM,
                synchronization=tf.VariableSynchronization.ON_READ,
                **options,
            )


def give(storage: tf.Variable, value: np.ndarray, everywhere: bool = False) -> None:
    """Let a storage have a value; where it is in parts, the first has it all.

    Args:
        storage: The storage.
        value: The value.
        everywhere: Whether each part is a copy.
    """
    first, *others = storage.values if is_in_parts(storage) else [storage]
    first.assign(value)
    for part in others:
        part.assign(value if everywhere else np.zeros_like(value))


def is_in_parts(storage: tf.Variable) -> bool:
    """Whether each replica has a part of the value, or a copy of it."""
    return isinstance(storage, tf.distribute.DistributedValues)
