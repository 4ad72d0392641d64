"""The only door to names that Keras and TensorFlow do not document.

Everything here was checked on Keras 3.15.1 with TensorFlow 2.21.0. Each entry says
why no public name will do; `tests/test_keras_internals.py` fails with a clear sentence when
a later version changes one of them.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.models.functional import Functional
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random import seed_generator
from keras.src.saving import object_registration
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing
from keras.src.trainers.data_adapters import data_adapter_utils
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn


@contextlib.contextmanager
def single_device() -> Iterator[None]:
    """Make Keras and TensorFlow see one device although a strategy is in scope.

    Keras divides losses by `tf.distribute.get_strategy().num_replicas_in_sync`. The
    forward pass and the metrics of this package follow one device's arithmetic, so that
    division must not happen. TensorFlow has no public way to leave a strategy's scope.
    """
    graph = tf.compat.v1.get_default_graph()
    saved = graph._distribution_strategy_stack
    graph._distribution_strategy_stack = []
    try:
        yield
    finally:
        graph._distribution_strategy_stack = saved


# Variables. A `keras.Variable` owns one `tf.Variable`, its storage. Moving a model to a
# strategy means to exchange the storage; Keras offers that only at construction.


def variable_storage(variable: keras.Variable) -> Any:
    """The `tf.Variable` behind a Keras variable, None when not yet initialised."""
    return variable._value


def set_variable_storage(variable: keras.Variable, storage: tf.Variable) -> None:
    """Let a Keras variable keep its value in another `tf.Variable`."""
    variable._value = storage


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """The states of all seed generators in a model, each once."""
    states = {}
    for layer in layers_of(model):
        for generator in layer._seed_generators:
            states[id(generator.state)] = generator.state
    return list(states.values())


def global_seed_state() -> keras.Variable:
    """The state that Keras's random functions use when they are given no seed."""
    return seed_generator.global_seed_generator().state


# The model.

FunctionalModel = Functional
"""The class of functional models."""


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """The model and all layers inside it, however deep."""
    return list(model._flatten_layers())


def compile_loss(model: keras.Model) -> Any:
    """The object that `compile(loss=...)` made, None without a loss."""
    return model._compile_loss


def loss_tracker(model: keras.Model) -> Any:
    """The running mean that is logged as `loss`."""
    return model._loss_tracker


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> Any:
    """`model.compute_loss`, also where an override lacks the `training` argument."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


def initial_epoch(model: keras.Model) -> int | None:
    """The epoch that `BackupAndRestore` wants training to go on with."""
    return model._initial_epoch


def called(model: keras.Model, x: Any, training: bool) -> Any:
    """`model(x)`, with the `training` argument where its `call` takes one."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def register_like(made: type, original: type) -> None:
    """Save objects of class `made` under the name that `original` is registered with."""
    if original in object_registration.GLOBAL_CUSTOM_NAMES:
        name = object_registration.GLOBAL_CUSTOM_NAMES[original]
        object_registration.GLOBAL_CUSTOM_NAMES[made] = name


def own_training_state(model: keras.Model) -> None:
    """Let Keras's own methods take the model for one that lives on one device.

    Keras remembers the scope a model was made in and then avoids XLA and distributes data.
    """
    model._distribute_strategy = None


def owned_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Metrics that belong to the model or its layers and not to `compile`."""
    compiled = [model._loss_tracker, model._compile_metrics]
    compiled += model._compile_loss.metrics if model._compile_loss is not None else []
    known = {id(metric) for metric in compiled}
    return [metric for metric in model.metrics if id(metric) not in known]


@contextlib.contextmanager
def flat_losses(model: keras.Model, wrap: Any) -> Iterator[None]:
    """Pass every compiled loss through `wrap` while the context lasts.

    Keras matches losses with outputs, weights and nested structures in
    `CompileLoss`; wrapping its list of losses keeps that logic in one place.
    """
    compiled = model._compile_loss
    saved = compiled._flat_losses
    compiled._flat_losses = [entry._replace(loss=wrap(entry.loss)) for entry in saved]
    try:
        yield
    finally:
        compiled._flat_losses = saved


def flatten_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Logs as Keras returns them from `evaluate`: a number or a list in its order."""
    return model._flatten_metrics_in_order(logs)


symbolic_call = backend.compute_output_spec
"""Runs a function on shapes alone, which builds what is not built yet."""


def symbolic_build(model: keras.Model, batch: Any) -> None:
    """Build the model, its compiled losses and metrics from the shapes of a batch."""
    model._symbolic_build(data_batch=batch)


def build_metrics(model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any) -> None:
    """Create the variables of `compile(metrics=...)` from shapes."""
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built:
        symbolic_call(model.compute_metrics, x, y, y_pred, sample_weight)


