"""If training stands still, it says once where, and goes on when it can."""

import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of
from helpers.processes_left import PATIENCE

import keras_multigpu as kmg
from keras_multigpu.training.watching import standstill
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


def test_a_step_that_does_not_end(said):
    class Stuck(keras.layers.Layer):
        calls = 0

        def wait(self, x):
            self.calls += 1
            if self.calls == 6:
                wait_for("stands still", said)
            time.sleep(0.05)
            return x

        def call(self, x):
            found = tf.numpy_function(self.wait, [x], x.dtype, stateful=True)
            return tf.ensure_shape(tf.stop_gradient(found), x.shape)

    network(Stuck()).fit(np.tile(X, (4, 1)), np.ones((16, 1)), 2, verbose=0)
    assert "This process is in a step: the replicas compute" in said.getvalue()


def test_nothing_is_said_of_training_that_goes_on(said):
    network().fit(np.tile(X, (8, 1)), np.ones((32, 1)), 4, epochs=2, verbose=0)
    assert not said.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.034, "0.034 s"), (9, "9 s"), (64.2, "64 s"), (540, "9 min"), (11520, "3 h 12 min")],
)
def test_times_are_short(seconds, text):
    assert time_text(seconds) == text
