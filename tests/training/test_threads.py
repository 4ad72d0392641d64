"""One thread at a time changes a model, and models in several threads do not interfere."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of
from helpers.processes_left import PATIENCE
from keras.src.backend.tensorflow.optimizer import TFOptimizer  # noqa: TID251 (what is exchanged)

import keras_multigpu as kmg
from keras_multigpu.keras_internals.dataset_internals import shuffled_by
from keras_multigpu.keras_internals.optimizer_internals import variables_anywhere
from keras_multigpu.keras_internals.variable_internals import storages_of
from keras_multigpu.training.replica_group import copies_in
from keras_multigpu.training.steps.one_device import traces_one_device

X, Y = np.ones((8, 3), "float32"), np.ones((8, 1), "float32")


def compiled():
    """A model without graphs, to save time."""
    model = kmg.distribute(keras.Sequential([keras.layers.Dense(1)]), replicas_of(2))
    model.compile("adam", "mse", run_eagerly=True)
    return model


class Asks(keras.callbacks.Callback):
    """Calls methods of the model in another thread while `fit` runs, and keeps their errors."""

    def __init__(self, calls):
        super().__init__()
        self.calls = calls
        self.errors = []

    def on_train_batch_end(self, batch, logs=None):
        if not self.errors:
            thread = threading.Thread(target=self.ask, name="other")
            thread.start()
            thread.join(PATIENCE)

    def ask(self):
        """Each of them, one after another."""
        for call in self.calls:
            try:
                call()
            except RuntimeError as error:
                self.errors.append(str(error))


def test_a_second_thread_is_refused_by_name_and_training_continues():
    """`predict` may be called meanwhile, and everything after `fit`."""
    model = compiled()
    model.predict(X, verbose=0)
    calls = {
        "fit": lambda: model.fit(X, Y, verbose=0),
        "evaluate": lambda: model.evaluate(X, Y, verbose=0),
        "train_on_batch": lambda: model.train_on_batch(X, Y),
        "test_on_batch": lambda: model.test_on_batch(X, Y),
    }
    asks = Asks([*calls.values(), lambda: model.predict(X, verbose=0)])
    model.fit(X, Y, batch_size=2, verbose=0, callbacks=[asks])
    assert int(model.optimizer.iterations) == 4
    for method, error in zip(calls, asks.errors, strict=True):
        assert error.startswith(f"`{method}` was called while another thread trains")
        assert "Expected one thread at a time" in error and "thread='other'" in error
    for call in calls.values():
        call()


class Evaluates(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        logs["seen"] = self.model.evaluate(X, Y, verbose=0)


def test_a_callback_of_the_same_thread_may_evaluate():
    model = compiled()
    assert "seen" in model.fit(X, Y, verbose=0, callbacks=[Evaluates()]).history
    broken = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, verbose=0, callbacks=[broken])
    thread = Asks([lambda: model.fit(X, Y, verbose=0)])
    thread.on_train_batch_end(0)
    assert thread.errors == []


@pytest.mark.parametrize(
    ("exchanging", "owner", "name"),
    [
        (variables_anywhere, TFOptimizer, "add_variable_from_reference"),
        (lambda: shuffled_by(tf.identity), tf.random, "shuffle"),
    ],
)
def test_threads_patch_keras_in_turn_and_restore_it(exchanging, owner, name):
    original, entered, left = getattr(owner, name), threading.Event(), threading.Event()

    def overlap():
        with exchanging():
            entered.set()
            left.wait(PATIENCE)

    thread = threading.Thread(target=overlap)
    with exchanging():
        thread.start()
        # It waits its turn.
        assert not entered.wait(0.2)
    left.set()
    thread.join(PATIENCE)
    assert getattr(owner, name) is original


class Waits(keras.Model):
    """A model whose traces for `fit` and `predict` overlap, if they can."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.training_began, self.other_began = threading.Event(), threading.Event()
        self.trained, self.met = threading.Event(), None

    def call(self, x, training=False):
        """`predict` begins inside of `fit`'s trace, and ends after it."""
        if traces_one_device():
            if training:
                self.training_began.set()
                self.met = self.other_began.wait(2)
            elif self.training_began.is_set():
                self.other_began.set()
                self.trained.wait(2)
        return self.dense(x)


def test_the_first_prediction_may_start_during_a_trace_of_another_thread():
    """Each trace replaces variables for a while, which the other must not see."""
    model = Waits()
    model(X)
    model = kmg.distribute(model, replicas_of(2))
    model.compile("sgd", "mse")
    found = []

    def predict():
        model.training_began.wait(PATIENCE)
        found.append(model.predict(X, verbose=0))

    thread = threading.Thread(target=predict)
    thread.start()
    model.fit(X, Y, batch_size=8, verbose=0)
    model.trained.set()
    thread.join(PATIENCE)
    assert found[0].shape == (8, 1)
    assert not model.met
    storages = storages_of(model.variables)
    assert [len(copies_in(storage)) for storage in storages] == [2] * len(storages)
    model.set_weights([np.zeros_like(value) for value in model.get_weights()])
    np.testing.assert_array_equal(model.predict(X, verbose=0), np.zeros((8, 1)))
