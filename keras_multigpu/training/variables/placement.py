"""Builds a model, and moves its variables and its optimizers' to a strategy, values kept.

Every variable that a training step changes lives once on each replica, with
`aggregation="none"`: in replica context an assignment is then local, needs no
`merge_call`, and works inside `cond`, `while` and XLA. The replicas stay equal because
each applies the same update to the same values.

Keras's steps update a metric once, with the global batch. A step that the user has written updates
it on every replica, with the replica's rows, and its value is the sum of the parts. A model may
train in one way and be evaluated in the other, so values move between the two.

Keras lets a layer or a loss use any variable. A step learns of one that the model does not track
when it is traced, asks for it with `NeedsVariables`, and is made anew with it among the variables
it knows.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import (
    compile_internals,
    graph_internals,
    model_internals,
    optimizer_internals,
    variable_internals,
)
from keras_multigpu.training.replica_group import scope_of
from keras_multigpu.training.shares import Batch, symbolic

LOOPS = ("train", "test", "predict")


def place_model(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Move a built model's variables to `strategy`; those already there stay."""
    place_optimizers(optimizers_of(model), strategy, model.variables)


def place_optimizers(
    optimizers: list[keras.optimizers.Optimizer],
    strategy: tf.distribute.Strategy,
    others: Sequence[keras.Variable] = (),
) -> None:
    """Move the variables of optimizers, and others with them."""
    # Keras knows variables by where they are.
    has_copies = home_device(strategy) is None
    optimizer_internals.before_moving(optimizers, strategy if has_copies else None)
    of_optimizers = [v for optimizer in optimizers for v in optimizer.variables]
    # What an optimizer inside of another has, both count.
    place_variables(list({id(v): v for v in [*others, *of_optimizers]}.values()), strategy)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer, those that the model keeps, and those inside them."""
    return [part for optimizer in own_optimizers(model) for part in with_inner(optimizer)]


def own_optimizers(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The compiled optimizer and others kept as attributes, also in lists and dictionaries."""
    values = [getattr(model, "optimizer", None), *leaves_of(vars(model))]
    found = {id(v): v for v in values if isinstance(v, keras.optimizers.Optimizer)}
    return list(found.values())


def leaves_of(value: Any) -> list[Any]:
    """What stands in lists and dictionaries, in one another too."""
    if isinstance(value, dict):
        value = list(value.values())
    if not isinstance(value, list | tuple):
        return [value]
    return [leaf for part in value for leaf in leaves_of(part)]


@contextlib.contextmanager
def idle_optimizers(model: keras.Model) -> Iterator[None]:
    """Let the model's optimizers do nothing."""
    optimizers = own_optimizers(model)
    for optimizer in optimizers:
        vars(optimizer)["apply"] = lambda grads, trainable_variables=None: None
    try:
        yield
    finally:
        for optimizer in optimizers:
            vars(optimizer).pop("apply", None)


def with_inner(optimizer: keras.optimizers.Optimizer) -> list[keras.optimizers.Optimizer]:
    """An optimizer and those that it updates weights with, Keras's or a class of the user's."""
    kept = [*leaves_of(vars(optimizer)), *getattr(optimizer, "optimizers", ())]
    parts = {id(v): v for v in kept if isinstance(v, keras.optimizers.Optimizer)}
    return [optimizer, *(each for part in parts.values() for each in with_inner(part))]


def build_optimizer(
    optimizer: keras.optimizers.Optimizer | None,
    trainable: list[keras.Variable],
    strategy: tf.distribute.Strategy,
) -> None:
    """Create the optimizer's variables, if they are not there yet, and place them."""
    if optimizer is None or optimizer.built or not trainable:
        return
    with optimizer_internals.variables_anywhere():
        optimizer.build(trainable)
    place_optimizers(with_inner(optimizer), strategy)


class MadeOutside(Exception):
    """A step needs what cannot be made inside of it; it is then made anew."""

    def build(self) -> None:
        """Make what is needed; called outside the step."""
        raise NotImplementedError


