"""`NaNGuard` with custom steps, other callbacks, `Batches` and resumed runs."""

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from helpers.own_step import UnseenStep
from helpers.stopped_runs import StopAt, Stopped
from nan_guard_models import assert_same, data, fit, line, network, state_of

import keras_multigpu as kmg
from keras_multigpu.callbacks import NaNGuard
from keras_multigpu.training.replication import replication_of


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.in_test_all("one opaque step shows it", after=1)
@pytest.mark.slow
def test_opaque_steps_are_checked_from_outside(distributed, caplog):
    """By logs and weights, in a `train_step` with its own loss and in stock `fit`."""

    def made():
        keras.utils.set_random_seed(1)
        model = UnseenStep() if distributed else keras.Sequential([keras.layers.Dense(1)])
        if distributed:
            model = on_replicas(model, 2)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    x, y = data(13)
    guard = NaNGuard(every_steps=1)
    fit(made(), x, y, guard)
    (finding,) = guard.findings
    assert (finding.epoch, finding.step, finding.what) == (0, 1, "loss")
    assert finding.replicas == ((0, 1) if distributed else (0,))
    assert len(finding.variables) == 2
    assert "weights have already changed" in caplog.text

    model = made()
    history = fit(model, x, y, NaNGuard("rollback", every_steps=1))
    assert int(model.optimizer.iterations.numpy()) == 2
    np.testing.assert_allclose(float(model.optimizer.learning_rate.numpy()), 0.05)
    assert np.isfinite(history.history["loss"]).all()
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


class Divides(keras.layers.Layer):
    """Changes a variable by an unknown operation, so that its step runs unsplit."""

    def __init__(self):
        super().__init__()
        self.seen = tf.Variable(tf.ones((2, 3)), trainable=False)

    def call(self, x):
        self.seen.scatter_div(tf.IndexedSlices(tf.ones((1, 3)), [0]))
        return x + self.seen[0]


@pytest.mark.in_test_all("the test before checks weights")
def test_a_step_that_is_not_split_is_checked_by_its_weights(caplog):
    """The default action works with any model; `"skip"` must see into the step."""
    model = keras.Sequential([keras.Input((3,)), Divides(), keras.layers.Dense(1)])
    model = on_replicas(model, 2)
    model.compile(keras.optimizers.SGD(0.1), "mse")
    x, y = data()
    guard = NaNGuard(every_steps=1)
    history = fit(model, x, y, guard).history
    assert guard.findings == [] and np.isfinite(history["loss"]).all()
    with pytest.raises(ValueError, match="`NaNGuard` cannot look inside this step.*unsplit"):
        fit(model, x, y, NaNGuard("skip"))
    x[13] = np.nan
    fit(model, x, y, guard)
    assert [one.step for one in guard.findings] == [1]
    assert "weights have already changed" in caplog.text


def test_a_single_bad_copy_of_a_weight_is_found():
    """If a step cannot be inspected, the copies of each replica are."""
    model = on_replicas(UnseenStep(), 2)
    model.compile(keras.optimizers.SGD(0.0), "mse")

    class Break(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 1:
                self.model.parts.layers[0].bias.value.values[1].assign([np.nan])

    guard = NaNGuard(every_steps=1)
    x, y = data()
    model.fit(x, y, 8, verbose=0, callbacks=[Break(), guard])
    (finding,) = guard.findings
    assert (finding.step, finding.replicas, finding.devices) == (1, (1,), ("CPU:1",))
    assert finding.variables[0].endswith("bias")


@pytest.mark.in_test_all("the finders try steps, too")
def test_trial_steps_do_not_count():
    """Other callbacks may train on anything before the first epoch."""

    class Try(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            run = self.model.training_run
            run.after_begin(lambda: run.train_on((bad, tf.zeros((2, 1)), None)))

    bad = tf.constant([[1.0], [np.nan]])
    guard, model = NaNGuard(), line(2)
    fit(model, np.ones((2, 1)), np.zeros((2, 1)), guard, 2, callbacks=[Try()])
    assert np.isnan(model.get_weights()[0]).all()
    assert guard.findings[0].cause == "line/kernel had values that are not finite before this step."


@pytest.mark.in_test_all("test_probes.py counts compiled steps")
def test_a_second_fit_starts_over_and_the_step_stays_compiled():
    x, y = data(13)
    model, guard = network.__wrapped__(), NaNGuard("skip")
    for _ in range(2):
        with pytest.warns(UserWarning):
            history = fit(model, x, y, guard)
        assert history.history["skipped_steps"] == [1]
        assert len(guard.findings) == 1
    assert len(replication_of(model)._functions) == 1
    with pytest.warns(UserWarning):
        fit(network(1), x, y, guard)
    assert guard.findings[0].replicas == (0,)


@pytest.mark.slow
def test_the_example_of_batches_is_named():
    """`Batches` know the position of each example; here each example holds its own number."""
    x = np.arange(24, dtype="float32")[:, None]
    y = np.zeros((24, 1), "float32")
    y[17] = np.nan
    batches = kmg.data.from_arrays(x, y, global_batch_size=5, seed=3)
    guard = NaNGuard("skip")
    with pytest.warns(UserWarning, match=r"example \d of the batch \(example 17 of .*\)"):
        line(2, rate=0.0).fit(batches, epochs=2, verbose=0, callbacks=[guard])
    assert len(guard.findings) == 2
    for finding in guard.findings:
        batch = list(batches.epoch(finding.epoch))[finding.step]
        assert batch[0].numpy()[finding.position] == 17
        assert finding.example.startswith("example 17 of ")


@pytest.mark.parametrize(("action", "at"), [("skip", 5), ("rollback", 2)])
@pytest.mark.in_test_all("one action shows it", after=1)
@pytest.mark.slow
def test_a_resumed_training_ends_bit_for_bit_the_same(guarded, action, at, tmp_path):
    x, y = data(13, examples=48)
    x[37] = np.nan
    batches = kmg.data.from_arrays(x, y, global_batch_size=8, shuffle=False)

    def trained(*callbacks):
        guard = NaNGuard(action, every_steps=3)
        model = guarded(guard)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            history = model.fit(batches, epochs=2, verbose=0, callbacks=[guard, *callbacks])
        return history.history, guard.skipped_steps, guard.rollbacks, state_of(model)

    *expected, end = trained()
    with pytest.raises(Stopped):
        trained(kmg.callbacks.ResumableCheckpoint(tmp_path, every_steps=1), StopAt(0, at))
    *found, values = trained(kmg.callbacks.ResumableCheckpoint(tmp_path, every_steps=1))
    assert found == expected
    assert_same(end, values)


def test_callbacks_that_write_the_logs_come_later(tmp_path):
    """A CSV file without `skipped_steps` would look as if no step had been skipped."""
    x, y = data()
    before = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    with pytest.raises(ValueError, match="CSVLogger comes before NaNGuard.*Received: callbacks="):
        network().fit(x, y, 8, verbose=0, callbacks=[before, NaNGuard("skip")])
    before.on_train_end()
