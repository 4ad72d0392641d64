"""`evaluate` and `predict`, alone and in `fit`, return what Keras returns."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactness import models as made
from helpers.cpu_replicas import on_replicas
from keras import layers

from contract.pairs import BATCHES, WEIGHTS, Batched, X, Y, assert_close, dataset, endless

VALIDATION = [
    ("split", lambda: {"validation_split": 0.3}),
    ("triple", lambda: {"validation_data": (X[:13], Y[:13], WEIGHTS[:13])}),
    ("pair", lambda: {"validation_data": (X[:13], Y[:13])}),
    ("dataset", lambda: {"validation_data": dataset(X[:13], Y[:13])}),
    ("steps", lambda: {"validation_data": dataset().repeat(), "validation_steps": 2}),
    ("generator", lambda: {"validation_data": endless(BATCHES[:1]), "validation_steps": 2}),
    ("PyDataset", lambda: {"validation_data": Batched()}),
    ("every second epoch", lambda: {"validation_data": (X, Y), "validation_freq": 2, "epochs": 3}),
    ("listed epochs", lambda: {"validation_data": (X, Y), "validation_freq": [1, 3], "epochs": 3}),
    ("batch size", lambda: {"validation_data": (X, Y), "validation_batch_size": 5}),
]


@pytest.mark.parametrize("arguments", [pytest.param(form, id=name) for name, form in VALIDATION])
@pytest.mark.in_test_all("data of training have every form, too", after=2)
@pytest.mark.slow
def test_fit_validates_with_data_in_every_form(pairs, arguments):
    history = pairs.assert_same_fit(
        lambda: {"x": X, "y": Y, "batch_size": 8, "epochs": 2, **arguments()}
    )
    assert {"val_loss", "val_mae"} < history.keys()


@pytest.mark.in_test_all("the method is called as it is")
def test_fit_validates_with_an_overridden_evaluate(pairs):
    """`fit` calls it once an epoch, with the arguments that Keras passes."""

    class Evaluates(keras.Model):
        def evaluate(self, x=None, y=None, verbose="auto", **options):
            given = sorted(name for name, value in options.items() if value is not None)
            logs = super().evaluate(x, y, verbose=verbose, **options)
            return {**logs, "given": " ".join(given), "rows": len(x)}

    def model():
        inputs = keras.Input((5,))
        return Evaluates(inputs, layers.Dense(1)(inputs))

    validation = {"validation_data": (X[:9], Y[:9]), "validation_batch_size": 4}
    pairs.assert_same_fit(lambda: {"x": X, "y": Y, "epochs": 2, **validation}, model)


@pytest.mark.in_test_all("Keras's own tests return other logs")
def test_an_epoch_ends_with_metrics_whatever_its_steps_return(pairs):
    class Returns(keras.Model):
        def train_step(self, data):
            super().train_step(data)
            return {"loss": tf.constant(7.0), "mae": tf.constant(8.0)}

        def test_step(self, data):
            return {"loss": tf.reduce_mean(self(data[0], training=False))}

        def get_metrics_result(self):
            return {**super().get_metrics_result(), "mae": 5.0}

    class Untracked(Returns):
        def train_step(self, data):
            return {"loss": tf.reduce_mean(self(data[0], training=True))}

        metrics = property(lambda self: [self._loss_tracker])

        def get_metrics_result(self):
            return {metric.name: metric.result() for metric in self.metrics}

    for kind in (Returns, Untracked):

        def model(kind=kind):
            inputs = keras.Input((5,))
            return kind(inputs, layers.Dense(1)(inputs))

        data = {"validation_data": (X[:9], Y[:9]), "batch_size": 8}
        history = pairs.assert_same_fit(lambda data=data: {"x": X, "y": Y, **data}, model)
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
    ("arrays", lambda: {"x": X, "batch_size": 8}),
    ("dataset", lambda: {"x": dataset(X)}),
    ("dataset with targets", lambda: {"x": dataset()}),
    ("steps", lambda: {"x": dataset(X).repeat(), "steps": 6}),
    ("PyDataset", lambda: {"x": Batched()}),
    ("generator", lambda: {"x": endless(), "steps": 3}),
]


HEADS = {output: functools.partial(made.two_heads, output) for output in ("dict", "list")}


@pytest.mark.parametrize("arguments", [pytest.param(form, id=name) for name, form in PREDICTED])
@pytest.mark.parametrize("output", ["dict", "list"])
@pytest.mark.in_test_all("Keras's own tests predict structures", after=4)
@pytest.mark.slow
def test_predict_keeps_the_structure_of_outputs(pairs, output, arguments):
    heads = HEADS[output]
    one, two = pairs(heads, loss=None, metrics=None, optimizer=None)
    assert_close(*(model.predict(verbose=0, **arguments()) for model in (one, two)))
    assert_close(*(model.predict_on_batch(X) for model in (one, two)))


class Noise(layers.Layer):
    """Noise of operations with a state: each graph continues where it has stopped itself."""

    def call(self, x):
        return x + tf.random.normal(tf.shape(x))


@pytest.mark.slow
def test_draws_of_tensorflow_continue_as_in_keras():
    """Plain Keras has a graph for the first form of a batch, and another for all others."""
    drawn = []
    for replicas in (0, 2):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([layers.Input((2,)), Noise()])
        model = on_replicas(model, replicas) if replicas else model
        model.compile(loss="mse", jit_compile=False)
        x = np.zeros((21, 2), "float32")
        drawn.append([model.predict(x, batch_size=8, verbose=0) for _ in range(2)])
        drawn[-1] += [model.predict_on_batch(x[:size]) for size in (8, 5, 8)]
        drawn[-1] += [model.test_on_batch(x[:size], x[:size]) for size in (8, 5, 8)]
    for expected, found in zip(*drawn, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