def home_device(strategy: tf.distribute.Strategy) -> str | None:
    """The device that holds the only copy of the variables; None if each replica has one."""
    if isinstance(strategy, tf.distribute.OneDeviceStrategy):
        return strategy.extended.worker_devices[0]
    if isinstance(strategy, tf.distribute.experimental.CentralStorageStrategy):
        return strategy.extended.worker_devices[0]
    return None


def place_variables(variables: list[keras.Variable], strategy: tf.distribute.Strategy) -> None:
    """Give each variable a storage under `strategy`, starting from its value."""
    home = home_device(strategy)
    known = zip(variables, variable_internals.storages_of(variables), strict=True)
    moved = [
        (variable, storage)
        for variable, storage in known
        if storage is not None and not lives_under(storage, strategy, home)
    ]
    if moved:
        variables = [variable for variable, _ in moved]
        values = [(variable, storage.numpy()) for variable, storage in moved]
        storages = copied(values, strategy, [storage for _, storage in moved])
        variable_internals.set_storages(variables, storages)


def copied(
    values: Sequence[tuple[keras.Variable, np.ndarray]],
    strategy: tf.distribute.Strategy,
    before: Sequence[tf.Variable] = (),
) -> list[tf.Variable]:
    """Storages for variables with these values under `strategy`: a copy on each replica.

    Args:
        values: The variables and their values.
        strategy: The strategy.
        before: Where these values lie now. What lies on the first replica's device is the first
            copy from now on: functions that somebody has traced before go on with it.
    """
    home = home_device(strategy)
    if home is not None:
        with tf.init_scope(), tf.device(home):
            return made(values)
    ready: list[tf.Variable] = []

    def first_or_new(create: Callable[..., tf.Variable], **arguments: Any) -> tf.Variable:
        return ready.pop() if ready else create(**arguments)

    with tf.init_scope(), graph_internals.single_device():
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
    """Whether a variable can be the copy of the first replica of a strategy."""
    if isinstance(storage, tf.distribute.DistributedValues) or not isinstance(
        strategy, tf.distribute.MirroredStrategy
    ):
        return False
    first = tf.DeviceSpec.from_string(strategy.extended.worker_devices[0])
    return tf.DeviceSpec.from_string(storage.device) == first


def lives_under(storage: tf.Variable, strategy: tf.distribute.Strategy, home: str | None) -> bool:
    """Whether a variable is already where `place_variables` would put it."""
    if isinstance(storage, tf.distribute.DistributedValues):
        return storage.distribute_strategy is strategy
    return home is not None and tf.DeviceSpec.from_string(
        storage.device
    ) == tf.DeviceSpec.from_string(home)


