"""Builds a model, and moves the variables of the model and its optimizers to a strategy.

Every variable that a training step changes has a copy on each replica, which assigns it by itself.
The copies stay equal because each replica computes the same new value. Metrics, and variables that
the model does not track, live once in each process.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import (
    cluster_internals,
    compile_internals,
    graph_internals,
    model_internals,
    optimizer_internals,
    variable_internals,
)
from keras_multigpu.keras_internals.variable_internals import StandIn, VariableInParts
from keras_multigpu.training.replica_group import HOST, ReplicaGroup, copies_in, copies_of
from keras_multigpu.training.shares import Batch, batch_size_of, sized_spec, symbolic
from keras_multigpu.training.variables.storage import are_parts, can_be_divided, in_parts

# An attribute of copies that variables have left.
LEFT_BY = "_keras_multigpu_left_by"
_moves = 0


def place_optimizers(
    optimizers: list[keras.optimizers.Optimizer],
    strategy: tf.distribute.Strategy,
    others: Sequence[keras.Variable] = (),
    shard: str | None = None,
) -> None:
    """Move the variables of optimizers, and others with them; those already there stay.

    Args:
        shard: What replicas divide: "optimizer", "weights" too, or nothing.
    """
    # Optimizers may refer to variables by their storage.
    updates_copies = home_device(strategy) is None
    updating = strategy if updates_copies else None
    if shard is not None:
        # A strategy updates only variables of which each replica has a copy.
        with graph_internals.single_device():
            updating = tf.distribute.get_strategy()
    optimizer_internals.before_moving(optimizers, updating)
    of_optimizers = [v for optimizer in optimizers for v in optimizer.variables]
    # An outer optimizer may also list the variables of an inner one.
    slots = {id(v): v for v in of_optimizers}
    everything = list(({id(v): v for v in others} | slots).values())
    if shard is not None:
        divide(everything if shard == "weights" else list(slots.values()), strategy)
    place_variables(everything, strategy)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer, those that the model keeps, and those inside them."""
    return [part for optimizer in own_optimizers(model) for part in with_inner(optimizer)]


def own_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer and others kept as attributes, even in lists and dictionaries."""
    values = [getattr(model, "optimizer", None), *leaves_of(vars(model))]
    found = {id(v): v for v in values if isinstance(v, keras.optimizers.Optimizer)}
    return list(found.values())


def leaves_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for part in value for leaf in leaves_of(part)]


def with_inner(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """An optimizer and the optimizers inside it."""
    kept = [*leaves_of(vars(optimizer)), *getattr(optimizer, "optimizers", ())]
    parts = {id(v): v for v in kept if isinstance(v, keras.optimizers.Optimizer)}
    return [optimizer, *(each for part in parts.values() for each in with_inner(part))]


def home_device(strategy: tf.distribute.Strategy) -> str | None:
    """The device that holds the only copy of the variables; None if each replica has a copy."""
    is_one = isinstance(strategy, tf.distribute.OneDeviceStrategy)
    return strategy.extended.worker_devices[0] if is_one else None


def device_of_first_copies(strategy: tf.distribute.Strategy) -> str | None:
    """The device whose variables can stay where they are; None if none can."""
    if isinstance(strategy, tf.distribute.MirroredStrategy):
        device: str = strategy.extended.worker_devices[0]
        return device
    return home_device(strategy)


def place_variables(variables: list[keras.Variable], strategy: tf.distribute.Strategy) -> None:
    """Give each variable a storage under `strategy`, with its current value."""
    known = zip(variables, variable_internals.storages_of(variables), strict=True)
    moved = [(v, old) for v, old in known if old is not None and not lives_under(old, strategy)]
    if moved:
        values = [(variable, old.numpy()) for variable, old in moved]
        storages = copied(values, strategy, [old for _, old in moved])
        replace_storages([variable for variable, _ in moved], storages)


def divide(variables: Sequence[keras.Variable], strategy: tf.distribute.Strategy) -> None:
    """Give each device a part of the variables that can be divided, with their current values."""
    devices = strategy.extended.worker_devices
    # One by one: together they may fit into memory only in parts.
    for variable in variables:
        storage = variable_internals.variable_storage(variable)
        new = storage.stands_for if isinstance(storage, StandIn) else storage
        if can_be_divided(variable, len(devices)) and not are_parts(new, devices):
            (whole,) = agreed([new.numpy()], strategy)
            new = in_parts(whole, variable.name, devices, variable.trainable)
        if new is not storage:
            replace_storages([variable], [new])


def gather(variables: Sequence[keras.Variable]) -> None:
    """Bring variables in parts together, on the host."""
    with tf.device(HOST):
        keep_once(variables, VariableInParts)


def keep_once(variables: Sequence[keras.Variable], kind: Any) -> None:
    """Give variables whose storages are of a kind plain ones, with their current values."""
    # One by one: together they may fit into memory only in parts.
    for variable in variables:
        storage = variable_internals.variable_storage(variable)
        if isinstance(storage, kind):
            with tf.init_scope(), graph_internals.single_device():
                replace_storages([variable], made([(variable, storage.numpy())]))


def replace_storages(variables: list[keras.Variable], storages: list[tf.Variable]) -> None:
    """Give variables other storages for good; steps compiled for their copies must go."""
    global _moves
    _moves += bool(variables)
    for variable, storage in zip(variables, storages, strict=True):
        kept = {id(copy) for copy in copies_in(storage)}
        for copy in copies_of(variable):
            if id(copy) not in kept:
                setattr(copy, LEFT_BY, variable)
    variable_internals.set_storages(variables, storages)


def moves() -> int:
    """How often variables have moved: if this is as before, no copy has been left since."""
    return _moves


def left_by(copy: tf.Variable) -> keras.Variable | None:
    """The variable whose value a copy no longer holds, because it has moved; None if it does."""
    return getattr(copy, LEFT_BY, None)


def is_spread(strategy: tf.distribute.Strategy) -> bool:
    """Whether some replicas live in other processes."""
    count = strategy.num_replicas_in_sync
    # TensorFlow's default strategy has no list of devices.
    return count > 1 and len(strategy.extended.worker_devices) < count


def agreed(values: Sequence[np.ndarray], strategy: tf.distribute.Strategy) -> Sequence[np.ndarray]:
    """The chief's values, which all workers start from."""
    if not is_spread(strategy):
        return values
    with tf.init_scope(), graph_internals.single_device():
        return ReplicaGroup(strategy).broadcast_from_chief(values)


