"""A model's forward pass as a pure function of its variables' values.

A pure function can be traced once and run on every replica, compiled by XLA, and run
on pieces of a batch. A stateless scope gives the variables the values that are
passed in and catches every assignment, so the new values come out as results. What the
model does not track is met there too, see `untracked`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.training.replica_pass.rows_flow import watched
from keras_multigpu.training.replica_pass.values import Values, Variables
from keras_multigpu.training.variables.caught_assignments import (
    CatchingScope,
    WeighedNumbers,
    raise_assigned,
)
from keras_multigpu.training.variables.placement import NeedsVariables, optimizers_of


class Forward(NamedTuple):
    """What a forward pass yields besides new values of variables.

    `in_order` tells whether the predictions' rows stand in the order of the examples.
    """

    y_pred: Any
    added_losses: list[tf.Tensor]
    regularization: list[tf.Tensor]
    in_order: bool


class PureModel:
    """Runs a built model on given values of its variables, on all of a batch or on parts."""

    def __init__(self, model: keras.Model, in_parts: bool) -> None:
        self.model = model
        self.variables = Variables(model)
        self._placement = model.replication.placement
        self._in_parts = in_parts

    def scope(self, values: Values, part: tf.Tensor, again: bool = False) -> CatchingScope:
        """A stateless scope in which the model has these values, and sees this part of the batch.

        It may be called again for the same step.
        """
        # The running means of single losses are updated with global values, elsewhere.
        trackers = loss_trackers(self.model)
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in trackers]
        return CatchingScope(
            [*self.variables.all, *trackers],
            [*values.trainable, *values.others, values.global_seed, *zeros],
            part,
            several=self._in_parts or again,
        )

    def whole_scope(self, values: Values) -> CatchingScope:
        """The same for the global batch; the running means of single losses are real."""
        return CatchingScope(
            self.variables.all,
            [*values.trainable, *values.others, values.global_seed],
            apart=loss_trackers(self.model),
            several=self._in_parts,
        )

    def forward(self, x: Any, training: bool, scope: CatchingScope) -> Forward:
        """The forward pass inside `scope`.

        Losses that layers add are taken for means over examples and weighed with the part of the
        batch, penalties of activity regularisers for sums; so their sum over replicas is one
        device's value.
        """
        penalties_seen = remembered_activity_penalties(self.model)
        with (
            penalties_seen as penalties,
            WeighedNumbers.weighed(),
            self._watched(x, training) as flow,
        ):
            y_pred = keras_internals.called(self.model, x, training)
            in_order = flow is None or flow.keeps_order(keras.tree.flatten(y_pred))
            for variable in list(scope.assigned.values()) if flow is not None else ():
                value: Any = scope.get_current_value(variable)
                if tf.is_symbolic_tensor(value):
                    flow.find_stored(value, value.op)
        summed = {id(penalty) for penalty in penalties}
        added = {id(loss) for loss in scope.losses}
        added_losses, regularization = [], []
        for loss in self.model.losses:
            value = tf.reduce_sum(tf.cast(loss, tf.float32))
            if id(loss) not in added:
                regularization.append(value)
            else:
                added_losses.append(value if id(loss) in summed else value * scope.part)
        return Forward(y_pred, added_losses, regularization, in_order)

    def _watched(self, x: Any, training: bool) -> Any:
        return watched(self.model, x, training) if self._in_parts else contextlib.nullcontext()

    def new_values(self, scope: CatchingScope, values: Values) -> Values:
        """The values that the variables have inside `scope`."""
        if scope.unknown:
            raise NeedsVariables(self._placement, scope.unknown.values())
        require_no_weights(self.model, scope)
        return Values(
            values.trainable,
            [scope.get_current_value(variable) for variable in self.variables.others],
            scope.get_current_value(self.variables.global_seed),
        )


def require_no_weights(model: keras.Model, scope: CatchingScope) -> None:
    """Raise a `ValueError` where a variable was assigned that the optimizer updates or owns."""
    owned = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    for variable in model.trainable_variables:
        if id(variable) in scope.assigned:
            raise_assigned(
                "a trainable",
                "Make the variable non-trainable, or use the assigned value without storing it "
                "(`keras.layers.SpectralNormalization` is such a layer and cannot be distributed).",
                variable,
            )
    for variable in owned:
        if id(variable) in scope.assigned:
            raise_assigned(
                "an optimizer's", "Assign it in a callback, or use a schedule.", variable
            )


def loss_trackers(model: keras.Model) -> list[keras.Variable]:
    """The variables of the running means of single losses, as far as they are made."""
    compiled = keras_internals.compile_loss(model)
    made = list(compiled.variables) if compiled else []
    return [v for v in made if keras_internals.variable_storage(v) is not None]


class RememberingRegularizer:
    """An activity regulariser that notes each penalty it computes."""

    # Keras sums these penalties over the batch, whereas a loss that a layer adds is mostly a mean;
    # the two are weighed differently, and afterwards they look alike.
    penalties = threading.local()
    """The penalties of the forward pass that runs on this thread."""

    def __init__(self, regularizer: Callable[..., tf.Tensor]) -> None:
        self.regularizer = regularizer
        self.users = 0

    def __call__(self, outputs: tf.Tensor) -> tf.Tensor:
        penalty = self.regularizer(outputs)
        self.penalties.seen.append(penalty)
        return penalty


@contextlib.contextmanager
def remembered_activity_penalties(model: keras.Model) -> Iterator[list[tf.Tensor]]:
    """The penalties that activity regularisers compute in this context."""
    # Replicas that are traced in turn enter it at the same time; the last one restores.
    layers = keras_internals.activity_regularized_layers(model)
    seen: list[tf.Tensor] = []
    RememberingRegularizer.penalties.seen = seen
    for layer in layers:
        if not isinstance(layer.activity_regularizer, RememberingRegularizer):
            layer.activity_regularizer = RememberingRegularizer(layer.activity_regularizer)
        layer.activity_regularizer.users += 1
    try:
        yield seen
    finally:
        for layer in layers:
            layer.activity_regularizer.users -= 1
            if not layer.activity_regularizer.users:
                layer.activity_regularizer = layer.activity_regularizer.regularizer
