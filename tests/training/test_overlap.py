"""Sums travel while the backward pass still runs, by the times of events."""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import as_on_gpus

import keras_multigpu as kmg
from keras_multigpu.training.exchange import packing
from keras_multigpu.training.exchange.exchange import Exchange

PATIENCE = 6000


def noted(tensor, function):
    """The tensor, available once the function was called, without control dependencies."""

    def call(value):
        function()
        return value

    same = tf.numpy_function(call, [tensor], tensor.dtype, stateful=False)
    same.set_shape(tensor.shape)
    return same


class NearTheInput(keras.layers.Layer):
    """A layer whose backward pass waits for an event, but no longer than a minute.

    One replica waits and the others do not: on a machine with two cores, two that wait would leave
    nobody to sum.

    Attributes:
        event: What it waits for.
        times: When each replica's backward pass was over.
    """

    def __init__(self):
        super().__init__()
        self.event = threading.Event()
        self.times = []
        self._one = threading.Lock()

    def build(self, shape):
        self.factor = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        @tf.custom_gradient
        def product(x, factor):
            return x * factor, lambda dy: (dy * factor, tf.reduce_sum(self.waited(dy * x)))

        return product(x, tf.convert_to_tensor(self.factor))

    def waited(self, gradient):
        """The gradient, after a while."""

        def waits(turn):
            if turn == 0 and not self._one.acquire(blocking=False):
                return False
            return not self.event.is_set()

        def goes_on(turn, _):
            waiting = tf.numpy_function(waits, [turn], tf.bool, stateful=False)
            return (turn < PATIENCE) & waiting

        def body(turn, value):
            return turn + 1, noted(value, lambda: time.sleep(0.01))

        _, gradient = tf.while_loop(goes_on, body, [0, gradient])
        return noted(gradient, lambda: self.times.append(time.perf_counter()))


@pytest.mark.slow
@pytest.mark.usefixtures("python_sees_rows")
def test_the_first_sum_is_over_before_the_backward_pass_ends(monkeypatch):
    monkeypatch.setattr(packing, "BUCKET", 64)
    layer, summed, sum_of = NearTheInput(), [], Exchange.sum

    def note():
        summed.append(time.perf_counter())
        layer.event.set()

    def noting_sum(exchange, parts):
        return [[noted(each, note) for each in own] for own in sum_of(exchange, parts)]

    monkeypatch.setattr(Exchange, "sum", noting_sum)
    model = keras.Sequential(
        [keras.Input((4,)), layer, keras.layers.Dense(8), keras.layers.Dense(3)]
    )
    model = kmg.distribute(model, as_on_gpus(2))
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 4), "float32"), np.ones((4, 3), "float32"), batch_size=4, verbose=0)
    assert len(layer.times) == 2
    assert min(summed) < max(layer.times)


def test_a_small_model_has_one_sum(monkeypatch):
    calls, sum_of = [], Exchange.sum

    def counted(exchange, parts):
        calls.append([len(own) for own in parts])
        return sum_of(exchange, parts)

    monkeypatch.setattr(Exchange, "sum", counted)
    model = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(3)]
    )
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=2))
    model.compile("sgd", "mse", metrics=["mae"])
    model.train_on_batch(np.ones((4, 4), "float32"), np.ones((4, 3), "float32"))
    # On each of two replicas.
    assert calls == [[1, 1]]
