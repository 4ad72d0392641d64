"""Variables: a `keras.Variable` owns a `tf.Variable`, its storage.

To move a model to a strategy is to replace the storages, for which Keras has no public way.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random import seed_generator
from tensorflow.python.distribute import distribute_lib
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

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


class KeptOnce(ResourceVariable):
    """A variable that one replica keeps for all replicas of a strategy.

    Attributes:
        strategy: The strategy; None once there are copies again.
        refuse: Raises an error about an update of several copies.
    """

    strategy: tf.distribute.Strategy | None
    refuse: Callable[[], None]

    def assign(self, *args: Any, **kwargs: Any) -> Any:
        self._require_one_update()
        return super().assign(*args, **kwargs)

    def assign_add(self, *args: Any, **kwargs: Any) -> Any:
        self._require_one_update()
        return super().assign_add(*args, **kwargs)

    def assign_sub(self, *args: Any, **kwargs: Any) -> Any:
        self._require_one_update()
        return super().assign_sub(*args, **kwargs)

    def _require_one_update(self) -> None:
        # Keras's optimizers update each copy of a weight, and would update this variable once for
        # each. The replica ID is a number only during such an update.
        is_of_copies = isinstance(distribute_lib.get_update_replica_id(), int)
        if is_of_copies and self.strategy is not None:
            self.refuse()


def keep_once(
    storage: tf.Variable, strategy: tf.distribute.Strategy, refuse: Callable[[], None]
) -> None:
    """Make a variable one that a replica keeps for all replicas of a strategy."""
    storage.__class__ = KeptOnce
    storage.strategy, storage.refuse = strategy, refuse


def is_kept_once(storage: tf.Variable, strategy: tf.distribute.Strategy) -> bool:
    return isinstance(storage, KeptOnce) and storage.strategy is strategy


def keep_once_no_more(variables: Sequence[keras.Variable]) -> None:
    """Allow variables to have copies again."""
    for storage in storages_of(variables):
        if isinstance(storage, KeptOnce):
            storage.strategy = None


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
