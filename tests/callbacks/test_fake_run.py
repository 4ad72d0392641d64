"""The fake run of `helpers.fake_run` calls what a real `fit` calls, with the same numbers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from helpers.fake_run import fake_fit
from helpers.one_device import assert_close

from keras_multigpu.callbacks import RunCallback
from keras_multigpu.training.watching.probe import Probe

RANDOM = np.random.default_rng(0)
X, Y = RANDOM.normal(size=(11, 3)).astype("float32"), np.zeros((11, 1), "float32")


class Seeing(Probe):
    """Keeps what replicas have of the last step, and forbids the third one."""

    def build(self, strategy):
        self.steps, self.last = tf.Variable(0), tf.Variable(tf.zeros([2, 6]))

    def on_replica(self, view):
        sizes = [view.examples, view.global_batch_size, tf.size(view.y_pred)]
        numbers = [*sizes, view.loss, view.total_loss, view.square_norm]
        return [tf.stack([tf.cast(each, tf.float32) for each in numbers])]

    def allows(self, measured):
        return self.steps != 2

    def collect(self, measured, allowed):
        self.last.assign([numbers for (numbers,) in measured])
        self.steps.assign_add(1)


class Noting(RunCallback):
    """Notes each hook with what a callback knows then; fails in the second epoch if asked."""

    def __init__(self, fails):
        super().__init__()
        self.fails, self.notes = fails, []

    def note(self, hook, number=0, logs=None):
        run = self.run
        sizes = [run.epoch, run.step, run.steps_per_epoch, run.global_batch_size, run.epochs]
        self.notes.append((hook, number, sizes, logs or {}, self.params["steps"], sorted(run.logs)))

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        run, self.seen = self.run, self.run.watch(Seeing())
        run.set_batch_size(3)
        run.after_begin(lambda: self.note("begun"))
        for hook in ("on_epoch_begin", "on_train_batch_end", "on_epoch_end"):
            run.after_each(hook, lambda hook=hook: self.note(f"after {hook}"))
        run.after_failure(lambda: self.notes.append("failed"))
        for number in range(2):
            run.after_end(lambda number=number: self.notes.append(f"end {number}"))
        self.note("on_train_begin")

    def on_epoch_begin(self, epoch, logs=None):
        self.note("on_epoch_begin", epoch, logs)

    def on_train_batch_begin(self, batch, logs=None):
        self.note("on_train_batch_begin", batch, logs)

    def on_train_batch_end(self, batch, logs=None):
        self.note("on_train_batch_end", batch, logs)
        self.notes.append(self.seen.last.numpy())
        if self.fails and self.run.epoch:
            raise RuntimeError("asked for")

    def on_epoch_end(self, epoch, logs=None):
        self.note("on_epoch_end", epoch, logs)
        self.run.set_batch_size(5)

    def on_train_end(self, logs=None):
        self.note("on_train_end", 0, logs)


@pytest.mark.parametrize(("fails", "per_execution"), [(False, 1), (True, 1), (False, 2)])
@pytest.mark.slow
def test_a_fake_run_is_seen_as_a_real_one(fails, per_execution):
    """Hooks, sizes, logs, views of replicas, a forbidden step, and how `fit` ends."""
    found = []
    for is_real in (True, False):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model = on_replicas(model, 2) if is_real else model
        several = {"steps_per_execution": per_execution}
        compiled = several if is_real else {}
        model.compile(keras.optimizers.SGD(0.1, 0.9), "mse", metrics=["mae"], **compiled)
        given = {"x": X, "y": Y, "batch_size": 4, "epochs": 3}
        noting = Noting(fails)
        try:
            if is_real:
                model.fit(**given, callbacks=[noting], shuffle=False, verbose=0)
            else:
                fake_fit(model, noting, replicas=2, **several, **given)
        except RuntimeError as error:
            noting.notes.append(str(error))
        found.append([noting.notes, model.get_weights(), model.history.history])
    assert_close(found[1], found[0])