class MetricStorages:
    """The two storages of each metric variable, made when they are first needed."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self._strategy = strategy
        local = len(strategy.extended.worker_devices)
        self._is_spread = local < strategy.num_replicas_in_sync
        self._made: dict[tuple[int, bool], tuple[keras.Variable, tf.Variable]] = {}

    def use(self, variables: Sequence[keras.Variable], in_parts: bool) -> None:
        """Let variables live once, or in parts on the replicas; their values are kept."""
        in_parts = in_parts and home_device(self._strategy) is None
        moved: list[tuple[keras.Variable, tf.Variable]] = []
        storages = variable_internals.storages_of(variables)
        for variable, storage in zip(variables, storages, strict=True):
            if storage is None or is_in_parts(storage) == in_parts:
                continue
            value = storage.numpy()
            # The variable is kept too, so that no other one gets its identity.
            self._made[id(variable), not in_parts] = variable, storage
            # Steps are compiled for one of the two, so none is ever made twice.
            if (id(variable), in_parts) not in self._made:
                self._made[id(variable), in_parts] = variable, self._new(variable, value, in_parts)
            _, other = self._made[id(variable), in_parts]
            give(other, value, everywhere=self._is_spread)
            moved.append((variable, other))
        if moved:
            of_variables, others = map(list, zip(*moved, strict=True))
            variable_internals.set_storages(of_variables, others)

    def _new(self, variable: keras.Variable, value: np.ndarray, in_parts: bool) -> tf.Variable:
        zeros = np.zeros_like(value)
        if in_parts and self._is_spread:
            # Processes would have to meet whenever one of them reads a value in parts.
            return copied([(variable, zeros)], self._strategy)[0]
        options = {"dtype": zeros.dtype, "name": variable.name}
        if not in_parts:
            with tf.init_scope(), graph_internals.single_device():
                return tf.Variable(zeros, **options)
        with tf.init_scope(), scope_of(self._strategy):
            # Replicas assign each its own part; whoever reads it elsewhere gets the sum.
            return tf.Variable(
                zeros,
                aggregation=tf.VariableAggregation.SUM,
                synchronization=tf.VariableSynchronization.ON_READ,
                **options,
            )


def give(storage: tf.Variable, value: np.ndarray, everywhere: bool = False) -> None:
    """Let a storage have a value: each part, where these are copies, and otherwise the first."""
    first, *others = storage.values if is_in_parts(storage) else [storage]
    first.assign(value)
    for part in others:
        part.assign(value if everywhere else np.zeros_like(value))


def is_in_parts(storage: tf.Variable) -> bool:
    """Whether each replica has a part of the value, or a copy of it."""
    return isinstance(storage, tf.distribute.DistributedValues)


class Placement:
    """Where the variables of one model live: those that it has, and those that steps meet.

    What the model does not track stands in the order in which it was met. Several replicas, or
    workers, share each batch, if so.
    """

    def __init__(self, strategy: tf.distribute.Strategy, several: bool) -> None:
        self.untracked: list[keras.Variable] = []
        self._strategy = strategy
        self._several = several
        self._metrics = MetricStorages(strategy)
        self._in_parts = False

    @property
    def metric_states(self) -> list[keras.Variable]:
        """The untracked ones that metrics add up in."""
        return [variable for variable in self.untracked if is_metric_state(variable)]

    def take(self, variables: Iterable[keras.Variable]) -> None:
        """Give untracked variables a copy on each replica; those of metrics need one only."""
        known = {id(variable) for variable in self.untracked}
        new = [variable for variable in variables if id(variable) not in known]
        metric_state = [v for v in new if is_metric_state(v)]
        self._metrics.use(metric_state, in_parts=False)
        place_variables([v for v in new if not is_metric_state(v)], self._strategy)
        self.untracked += new

    def arrange_metrics(self, model: keras.Model, in_parts: bool | None = None) -> None:
        """Let all metrics live once, or in parts from now on; new ones as the others do."""
        if in_parts is not None:
            if in_parts == self._in_parts:
                return
            self._in_parts = in_parts
        given = [v for metric in compile_internals.given_metrics(model) for v in metric.variables]
        variables = [*model.metrics_variables, *given, *self.metric_states]
        self._metrics.use(variables, self._in_parts)

    def prepare(
        self,
        model: keras.Model,
        spec: Batch | None = None,
        batch: Batch | None = None,
        method: str | None = None,
    ) -> None:
        """Build what is not built, and put all variables where they belong.

        Args:
            model: The model.
            spec: The specs of a batch, if they are known.
            batch: A batch, which a model that runs eagerly needs: it may read the numbers.
            method: The method that takes it.
        """
        of_loops = [f"make_{kind}_function" for kind in LOOPS]
        own = model_internals.overridden(model, *of_loops, *([] if method is None else [method]))
        refuse_own_loops(model, own)
        layers = model_internals.layers_of(model)
        if self._several:
            refuse_stateful(layers)
        # A step of the user's builds the model when it is traced, as in Keras: only it knows what
        # it calls it with.
        unbuilt = has_call(model) and not are_built(layers)
        called = unbuilt and call_once(model, spec, batch, method in own)
        place_model(model, self._strategy)
        self.arrange_metrics(model)
        # A layer that the call leaves out is never built.
        if unbuilt and not called:
            return
        # As in Keras only training builds an optimizer. Where the model was built before, a step of
        # the user's builds its optimizers itself, each for the variables that it updates.
        if method == "train_step" and (unbuilt or method not in own):
            build_optimizer(model.optimizer, model.trainable_variables, self._strategy)

    def make_ready(
        self,
        model: keras.Model,
        spec: Batch,
        batch: Batch | None,
        function: Callable[[Any], Any],
    ) -> None:
        """Build what a step of the user's own needs, whose code cannot create variables there."""

        def run_step() -> None:
            step = tf.function(
                lambda *parts: function(keras.utils.pack_x_y_sample_weight(*parts)), autograph=False
            )
            # An optimizer would make its variables inside of this graph.
            with idle_optimizers(model), graph_internals.single_device():
                step.get_concrete_function(*spec)
            place_model(model, self._strategy)

        if not are_built(model_internals.layers_of(model)):
            run_step()
        elif has_call(model):
            try:
                with graph_internals.single_device():
                    if batch is not None and model.run_eagerly:
                        compile_internals.build_model(model, batch, model_internals.real_call)
                    else:
                        compile_internals.build_model(model, symbolic(spec))
            except Exception:  # The step calls the model with something else than `x`.
                run_step()
        self.arrange_metrics(model)


