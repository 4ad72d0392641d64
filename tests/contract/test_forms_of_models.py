"""Models that are built, called or randomised in unusual ways."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from keras import layers

import keras_multigpu as kmg
from contract.pairs import Squares, X, Y, assert_close, compiled


class WithNone(Squares):
    """A model with None as one of its outputs."""

    def call(self, x):
        return {"value": self.out(x), "more": None}


@pytest.mark.slow
def test_an_output_may_be_none(pairs):
    """It has no loss, and `predict` returns None for it."""
    options = {"loss": {"value": "mse"}, "metrics": None, "optimizer": "sgd"}
    pairs.assert_same_fit(lambda: {"x": X, "y": {"value": Y}}, WithNone, **options)
    model = on_replicas(compiled(WithNone, **options), 2)
    expected = {"value": model(X)["value"].numpy(), "more": None}
    assert_close(model.predict(X, batch_size=8, verbose=0), expected)


class OnlyTrains(keras.Model):
    """A model with a `train_step` and without a `call`."""

    def __init__(self):
        super().__init__()
        self.body, self.error = layers.Dense(1), keras.metrics.MeanSquaredError(name="error")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self.body(x)
            loss = self.compute_loss(x, y, y_pred)
        weights = self.body.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.error.update_state(y, y_pred)
        return {"error": self.error.result()}


class TakesApart(keras.Model):
    """A model whose `train_step` calls it with the halves of `x`.

    Called with `x`, it would be built for twice as many features.
    """

    def __init__(self):
        super().__init__()
        self.flat, self.out = layers.Flatten(), layers.Dense(3)
        self.apart = keras.metrics.Mean(name="apart")

    def call(self, x):
        return self.out(self.flat(x))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            one, other = self(x[:, :2], training=True), self(x[:, 2:4], training=True)
            loss = keras.ops.mean(keras.ops.square(one - other - 1))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.apart.update_state(loss)
        return {"apart": self.apart.result()}


@pytest.mark.parametrize("model", [OnlyTrains, TakesApart])
@pytest.mark.slow
def test_models_that_keras_never_calls_symbolically(pairs, model):
    data = {"x": X, "y": Y, "batch_size": 8, "epochs": 2}
    pairs.assert_same_fit(lambda: data, model, metrics=None)


class Noisy(layers.Layer):
    """Draws from Keras's global random state."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


@pytest.mark.slow
def test_random_numbers_after_fit_are_those_of_keras():
    found = []
    for change in (lambda model: model, lambda model: on_replicas(model, 2)):
        # Keras 3.10 keeps its global generator when it is given another seed.
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(7)
        model = change(keras.Sequential([keras.Input((5,)), Noisy(), layers.Dense(1)]))
        # Plain Keras draws the same without a graph, which takes longer to make.
        eager = not isinstance(model, kmg.DistributedModel)
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=eager)
        model.fit(X, Y, batch_size=8, validation_split=0.2, verbose=0)
        second = layers.Dense(2)
        second.build((None, 5))
        found.append([random.random(), np.random.rand(), second.kernel.numpy()])
    np.testing.assert_array_equal(found[0][2], found[1][2])
    assert found[0][:2] == found[1][:2]


def test_only_training_builds_the_optimizer():
    """So layers that are unfrozen between `evaluate` and `fit` are trained."""
    model = on_replicas(compiled(run_eagerly=True), 2)
    model.layers[0].trainable = False
    model.evaluate(X, Y, verbose=0)
    model.predict(X[:3], verbose=0)
    model.test_on_batch(X, Y)
    assert not model.optimizer.built
    model.layers[0].trainable = True
    before = model.layers[0].get_weights()[0]
    model.train_on_batch(X, Y)
    assert np.abs(model.layers[0].get_weights()[0] - before).max() > 0
