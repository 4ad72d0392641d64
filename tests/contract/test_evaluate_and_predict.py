"""`evaluate` and `predict`, alone and in `fit`, return what Keras returns."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactness import models as made
from helpers.one_device import assert_as_one_device
from keras import layers

from contract.pairs import WEIGHTS, X, Y, assert_close, dataset, endless, evaluated

VALIDATION = [
    ("split", lambda: {"validation_split": 0.3, "validation_freq": 2}),
    (
        "triple",
        lambda: {"validation_data": (X[:13], Y[:13], WEIGHTS[:13]), "validation_batch_size": 5},
    ),
    ("steps", lambda: {"validation_data": dataset().repeat(), "validation_steps": 2}),
]


@pytest.mark.parametrize("arguments", [pytest.param(form, id=name) for name, form in VALIDATION])
@pytest.mark.slow
def test_fit_validates_with_data_in_every_form(pairs, arguments):
    history = pairs.assert_same_fit(
        lambda: {"x": X, "y": Y, "batch_size": 8, "epochs": 2, **arguments()}
    )
    assert {"val_loss", "val_mae"} < history.keys()


@pytest.mark.slow
def test_an_epoch_ends_with_metrics_whatever_its_steps_return(pairs):
    class Returns(keras.Model):
        def train_step(self, data):
            super().train_step(data)
            return {"loss": tf.constant(7.0), "mae": tf.constant(8.0)}

        def test_step(self, data):
            return {"loss": tf.reduce_mean(self(data[0], training=False))}

        def get_metrics_result(self):
            return {**super().get_metrics_result(), "mae": 5.0}

    def model():
        inputs = keras.Input((5,))
        return Returns(inputs, layers.Dense(1)(inputs))

    data = {"validation_data": (X[:9], Y[:9]), "batch_size": 8}
    history = pairs.assert_same_fit(lambda: {"x": X, "y": Y, **data}, model)
    assert 7.0 not in history["loss"]


def doubles():
    return keras.Sequential([keras.Input((1,)), layers.Rescaling(2.0)])


@pytest.mark.parametrize("examples", [1, 2, 4, 5, 6, 7, 8, 11])
def test_predictions_come_in_order_and_number(pairs, examples):
    _, model = pairs(doubles, optimizer=None, loss=None, metrics=None)
    x = np.arange(examples, dtype="float32")[:, np.newaxis]
    np.testing.assert_array_equal(model.predict(x, batch_size=4, verbose=0), 2 * x)
    np.testing.assert_array_equal(model.predict_on_batch(x), 2 * x)


PREDICTED = [
    lambda: {"x": X, "batch_size": 8},
    lambda: {"x": dataset()},
    lambda: {"x": dataset(X).repeat(), "steps": 6},
    lambda: {"x": endless(), "steps": 3},
]


@pytest.mark.slow
def test_predict_keeps_the_structure_of_outputs(pairs):
    heads = functools.partial(made.two_heads, "dict")
    models = pairs(heads, loss=None, metrics=None, optimizer=None)
    for arguments in PREDICTED:
        assert_close(*(model.predict(verbose=0, **arguments()) for model in models))
    assert_close(*(model.predict_on_batch(X) for model in models))


class Noise(layers.Layer):
    """Noise of operations with a state: each graph continues where it has stopped itself."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@pytest.mark.slow
def test_draws_of_tensorflow_continue_as_in_keras():
    """Plain Keras has a graph for the first form of a batch, and another for all others."""

    def drawn(place):
        model = place(keras.Sequential([layers.Input((2,)), Noise()]))
        model.compile(loss="mse", jit_compile=False)
        x = np.zeros((21, 2), "float32")
        found = [model.predict(x, batch_size=8, verbose=0) for _ in range(2)]
        found += [model.predict_on_batch(x[:size]) for size in (8, 5, 8)]
        return found + [evaluated(model, x[:size], x[:size]) for size in (8, 5, 8)]

    assert_as_one_device(drawn, in_graph=True, rtol=1e-6, atol=0)
