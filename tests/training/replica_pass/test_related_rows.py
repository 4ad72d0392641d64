"""Which losses relate examples to each other: every class of Keras, and functions of one's own."""

import inspect

import keras
import pytest
import tensorflow as tf
from keras import losses
from keras import ops

from keras_multigpu.training.replica_pass.related_rows import relates_rows

CLASSES = [
    cls
    for _, cls in inspect.getmembers(losses, inspect.isclass)
    if issubclass(cls, losses.Loss) and cls is not losses.Loss
]
LABELS = {
    losses.SparseCategoricalCrossentropy,
    losses.CategoricalGeneralizedCrossEntropy,
    losses.Circle,
}


class Wrapped(losses.Loss):
    """A loss of a function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def call(self, y_true, y_pred):
        return self.function(y_true, y_pred)


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_circle_is_the_only_loss_of_keras_that_relates_examples(cls):
    """All others list values of single examples, or one number for the whole batch."""
    y_true = tf.zeros((4,), tf.int32) if cls in LABELS else tf.zeros((4, 3))
    y_pred = tf.zeros((4, 3))
    if cls is losses.CTC:
        y_true, y_pred = tf.zeros((4, 2), tf.int32), tf.zeros((4, 6, 3))
    assert relates_rows(cls(), y_true, y_pred) is (cls is losses.Circle)


def centred(y_true, y_pred):
    return ops.mean(ops.square(y_pred - ops.mean(y_pred, axis=0)), axis=-1)


def ranked(y_true, y_pred):
    return ops.cast(ops.argsort(y_pred[:, 0]), "float32") * y_pred[:, 0]


@pytest.mark.parametrize(
    ("loss", "related"),
    [
        (Wrapped(centred), True),
        (Wrapped(ranked), True),
        (Wrapped(lambda y, p: p[:, 0] * ops.arange(ops.shape(p)[0], dtype="float32")), True),
        (losses.Dice(axis=(0, 1)), True),
        (losses.Dice(axis=(1, 2)), False),
        (Wrapped(lambda y, p: ops.sum(ops.abs(y - p), axis=-1)), False),
        (Wrapped(lambda y, p: tf.reduce_mean(y * p)), False),
        (Wrapped(lambda y, p: p[:, 0] * keras.random.uniform((len(p),))), False),
        (Wrapped(lambda y, p: ops.reshape(p, (5, -1))), False),
    ],
    ids=["centred", "ranked", "places", "all", "axes", "sum", "number", "random", "fails"],
)
def test_functions_are_tried_on_a_few_rows(loss, related):
    """Reductions over other axes, one number for all, draws and failures are no relation."""
    shape = (None, 4, 2) if isinstance(loss, losses.Dice) else (None, 2)
    spec = tf.TensorSpec(shape)
    found = []

    @tf.function(autograph=False)
    def step(y_true, y_pred):
        found.append(relates_rows(loss, y_true, y_pred))

    step.get_concrete_function(spec, spec)
    assert found[0] is related
