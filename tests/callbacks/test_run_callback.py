"""`RunCallback`: what a callback declares is checked before the first step, and saved."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas

from keras_multigpu import callbacks

X, Y = np.zeros((12, 3), "float32"), np.zeros((12, 1), "float32")


def network(distributed=True):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    return on_replicas(model, 1) if distributed else model


def fit(model, *given, epochs=1, batch_size=4, run_eagerly=True):
    """The history of a training, without a graph, which takes longer to make."""
    model.compile("sgd", "mse", run_eagerly=run_eagerly)
    return model.fit(X, Y, batch_size, epochs=epochs, verbose=0, callbacks=list(given)).history


class Counter(callbacks.RunCallback):
    """Counts and logs the steps of all epochs, and notes every second one."""

    writes = ("count",)
    saved = ("count", "seconds")
    single = True

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.count, self.seconds = 0, []

    def on_train_batch_end(self, batch, logs=None):
        self.count += 1
        if self.every(2, batch):
            self.seconds.append(batch)

    def on_epoch_end(self, epoch, logs=None):
        logs["count"] = self.count


@pytest.mark.parametrize("distributed", [True, False])
def test_every_counts_the_steps_of_an_epoch(distributed):
    """Of three steps in an epoch the second; of a single step none."""
    counter, model = Counter(), network(distributed)
    assert fit(model, counter, epochs=2)["count"] == [3, 6]
    assert counter.seconds == [1, 1]
    fit(model, counter, epochs=3, batch_size=12)
    assert counter.seconds == []


def test_a_callback_prints_unless_it_is_silent(capsys):
    Counter().say("done")
    Counter(verbose=0).say("not asked for")
    assert capsys.readouterr().out == "Counter: done\n"
