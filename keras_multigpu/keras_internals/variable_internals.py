"""Variables: a `keras.Variable` owns a `tf.Variable`, its storage.

To move a model to a strategy is to replace the storages, for which Keras has no public way.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.eager import record
from tensorflow.python.ops.resource_variable_ops import (
    BaseResourceVariable,
    UninitializedVariable,
    variable_accessed,
)
from tensorflow.python.trackable.base import VARIABLE_VALUE_KEY

from keras_multigpu.keras_internals.model_internals import layers_of


def variable_storage(variable: keras.Variable) -> Any:
    """The `tf.Variable` behind a Keras variable; None before its initialization."""
    # Optimizers accept TensorFlow's variables too.
    return variable if isinstance(variable, tf.Variable) else variable._value


def storages_of(variables: Sequence[keras.Variable]) -> list[Any]:
    return [variable._value for variable in variables]


def set_storages(variables: list[keras.Variable], storages: list[tf.Variable]) -> None:
    """Give each Keras variable another storage."""
    for variable, storage in zip(variables, storages, strict=True):
        variable._value = storage


def make_usual(storages: list[tf.Variable]) -> None:
    """Let storages do what Keras and optimizers expect of any `tf.Variable`."""
    # TensorFlow's mirrored variables lack `float()` and `int()`, so that
    # `float(model.optimizer.learning_rate)` would fail.
    for storage in storages:
        for name, kind in (("__float__", float), ("__int__", int)):
            if not hasattr(type(storage), name):
                setattr(type(storage), name, lambda self, kind=kind: kind(self.numpy()))
        if isinstance(storage, tf.distribute.DistributedValues):
            updated_by_others(storage)


class EveryCopy:
    """A variable whose copies are all assigned, and of which the first is read."""

    def __init__(self, copies: tuple[tf.Variable, ...]) -> None:
        self._copies = copies

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._copies[0], dtype, name=name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("assign", "scatter")):
            return getattr(self._copies[0], name)
        return lambda *args, **kwargs: [
            getattr(copy, name)(*args, **kwargs) for copy in self._copies
        ][0]


def updated_by_others(storage: tf.Variable) -> None:
    """Let the optimizer of a plain model update a variable of a distributed model's layer."""
    # TensorFlow then asks for the copy of a replica whose number is the variable itself.
    one_copy = storage._get_replica
    every = EveryCopy(storage.values)
    storage._get_replica = lambda replica: (
        every if isinstance(replica, tf.distribute.DistributedValues) else one_copy(replica)
    )


class StandIn(UninitializedVariable):
    """A variable in parts, as a graph of one device takes it: a handle without a value.

    Attributes:
        stands_for: The variable.
    """

    stands_for: "VariableInParts"

    def empty(self) -> None:
        """Drop the value, to free its memory."""
        # Otherwise TensorFlow would refuse another shape.
        nothing = tf.compat.v1.placeholder_with_default(tf.zeros([0], self.dtype), None)
        tf.raw_ops.AssignVariableOp(resource=self.handle, value=nothing)


class VariableInParts(BaseResourceVariable):
    """A variable whose rows other variables hold. It reads as one, and is assigned as one.

    Args:
        parts: These variables, in the order of the rows.
        axis: The axis of the rows.
        refuse: Raises an error about an update for each copy of a weight.

    Attributes:
        stand_in: What a graph of one device takes in its place.
    """

    def __init__(self, parts: Sequence[tf.Variable], axis: int, refuse: Callable[[], None]) -> None:
        self.parts, self.axis, self._refuse = tuple(parts), axis, refuse
        self._ends = np.cumsum([0, *(part.shape[axis] for part in parts)]).tolist()
        shape = parts[0].shape.as_list()
        shape[axis] = self._ends[-1]
        kind = {"shape": shape, "dtype": parts[0].dtype, "trainable": parts[0].trainable}
        name = parts[0].name.partition(":")[0]
        # Where it gets a value, for a moment, memory is not scarce.
        with tf.init_scope(), tf.device("/device:CPU:0"):
            self.stand_in = StandIn(name=name, validate_shape=False, **kind)
        self.stand_in.stands_for = self
        super().__init__(
            handle=self.stand_in.handle,
            handle_name=name,
            unique_id=self.stand_in._unique_id,
            in_graph_mode=False,
            **kind,
        )

    # All ways to read a variable end here, but for those below.
    def _read_variable_op(self, no_copy: bool = False) -> tf.Tensor:
        variable_accessed(self)
        with record.stop_recording():
            whole = tf.concat([part.read_value() for part in self.parts], self.axis)
        # A tape asked for the gradient of this variable knows nothing of the parts.
        record.record_operation("ReadVariableOp", [whole], [self.handle], lambda made: [made])
        return whole

    def numpy(self) -> np.ndarray:
        # On the host: one device may not have the memory.
        return np.concatenate([part.numpy() for part in self.parts], self.axis)

    def sparse_read(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather(self.read_value(), indices)

    def gather_nd(self, indices: Any, name: str | None = None) -> tf.Tensor:
        return tf.gather_nd(self.read_value(), indices)

    def is_initialized(self, name: str | None = None) -> tf.Tensor:
        return tf.constant(True)

    def assign(self, value: Any, *_: Any, **__: Any) -> "VariableInParts":
        return self._assign("assign", value)

    def assign_add(self, delta: Any, *_: Any, **__: Any) -> "VariableInParts":
        return self._assign("assign_add", delta)

    def assign_sub(self, delta: Any, *_: Any, **__: Any) -> "VariableInParts":
        return self._assign("assign_sub", delta)

    def _assign(self, method: str, value: Any) -> "VariableInParts":
        # In a loop of the user's each replica would assign all parts, or do so for each copy of a
        # weight: the replica's ID is a number only during such an update.
        is_replicas = tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context()
        if is_replicas or isinstance(distribute_lib.get_update_replica_id(), int):
            self._refuse()
        if not isinstance(value, np.ndarray):
            value = tf.convert_to_tensor(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        before = (slice(None),) * self.axis
        for part, start, stop in zip(self.parts, self._ends, self._ends[1:], strict=False):
            getattr(part, method)(value[(*before, slice(start, stop))], read_value=False)
        return self

    def _restore_from_tensors(self, restored_tensors: Any) -> "VariableInParts":
        return self.assign(restored_tensors[VARIABLE_VALUE_KEY])


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """The distinct states of all seed generators in a model."""
    states = {}
    for layer in layers_of(model):
        for generator in layer._seed_generators:
            states[id(generator.state)] = generator.state
    return list(states.values())


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a seed generator, judged by its name."""
    return variable.name == "seed_generator_state"


GLOBAL_SEED_GENERATOR = "global_seed_generator"
"""Keras's key for the generator, a constant of Keras since 3.13."""


def global_seed_state() -> keras.Variable:
    """The state that Keras's random functions use without a seed."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if generator is None:
        generator = UndrawnGenerator()
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    return generator.state


class UndrawnGenerator(keras.random.SeedGenerator):
    """Keras's global seed generator, made before it is needed."""

    def __init__(self) -> None:
        # Keras makes it at the first random function without a seed, and then draws its seed from
        # Python's random numbers. Their state must not advance earlier, or a model made after `fit`
        # would start with other weights.
        before = random.getstate()
        # The seed that Keras would draw next. `next` advances the state.
        super().__init__(seed_generator.make_default_seed(), name="global_seed_generator")
        random.setstate(before)
        self._is_drawn = False

    def next(self, ordered: bool = True) -> Any:
        if not self._is_drawn:
            seed_generator.make_default_seed()
            self._is_drawn = True
        return super().next(ordered)