def activity_regularized_layers(model: keras.Model) -> list[keras.Layer]:
    """Layers that add the penalty of an activity regularizer in every call."""
    return [layer for layer in layers_of(model) if layer.activity_regularizer is not None]


def tracked_losses(model: keras.Model, tensors: list[Any]) -> None:
    """Let `model.losses` report these tensors inside the present stateless scope."""
    scope = backend.get_stateless_scope()
    for tensor in tensors:
        scope.add_loss(tensor)
        model._loss_ids.add(id(tensor))


get_mask = backend.get_keras_mask
"""Returns the Keras mask that travels with a tensor."""

set_mask = backend.set_keras_mask
"""Attaches a Keras mask to a tensor."""

same_rank = squeeze_or_expand_to_same_rank
"""Squeezes or expands two tensors whose ranks differ by one, as losses do."""

# Data. Keras turns every kind of input into a dataset; there is no public name for it.


data_adapter = data_adapters.get_data_adapter
"""Returns Keras's adapter for arrays, datasets, `PyDataset`s and generators."""


def split_validation(arrays: Any, fraction: float) -> Any:
    """Cut the validation split off the end of arrays, as `fit` does."""
    return array_slicing.train_validation_split(arrays, validation_split=fraction)


class_weights_of_labels = data_adapter_utils.class_weight_to_sample_weights
"""Returns the sample weights of an array of labels."""

class_weights_of_batch = make_class_weight_map_fn
"""Returns a function that turns class weights into sample weights in a graph."""

# Optimizers. Keras's TensorFlow optimizer clips before it sums over replicas and updates
# through `merge_call`, which fails inside `cond`. Its backend-neutral parent has the same
# arithmetic without either, but offers it on TensorFlow only in pieces.


class FunctionalOptimizer(TFOptimizer):
    """An optimizer whose `apply` is a pure function inside a `keras.StatelessScope`."""

    def assign(self, variable: Any, value: Any) -> None:
        """Assign a value, or some rows of one."""
        rows = scattered(tf.tensor_scatter_nd_update, variable, value)
        variable.assign(value if rows is None else rows)

    def assign_add(self, variable: Any, value: Any) -> None:
        """Add a value, or rows."""
        rows = scattered(tf.tensor_scatter_nd_add, variable, value)
        variable.assign_add(value) if rows is None else variable.assign(rows)

    def assign_sub(self, variable: Any, value: Any) -> None:
        """Subtract a value, or rows."""
        rows = scattered(tf.tensor_scatter_nd_sub, variable, value)
        variable.assign_sub(value) if rows is None else variable.assign(rows)

    _apply_weight_decay = BaseOptimizer._apply_weight_decay
    keras_class: type
    update_all: Callable[..., None]

    def _backend_update_step(self, grads: Any, variables: Any, learning_rate: Any) -> None:
        self.update_all(grads, variables, learning_rate)

    def position_of(self, variable: keras.Variable) -> int:
        """Where the variable's slots stand in the optimizer's lists."""
        return self._trainable_variables_indices[id(variable)]

    def _get_variable_index(self, variable: Any) -> int:
        joined = getattr(variable, "index_in_slots", None)
        return self.position_of(variable) if joined is None else joined

    def _var_key(self, variable: keras.Variable) -> int:
        return id(variable)

    def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
        if self.gradient_accumulation_steps:
            self._accumulate(grads, trainable_variables)
        else:
            self._update(grads, trainable_variables)
        if self.use_ema:
            self._update_model_variables_moving_average(self._trainable_variables)
            if self.ema_overwrite_frequency:
                self._overwrite_with_average()

    def _update(self, grads: Any, trainable_variables: Any) -> None:
        grads = self._clip_gradients(grads)
        self._apply_weight_decay(trainable_variables)
        self._backend_update_step(grads, trainable_variables, self.learning_rate)

    def _accumulate(self, grads: Any, trainable_variables: Any) -> None:
        steps = self.gradient_accumulation_steps
        sums = [
            self._accumulated_gradients[self._get_variable_index(v)] for v in trainable_variables
        ]
        touched = list(self._trainable_variables) + self.variables

        def after_update() -> list[Any]:
            with inner_scope(touched) as scope:
                self._update(
                    [(g + s) / steps for g, s in zip(grads, sums, strict=True)], trainable_variables
                )
                for total in self._accumulated_gradients:
                    total.assign(tf.zeros_like(total.value))
            return [scope.get_current_value(v) for v in touched]

        def after_waiting() -> list[Any]:
            with inner_scope(touched) as scope:
                for gradient, total in zip(grads, sums, strict=True):
                    total.assign(total + gradient)
            return [scope.get_current_value(v) for v in touched]

        is_update_step = (self._iterations + 1) % steps == 0
        for variable, value in zip(
            touched, tf.cond(is_update_step, after_update, after_waiting), strict=True
        ):
            variable.assign(value)

    def _overwrite_with_average(self) -> None:
        overwrite = (self.iterations + 1) % self.ema_overwrite_frequency == 0
        for variable, average in zip(
            self._trainable_variables, self._model_variables_moving_average, strict=True
        ):
            if average is not None:
                variable.assign(tf.where(overwrite, average.value, variable.value))


