"""A model's forward pass as a pure function of its variables' values.

A pure function can be traced once and run on every replica, compiled by XLA, and run
on pieces of a batch. `keras.StatelessScope` gives the variables the values that are
passed in and catches every assignment, so the new values come out as results.
"""

import contextlib
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem
from keras_multigpu.training import randomness


class Values(NamedTuple):
    """The values of a model's variables on one replica."""

    trainable: Sequence[tf.Tensor]
    others: Sequence[tf.Tensor]
    layer_metrics: Sequence[tf.Tensor]
    global_seed: tf.Tensor


class Rows(NamedTuple):
    """Some rows of a global batch: a replica's share, or a piece of it.

    A replica without examples borrows the batch's first row, so that no layer ever meets
    an empty batch; `examples` is then zero and whatever the row yields is dropped.
    """

    data: tuple[Any, Any, Any]
    examples: tf.Tensor
    global_batch_size: tf.Tensor

    @property
    def x(self) -> Any:
        """The inputs."""
        return self.data[0]

    @property
    def fraction(self) -> tf.Tensor:
        """The number of examples divided by the global batch size."""
        return tf.cast(self.examples, tf.float32) / tf.cast(self.global_batch_size, tf.float32)


class Forward(NamedTuple):
    """What a forward pass yields besides new values of variables."""

    y_pred: Any
    added_losses: list[tf.Tensor]
    regularization: list[tf.Tensor]


class PureModel:
    """Runs a model on given values of its variables.

    Args:
        model: A built model.
    """

    def __init__(self, model: keras.Model) -> None:
        self.model = model
        self.trainable = list(model.trainable_variables)
        self.others = list(model.non_trainable_variables)
        self.layer_metrics = layer_metric_variables(model)
        self.global_seed = keras_internals.global_seed_state()
        self._seeds = {id(state) for state in keras_internals.seed_states(model)}

    def scope(self, values: Values) -> keras.StatelessScope:
        """A stateless scope in which the model has these values."""
        variables = [*self.trainable, *self.others, *self.layer_metrics, self.global_seed]
        tensors = [*values.trainable, *values.others, *values.layer_metrics, values.global_seed]
        return keras.StatelessScope(list(zip(variables, tensors, strict=True)), collect_losses=True)

    def forward(self, x: Any, training: bool, scope: keras.StatelessScope, part: Any) -> Forward:
        """The forward pass inside `scope`.

        Args:
            x: The inputs.
            training: Whether to train.
            scope: The scope the call is made in.
            part: The rows' fraction of the global batch. Losses that layers add are taken
                for means over examples and weighed with it, penalties of activity
                regularisers for sums; so their sum over replicas is one device's value.
        """
        with remembered_activity_penalties(self.model) as penalties:
            y_pred = keras_internals.called(self.model, x, training)
        summed = {id(penalty) for penalty in penalties}
        added = {id(loss) for loss in scope.losses}
        added_losses, regularization = [], []
        for loss in self.model.losses:
            value = tf.reduce_sum(tf.cast(loss, tf.float32))
            if id(loss) not in added:
                regularization.append(value)
            else:
                added_losses.append(value if id(loss) in summed else value * part)
        return Forward(y_pred, added_losses, regularization)

    def new_values(self, scope: keras.StatelessScope, values: Values) -> Values:
        """The values that the variables have inside `scope`."""
        for variable, value in zip(self.trainable, values.trainable, strict=True):
            if scope.get_current_value(variable) is not value:
                raise_trainable_assigned(variable)
        return Values(
            values.trainable,
            [scope.get_current_value(variable) for variable in self.others],
            [scope.get_current_value(variable) for variable in self.layer_metrics],
            scope.get_current_value(self.global_seed),
        )

    def seeded(self, values: Values, replica: tf.Tensor) -> Values:
        """The values with the seeds of one replica, and layer metrics at zero."""
        return Values(
            values.trainable,
            self._with_seeds(randomness.for_replica, values.others, replica),
            [tf.zeros(variable.shape, variable.dtype) for variable in self.layer_metrics],
            randomness.for_replica(values.global_seed, replica),
        )

    def unseeded(self, others: Sequence[tf.Tensor], replica: tf.Tensor) -> list[tf.Tensor]:
        """The values of `others` with the seeds of one device again."""
        return self._with_seeds(randomness.for_one_device, others, replica)

    def _with_seeds(
        self, change: Callable[..., tf.Tensor], others: Sequence[tf.Tensor], replica: tf.Tensor
    ) -> list[tf.Tensor]:
        return [
            change(value, replica) if id(variable) in self._seeds else value
            for variable, value in zip(self.others, others, strict=True)
        ]

    def is_seed(self, variable: keras.Variable) -> bool:
        """Whether the variable is the state of a seed generator."""
        return id(variable) in self._seeds


def raise_trainable_assigned(variable: keras.Variable) -> None:
    """Raise because a layer sets its own trainable weight, which no gradient would reach."""
    raise ValueError(
        problem(
            "A layer assigns a value to a trainable variable while it is called.",
            "Expected forward passes that change non-trainable variables only.",
            "Make the variable non-trainable, or use the assigned value without storing it "
            "(`keras.layers.SpectralNormalization` is such a layer and cannot be distributed).",
            variable=variable.path,
        )
    )


def layer_metric_variables(model: keras.Model) -> list[keras.Variable]:
    """Variables of metrics that layers own and update in their `call`."""
    return [
        variable for metric in keras_internals.owned_metrics(model) for variable in metric.variables
    ]


class RememberingRegularizer:
    """An activity regulariser that notes each penalty it computes.

    Keras sums these penalties over the batch, whereas a loss that a layer adds is mostly a
    mean; the two are weighed differently, and afterwards they look alike.

    Args:
        regularizer: The layer's regulariser.
    """

    penalties = threading.local()
    """The penalties of the forward pass that runs on this thread."""

    def __init__(self, regularizer: Callable[..., tf.Tensor]) -> None:
        self.regularizer = regularizer
        self.users = 0

    def __call__(self, outputs: tf.Tensor) -> tf.Tensor:
        """The regulariser's penalty."""
        penalty = self.regularizer(outputs)
        self.penalties.seen.append(penalty)
        return penalty


@contextlib.contextmanager
def remembered_activity_penalties(model: keras.Model) -> Iterator[list[tf.Tensor]]:
    """The penalties that activity regularisers compute in this context.

    Replicas that are traced in turn enter it at the same time; the last one restores.
    """
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