def copied(
    values: Sequence[tuple[keras.Variable, np.ndarray]],
    strategy: tf.distribute.Strategy,
    before: Sequence[tf.Variable] = (),
) -> list[tf.Variable]:
    """Storages for variables with these values under `strategy`: a copy on each replica.

    Args:
        before: The current storages. One on the first replica's device becomes the first copy, so
            that functions traced earlier keep using it.
    """
    home = home_device(strategy)
    if home is not None:
        with tf.init_scope(), tf.device(home):
            return made(values)
    of_chief = agreed([value for _, value in values], strategy)
    values = [(v, value) for (v, _), value in zip(values, of_chief, strict=True)]
    ready: list[tf.Variable] = []

    def first_or_new(create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        return ready.pop() if ready else create(**arguments)

    with tf.init_scope(), graph_internals.single_device(), cluster_internals.begun_by_each():
        with tf.variable_creator_scope(first_or_new), strategy.scope():
            storages = []
            for place, each in enumerate(values):
                own = before[place : place + 1]
                ready[:] = [first for first in own if can_be_first(first, strategy)]
                storages += made([each])
    variable_internals.make_usual(storages)
    return storages


def made(values: Sequence[tuple[keras.Variable, np.ndarray]]) -> list[tf.Variable]:
    return [
        tf.Variable(value, dtype=value.dtype, trainable=v.trainable, name=v.name)
        for v, value in values
    ]


def can_be_first(storage: tf.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Whether a variable can be the first replica's copy under a strategy."""
    # A variable made under central storage can be assigned only in that scope.
    is_plain = getattr(storage, "distribute_strategy", None) is None
    if not is_plain or not isinstance(strategy, tf.distribute.MirroredStrategy):
        return False
    return is_on(storage, strategy.extended.worker_devices[0])


def lives_under(storage: tf.Variable, strategy: tf.distribute.Strategy) -> bool:
    """Whether a variable is already where `place_variables` would put it."""
    if isinstance(storage, tf.distribute.DistributedValues):
        return storage.distribute_strategy is strategy
    if isinstance(storage, VariableInParts):
        return are_parts(storage, strategy.extended.worker_devices)
    home = home_device(strategy)
    return home is not None and is_on(storage, home)


def is_on(storage: tf.Variable, device: str) -> bool:
    return tf.DeviceSpec.from_string(storage.device) == tf.DeviceSpec.from_string(device)


class Placement:
    """Where the variables of one model live, including those that only its steps know.

    Attributes:
        untracked: The variables that the model does not track, in the order in which steps found
            them. They live once in each process.

    Args:
        strategy: The strategy of the model.
        shard: What replicas divide, as in `place_optimizers`.
    """

    def __init__(self, strategy: tf.distribute.Strategy, shard: str | None = None) -> None:
        self.untracked: list[tf.Variable] = []
        self._strategy, self._shard = strategy, shard

    def take(self, variables: Iterable[tf.Variable]) -> None:
        """Note the untracked variables of a step, and give all workers the chief's values."""
        known = {id(variable) for variable in self.untracked}
        new = [variable for variable in variables if id(variable) not in known]
        self.untracked += new
        if is_spread(self._strategy):
            for variable, agreed in zip(
                new, copied([(v, v.numpy()) for v in new], self._strategy), strict=True
            ):
                variable.assign(agreed.values[0])

    def place(self, model: keras.Model) -> None:
        """Move a built model's variables to the strategy."""
        place_optimizers(optimizers_of(model), self._strategy, model.variables, self._shard)

    def creating_slots(self, stand_ins: bool = True) -> contextlib.AbstractContextManager[None]:
        """The context in which optimizers create slots, in parts if replicas divide them.

        Args:
            stand_ins: Whether a graph of one device is to use them before they are placed.
        """
        if self._shard is None:
            return contextlib.nullcontext()
        return optimizer_internals.variables_anywhere(partial(self._create, stand_ins=stand_ins))

    def creating_weights(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which layers create weights, in parts if replicas divide them."""
        if self._shard != "weights":
            return contextlib.nullcontext()
        return tf.variable_creator_scope(partial(self._create, stand_ins=False))

    def _create(self, create: Callable[..., Any], *, stand_ins: bool, **given: Any) -> Any:
        devices = self._strategy.extended.worker_devices
        with tf.device(HOST):
            value = given["initial_value"]()
        if not can_be_divided(value, len(devices)):
            return create(**given | {"initial_value": value})
        if is_spread(self._strategy):  # Workers may have drawn others.
            (value,) = agreed([value.numpy()], self._strategy)
        storage = in_parts(value, given["name"], devices, given.get("trainable", True))
        return storage.stand_in if stand_ins else storage

    def build_optimizer(
        self, optimizer: keras.optimizers.Optimizer | None, trainable: list[keras.Variable]
    ) -> None:
        """Create and place an optimizer's variables, if that has not been done yet."""
        if optimizer is None or optimizer.built or not trainable:
            return
        with optimizer_internals.variables_anywhere(), self.creating_slots(stand_ins=False):
            optimizer.build(trainable)
        place_optimizers(with_inner(optimizer), self._strategy, shard=self._shard)

    def place_metrics(self, model: keras.Model) -> None:
        """Keep the variables of metrics once, because callbacks and Keras change them, too."""
        given = [v for metric in compile_internals.given_metrics(model) for v in metric.variables]
        keep_once([*model.metrics_variables, *given], tf.distribute.DistributedValues)

    def prepare(
        self, model: keras.Model, spec: Batch | None = None, method: str | None = None
    ) -> None:
        """Build the model, if it can be built, and move all variables to their devices."""
        refuse_own_loops(model)
        custom = method is not None and bool(model_internals.overridden(model, method))
        # A custom step builds the model when it is traced, as in Keras, because only it knows what
        # it calls the model with. An eager step builds it when it first runs.
        unbuilt = has_call(model) and not are_built(model)
        known = None if model.run_eagerly or custom else spec
        if unbuilt and known is not None:
            with graph_internals.single_device(), self.creating_weights():
                build_by_call(model, known)
        self.place(model)
        self.place_metrics(model)
        # Not `are_built`: a layer that the call leaves out is never built.
        if unbuilt and known is None:
            return
        # As in Keras, only training builds an optimizer. If the model was built before, a custom
        # step builds its optimizers itself, each for the variables that it updates.
        if method == "train_step" and (unbuilt or not custom):
            self.build_optimizer(model.optimizer, model.trainable_variables)

    def make_ready(self, model: keras.Model, spec: Batch, trace: Callable[[], Any]) -> None:
        """Build what a custom step needs, because its graph cannot create variables.

        Args:
            trace: Traces the step as one device runs it.
        """

        def run_step() -> None:
            # A `tf.function` inside is not traced again and keeps its variables, which must be the
            # first replica's copies, see `copied`.
            with tf.device(device_of_first_copies(self._strategy)), self.creating_slots():
                trace()
            self.place(model)

        if model.run_eagerly:
            return
        if not are_built(model):
            run_step()
        elif has_call(model):
            try:
                with graph_internals.single_device():
                    compile_internals.build_model(model, symbolic(spec))
            except Exception:  # The step does not call the model with `x`.
                run_step()
        self.place_metrics(model)


def build_by_call(model: keras.Model, spec: Batch) -> None:
    """Build a model by calling it symbolically on a batch of these specs."""
    try:
        model_internals.symbolic_call(model, symbolic(spec[0]))
    except Exception:
        if batch_size_of(spec) is not None:
            raise
        try:
            # Its code may need the number of examples, on which variables hardly ever depend.
            model_internals.symbolic_call(model, symbolic(sized_spec(spec, 2)[0]))
            return
        except Exception:  # Raise the first error instead.
            pass
        raise


def has_call(model: keras.Model) -> bool:
    """Whether the model can be called; one with only a `train_step` cannot."""
    return type(model).call is not keras.Model.call


def are_built(model: keras.Model) -> bool:
    return all(layer.built for layer in model_internals.layers_of(model))


def refuse_own_loops(model: keras.Model) -> None:
    for kind in ("train", "test", "predict"):
        if model_internals.overridden(model, f"make_{kind}_function"):
            raise value_error(
                f"The model overrides `make_{kind}_function`.",
                f"Expected `keras.Model.make_{kind}_function`: distributed models never call it, "
                "because it reads Keras's iterator, which does not split batches.",
                f"Override `{kind}_step` instead, or train the model without `distribute`.",
                model=type(model).__name__,
            )