def scattered(scatter: Callable[..., Any], variable: Any, value: Any) -> Any:
    """A variable's value after a sparse update; None where the value is dense."""
    if not isinstance(value, tf.IndexedSlices):
        return None
    rows = tf.cast(value.values, variable.dtype)
    return scatter(tf.convert_to_tensor(variable), value.indices[:, tf.newaxis], rows)


@contextlib.contextmanager
def inner_scope(variables: list[keras.Variable]) -> Iterator[keras.StatelessScope]:
    """A stateless scope that starts from the values of the present one."""
    values = [(variable, variable.value) for variable in variables]
    with keras.StatelessScope(state_mapping=values) as scope:
        yield scope


def apply_functionally(
    optimizer: keras.optimizers.Optimizer,
    gradients: Any,
    trainable: list[keras.Variable],
    update_all: Callable[..., None],
) -> None:
    """`optimizer.apply` by `FunctionalOptimizer`'s rules, inside a stateless scope.

    `update_all(optimizer, gradients, variables, learning_rate)` calls its `update_step`.
    """
    with contextlib.ExitStack() as stack:
        for part in [optimizer, *getattr(optimizer, "optimizers", ())]:
            stack.enter_context(as_functional(part, update_all))
        optimizer.apply(gradients, trainable)


@contextlib.contextmanager
def as_functional(
    optimizer: keras.optimizers.Optimizer, update_all: Callable[..., None]
) -> Iterator[None]:
    """Let the optimizer follow `FunctionalOptimizer` while the context lasts."""
    original, tables = type(optimizer), vars(optimizer)["_tables_by_identity"]
    saved = {name: getattr(optimizer, name) for name in tables}
    methods = {"keras_class": original, "update_all": update_all}
    optimizer.__class__ = type(original.__name__, (original, FunctionalOptimizer), methods)
    vars(optimizer).update(tables)
    try:
        yield
    finally:
        optimizer.__class__ = original
        vars(optimizer).update(saved)


def remember_variables(optimizer: keras.optimizers.Optimizer) -> None:
    """Note which of the optimizer's tables belong to which variable.

    Keras looks variables up by their storage, which changes when a model is moved to a
    strategy; `as_functional` looks them up by identity. Called once, before the move.
    """
    if not optimizer.built or "_tables_by_identity" in vars(optimizer):
        return
    ids = {
        optimizer._var_key(variable): id(variable) for variable in optimizer._trainable_variables
    }
    tables: dict[str, Any] = {}
    for name in ("_trainable_variables_indices", "_var_to_optimizer_idx"):
        if hasattr(optimizer, name):
            tables[name] = {ids[key]: value for key, value in getattr(optimizer, name).items()}
    excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
    tables["_exclude_from_weight_decay"] = {ids[key] for key in excluded if key in ids}
    tables["_exclude_from_weight_decay_cache"] = {}
    vars(optimizer)["_exclude_from_weight_decay"] = excluded
    vars(optimizer)["_exclude_from_weight_decay_cache"] = {}
    vars(optimizer)["_tables_by_identity"] = tables


def optimized_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """The variables that an optimizer was built for."""
    return list(optimizer._trainable_variables)


def set_optimizer_strategy(
    optimizer: keras.optimizers.Optimizer, strategy: tf.distribute.Strategy
) -> None:
    """Let the optimizer update variables of a strategy that it was not made under."""
    optimizer._distribution_strategy = strategy


@contextlib.contextmanager
def variables_anywhere() -> Iterator[None]:
    """Let optimizers create their variables for a model that lives under any strategy.

    Keras insists that both were made in one scope. Optimizers may make others while they
    are built, so the rule is lifted for all and not for one.
    """
    checked = TFOptimizer.add_variable_from_reference
    TFOptimizer.add_variable_from_reference = BaseOptimizer.add_variable_from_reference
    try:
        yield
    finally:
        TFOptimizer.add_variable_from_reference = checked


def batch_norm_moments(
    layer: keras.layers.BatchNormalization, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """The mean and variance that a BatchNorm layer takes by itself."""
    return type(layer)._moments(layer, inputs, mask)
