"""The loss of an uneven batch, calculated by hand: 3 + 2 examples on two replicas."""

import contextlib
import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import losses, ops

from keras_multigpu.training.replica_pass.loss_reduction import (
    NeedsWholeBatch,
    divided,
    refuse_other_axes,
    refuse_ragged,
    relates_rows,
)

VALUES = [1.0, 2.0, 3.0, 10.0, 20.0]
WEIGHTS = [1.0, 0.0, 2.0, 1.0, 0.5]
SHARES = [slice(0, 3), slice(3, 5)]


def absolute(y_true, y_pred):
    """One value an example: the prediction itself."""
    return tf.squeeze(tf.abs(y_pred - y_true), -1)


def shares_of(loss, weights=None, divisor=None):
    """Each replica's total, own divisors, and part of what is divided by."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", loss)
    results = []
    for share in SHARES:
        rows = tf.constant(VALUES[share])[:, tf.newaxis]
        weight = None if weights is None else tf.constant(weights[share])
        data = (None, tf.zeros_like(rows), weight), rows
        total, shares = divided(model, tf.constant(len(rows) / 5), *data, lambda own: [divisor])
        results.append((float(total), [float(d) for d in shares.divisors], shares.part))
    return results


def loss(reduction):
    class Absolute(keras.losses.Loss):
        def call(self, y_true, y_pred):
            return absolute(y_true, y_pred)

    return Absolute(reduction=reduction)


@pytest.mark.parametrize(
    ("reduction", "weights", "first", "second"),
    [
        ("sum_over_batch_size", None, 6 / 5, 30 / 5),
        ("mean", None, 6 / 5, 30 / 5),
        ("sum", None, 6.0, 30.0),
        ("sum_over_batch_size", WEIGHTS, 7 / 5, 20 / 5),  # 1 + 0 + 6 and 10 + 10
        ("sum", WEIGHTS, 7.0, 20.0),
    ],
)
def test_shares_add_up_to_the_global_loss(reduction, weights, first, second):
    """A replica's share is its sum over the global count."""
    totals = [total for total, *_ in shares_of(loss(reduction), weights)]
    np.testing.assert_allclose(totals, [first, second], rtol=1e-6)


def test_sums_of_weights_are_those_of_all_replicas():
    """`mean_with_sample_weight` divides by the weights of all."""
    weighted = loss("mean_with_sample_weight")
    totals, divisors, parts = zip(*shares_of(weighted, WEIGHTS, tf.constant(4.5)), strict=True)
    assert divisors == ([3.0], [1.5])
    np.testing.assert_allclose(totals, [7 / 4.5, 20 / 4.5], rtol=1e-6)
    np.testing.assert_allclose(parts, [3 / 4.5, 1.5 / 4.5], rtol=1e-6)


def test_a_replica_has_a_part_of_what_is_divided_by():
    """Of a sum nothing is divided; several losses count by examples."""
    assert [part for *_, part in shares_of(loss("sum"))] == [None, None]
    means = [part for *_, part in shares_of(loss("mean"))]
    np.testing.assert_allclose(means, [3 / 5, 2 / 5], rtol=1e-6)


@pytest.mark.parametrize(
    "whole",
    [loss("none"), lambda y_true, y_pred: tf.reduce_mean(absolute(y_true, y_pred))],
    ids=["no reduction", "scalar"],
)
def test_losses_of_the_whole_batch_are_told_apart(whole):
    """What is no sum over examples says so."""
    with pytest.raises(NeedsWholeBatch):
        shares_of(whole)


def test_ragged_predictions_are_refused_where_they_would_be_gathered():
    """A loss of the whole batch needs them all; on one replica they are."""
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0]])
    refuse_ragged({"a": ragged}, 1)
    refuse_ragged([ragged.to_tensor()], 2)
    with pytest.raises(ValueError, match="Ragged predictions.*replicas=2"):
        refuse_ragged({"a": ragged}, 2)


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


@pytest.mark.parametrize(
    ("values", "weights", "refused"),
    [
        ((None,), (None,), False),
        ((None,), (None, 1), False),
        ((None, 1), (None,), False),
        ((None, 3), (None, 1), False),
        ((None, 3), (None, 3), False),
        ((None, 3), (), False),
        ((None, 3), (None,), True),
        ((None, 3, 3), (None, 3), True),
    ],
)
def test_weights_of_examples_are_not_taken_for_those_of_another_axis(values, weights, refused):
    """A share of three rows would take a row's weights for those of three timesteps."""
    with contextlib.ExitStack() as stack:
        if refused:
            stack.enter_context(pytest.raises(ValueError, match="`sample_weight` has fewer axes"))
        tf.function(refuse_other_axes, autograph=False).get_concrete_function(
            *(tf.TensorSpec(shape) for shape in (values, weights))
        )