def call_once(model: keras.Model, spec: Batch | None, batch: Batch | None, own: bool) -> bool:
    """Call a model with `x`, which builds it; whether that was possible. See `prepare`."""
    try:
        with graph_internals.single_device():
            if batch is not None and model.run_eagerly:
                model_internals.real_call(model, batch[0])
            elif spec is not None and not model.run_eagerly and not own:
                model_internals.symbolic_call(model, symbolic(spec[0]))
            else:
                return False
    except Exception:
        if own:  # It calls the model with something else.
            return False
        raise
    return True


def has_call(model: keras.Model) -> bool:
    """Whether the model itself can be called; one with only a `train_step` cannot."""
    return type(model).call is not keras.Model.call


def are_built(layers: Sequence[keras.Layer]) -> bool:
    """Whether all layers have their variables."""
    return all(layer.built for layer in layers)


def refuse_own_loops(model: keras.Model, own: Sequence[str]) -> None:
    """Raise a `ValueError` for a model that makes the functions which Keras's loops call."""
    for kind in LOOPS:
        if f"make_{kind}_function" in own:
            raise value_error(
                f"The model has a `make_{kind}_function` of its own.",
                f"Expected `keras.Model.make_{kind}_function`: it reads Keras's iterator, "
                "which knows nothing of shares, so here it would never be called.",
                f"Override `{kind}_step` instead, or train the model without `distribute`.",
                model=type(model).__name__,
            )


def refuse_stateful(layers: Sequence[keras.Layer]) -> None:
    """Raise a `ValueError` for recurrent layers that remember the batch before."""
    for layer in layers:
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise value_error(
                "A recurrent layer keeps its state from one batch to the next.",
                "Expected `stateful=False`: replicas see shares of a batch, whose states "
                "belong to other examples than before.",
                "Train this model on one device: `kmg.strategy('one_device')`.",
                layer=layer.name,
            )


class NeedsVariables(MadeOutside):
    """A step uses variables that it was made without."""

    def __init__(self, placement: Placement, variables: Iterable[keras.Variable]) -> None:
        self._placement, self._variables = placement, list(variables)
        super().__init__(*(variable.path for variable in self._variables))

    def build(self) -> None:
        self._placement.take(self._variables)


def is_metric_state(variable: keras.Variable) -> bool:
    """Whether a variable was made by `Metric.add_variable`."""
    return variable.synchronization == "on_read"
