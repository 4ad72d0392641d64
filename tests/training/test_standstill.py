"""If training stands still, it says once where, and goes on when it can."""

import re
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of
from helpers.processes_left import PATIENCE

import keras_multigpu as kmg
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.watching import standstill
from keras_multigpu.training.watching.whereabouts import LayersOf, whereabouts
from keras_multigpu.writing import time_text

X = np.ones((4, 3), "float32")


class Said:
    """All that was written to standard error."""

    def __init__(self, capsys):
        self._capsys, self._text = capsys, ""

    def getvalue(self):
        self._text += self._capsys.readouterr().err
        return self._text


@pytest.fixture
def said(monkeypatch, capsys):
    """What a watch says that has little patience."""
    limits = {"POLL": 0.02, "LEAST": 0.5, "FIRST": 20, "USUAL": 0, "IN_HOOKS": 1}
    for name, value in limits.items():
        monkeypatch.setattr(standstill, name, value)
    return Said(capsys)


def wait_for(text, said):
    latest = time.monotonic() + PATIENCE
    while text not in said.getvalue():
        assert time.monotonic() < latest, said.getvalue()
        time.sleep(0.01)


def network(*layers):
    model = keras.Sequential([keras.Input((3,)), *layers, keras.layers.Dense(1)])
    model = kmg.distribute(model, replicas_of(2))
    model.compile("sgd", "mse")
    return model


def test_data_that_do_not_come(said):
    def batches():
        for number in range(8):
            if number == 6:
                wait_for("What its threads do", said)
            yield X, X[:, :1]
            time.sleep(0.05)

    network().fit(batches(), verbose=0)
    (first, *_), text = said.getvalue().strip().split("\n"), said.getvalue()
    assert first.startswith("keras_multigpu: Training stands still, for 0.")
    assert "This process waits for data (epoch 1, step 7). It goes on waiting." in first
    assert "a step usually takes 0.0" in first
    assert 'wait_for("What its threads do", said)' in text
    assert text.count("stands still") == text.count("Training goes on, after") == 1


def test_a_callback_that_does_not_return(said):
    class Stuck(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            wait_for("stands still", said)

        def on_train_batch_end(self, batch, logs=None):
            time.sleep(0.05)

    network().fit(np.tile(X, (3, 1)), np.ones((12, 1)), 2, verbose=0, callbacks=[Stuck()])
    assert "This process is in a callback: Stuck.on_epoch_end (epoch 1, step 7)" in said.getvalue()


class Stuck(keras.layers.Layer):
    """The first replica looks at the rows of all, in Python."""

    def __init__(self, said):
        super().__init__()
        self.said, self.calls = said, 0

    def look(self, x):
        self.calls += 1
        if self.calls == 7:
            wait_for("stands still", self.said)
        time.sleep(0.05)
        return x

    def call(self, x):
        found = tf.numpy_function(self.look, [x], x.dtype, stateful=False)
        return tf.ensure_shape(tf.stop_gradient(found), x.shape)


def test_a_step_that_does_not_end(said):
    """It names the sum that a replica waits in, and how far the other one is."""
    model = network(Stuck(said))
    model.fit(np.tile(X, (4, 1)), np.ones((16, 1)), 2, verbose=0)
    ahead, behind = (rf"CPU:{n} has come to sum {n + 1} of 4 \([^()]+\), " for n in (1, 0))
    found = f"This process is in a step: {ahead}{behind}all replicas to sum 1"
    assert re.search(found, said.getvalue()), said.getvalue()


@pytest.mark.parametrize("accumulated", [None, 2])
def test_a_sum_is_named_by_its_layers(accumulated):
    block = [keras.layers.Conv2D(4, 3, name="conv"), keras.layers.BatchNormalization(name="bn")]
    cell = [keras.layers.Reshape((-1, 4)), keras.layers.LSTM(3, name="lstm")]
    layers = [keras.Input((6, 6, 3)), *block, *cell, keras.layers.Dense(1, name="top")]
    model = kmg.distribute(keras.Sequential(layers, name="net"), replicas_of(2))
    optimizer = keras.optimizers.Adam(clipnorm=1.0, gradient_accumulation_steps=accumulated)
    model.compile(optimizer, "mse")
    model.fit(np.ones((8, 6, 6, 3)), np.ones((8, 1)), 4, verbose=0)
    (steps,) = replication_of(model).steps_of("train")
    (runner,) = steps.runners
    names = LayersOf(runner.step)
    found = [names.names(cuts) for _, cuts in runner.step.local.exchanged]
    layers = [f"net/{name}" for name in ("top", "lstm/lstm_cell", "conv", "bn")]
    assert found[0] == layers[-1]
    said = [f"gradients of {layer}" for layer in layers]
    assert {each for text in found[1:] for each in said if each in text} >= set(said[:2])
    assert whereabouts(runner).startswith(
        f"CPU:0 and CPU:1 have come to sum {len(found)} of {len(found)} ({found[-1]})"
    )


def test_nothing_is_said_of_training_that_goes_on(said):
    network().fit(np.tile(X, (8, 1)), np.ones((32, 1)), 4, epochs=2, verbose=0)
    assert not said.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.034, "0.034 s"), (9, "9 s"), (64.2, "64 s"), (540, "9 min"), (11520, "3 h 12 min")],
)
def test_times_are_short(seconds, text):
    assert time_text(seconds) == text
