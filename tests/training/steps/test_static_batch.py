"""Batches of all sizes share a step, unless a model reads the static batch size."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.one_device import assert_as_one_device
from keras import layers

import keras_multigpu as kmg

X = np.random.default_rng(0).normal(size=(14, 5)).astype("float32")
Y = X[:, :3]


class Counts(keras.Model):
    """Loops over examples in Python, and weighs each by its position."""

    def __init__(self):
        super().__init__()
        self.last = layers.Dense(3)

    def call(self, x):
        rows = [x[place] / (place + 1) for place in range(x.shape[0])]
        return self.last(tf.stack(rows)) * int(x.shape[0])


class CountsInStep(keras.Sequential):
    """Only its `train_step` reads the batch size."""

    def __init__(self):
        super().__init__([keras.Input((5,)), layers.Dense(3)])

    def train_step(self, data):
        x, y = data
        weights = tf.constant(np.linspace(1, 2, int(x.shape[0])), tf.float32)
        return super().train_step((x, y, weights))


def outcome(place, **compiled):
    model = place(Counts())
    model.compile(keras.optimizers.SGD(0.1), "mse", **compiled)
    data = {"batch_size": 4, "verbose": 0}
    history = model.fit(X, Y, shuffle=False, epochs=2, **data).history
    found = [*model.get_weights(), *history["loss"]]
    return [*found, model.evaluate(X, Y, **data), model.predict(X, **data)]


@pytest.mark.slow
def test_each_batch_size_gets_its_own_step():
    # Without a graph every batch size is known.
    assert_as_one_device(outcome, jit_compile=False, steps_per_execution=2)


def test_single_batches_have_their_static_sizes():
    model = kmg.distribute(Counts(), devices=2)
    model.compile(keras.optimizers.SGD(0.0), "mse", jit_compile=False)
    losses = [model.train_on_batch(X[:size], Y[:size]) for size in (4, 3, 4)]
    predicted = [model.predict_on_batch(X[:size]) for size in (4, 3)]
    for size, rows in zip((4, 3), predicted, strict=True):
        np.testing.assert_allclose(rows, model(X[:size]), rtol=1e-5, atol=1e-6)
    # A log is the mean over all examples since `reset_metrics`, as in Keras.
    assert np.isfinite(losses).all()


class Diagonal(keras.Sequential):
    """A loss of the diagonal of a matrix of all pairs, weighted by the rows."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        pairs = tf.matmul(y_pred, y_pred, transpose_b=True)
        return tf.reduce_mean(tf.linalg.diag_part(pairs) * x[:, 0])


def test_what_is_gathered_has_a_static_shape():
    """The gradient gives `MatrixDiagV3` the lengths of its result; its input's must be known."""

    def numbers(place, **compiled):
        model = place(Diagonal([keras.Input((5,)), layers.Dense(3)]))
        model.compile(keras.optimizers.SGD(0.1), jit_compile=False, **compiled)
        data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True)
        return model.fit(data, shuffle=False, verbose=0).history, model.get_weights()

    assert_as_one_device(numbers, replicas=3)


def test_an_error_of_the_model_is_raised_unchanged():
    class Wrong(Counts):
        def call(self, x):
            raise RuntimeError("a fault of the model")

    model = kmg.distribute(Wrong(), devices=2)
    model.compile("sgd", "mse")
    with pytest.raises(RuntimeError, match="a fault of the model"):
        model.fit(X, Y, batch_size=4, verbose=0)
    with pytest.raises(RuntimeError, match="a fault of the model"):
        model.train_on_batch(X, Y)


class Noted(layers.Layer):
    """Notes the shapes that it is traced for."""

    shapes = []

    def call(self, x):
        self.shapes.append([*x.shape])
        return x


def test_batches_of_other_sizes_and_lengths_share_a_step():
    """An axis becomes unknown once it has changed."""
    inputs = keras.Input((None, 2))
    model = kmg.distribute(keras.Model(inputs, Noted()(inputs)), devices=2)
    Noted.shapes.clear()
    for size, length in ((3, 4), (5, 4), (1, 4), (2, 5), (2, 6), (3, 4)):
        x = np.ones((size, length, 2), "float32")
        assert model.predict_on_batch(x).shape == x.shape
    assert Noted.shapes == [[None, 4, 2], [None, None, 2]]


def test_many_batch_sizes_are_reported(caplog):
    model = kmg.distribute(CountsInStep(), devices=2)
    model.compile("sgd", "mse", jit_compile=False)
    for size in (4, 3, 4, 5, 2):
        model.train_on_batch(X[:size], Y[:size])
    assert "traced again for each size" not in caplog.text
    for size in (6, 6, 7):
        model.train_on_batch(X[:size], Y[:size])
    assert caplog.text.count("traced again for each size, 5 times so far") == 1
