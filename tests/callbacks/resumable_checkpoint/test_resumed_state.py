"""What `ResumableCheckpoint` restores besides the model, and when it saves."""

import contextlib
import io
import random
import time

import keras
import numpy as np
import pytest
from helpers.interrupted_runs import (
    assert_same_runs,
    assert_same_values,
    batches,
    checkpoint_in,
    fit,
    network,
    run,
    values_of,
)
from helpers.stopped_runs import StopAt, Stopped

from keras_multigpu.callbacks import BatchSizeScaling, LearningRateWarmup, ResumableCheckpoint
from keras_multigpu.callbacks.resumable_checkpoint.format import decode


def states_in(folder):
    return [decode(io.BytesIO(path.read_bytes()))["run"] for path in sorted(folder.glob("*.kmg"))]


@pytest.mark.slow
def test_a_run_with_swapped_weights_resumes(tmp_path):
    """Moving averages take the place of weights during validation."""
    settings = {"network": {"optimizer": "ema"}, "replicas": (1,), "validation_data": batches()}

    def swap():
        return [keras.callbacks.SwapEMAWeights()]

    one = run(tmp_path / "a", [], extra=swap, **settings)
    stops = [(0, None, "on_epoch_end"), (2, 3)]
    assert_same_runs(one, run(tmp_path / "b", stops, extra=swap, **settings))


def test_the_steps_of_tensorboard_continue(tmp_path):
    class Count(keras.callbacks.TensorBoard):
        def on_train_end(self, logs=None):
            numbers.append(self._global_train_batch)
            super().on_train_end(logs)

    numbers = []
    for stop in [StopAt(1, 2), StopAt(9)]:
        board = Count(str(tmp_path / "logs"), write_graph=False)
        with contextlib.suppress(Stopped):
            fit(network(1), batches(), [board, stop], checkpoint_in(tmp_path / "run"))
    assert numbers == [18]


@pytest.mark.slow
def test_global_random_generators_resume(tmp_path):
    """Those of Python and NumPy, from which a user's callbacks may draw."""

    class Draw(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            drawn[:] = [*drawn, random.random(), np.random.rand()][-6:]

    drawn = []
    run(tmp_path / "a", [], replicas=(1,), extra=lambda: [Draw()])
    expected = list(drawn)
    run(tmp_path / "b", [(1, 3)], replicas=(1,), extra=lambda: [Draw()])
    assert drawn == expected


@pytest.mark.slow
def test_it_saves_every_so_many_steps_minutes_and_epochs_and_at_the_end(tmp_path):
    model = network(1)

    def places(epochs=3, model=model, **settings):
        checkpoint = ResumableCheckpoint(
            tmp_path / str(len(list(tmp_path.iterdir()))), keep=99, **settings
        )
        fit(model, batches(), [], checkpoint, epochs=epochs)
        states = states_in(checkpoint.folder)
        return [(state["epoch"], state["step"]) for state in states]

    assert places() == [(1, 0), (2, 0), (3, 0)]
    assert places(every_epochs=2) == [(2, 0), (3, 0)]
    assert places(every_epochs=None) == [(3, 0)]
    every_fourth = [(0, 4), (1, 2), (1, 6), (2, 4), (3, 0)]
    assert places(every_epochs=None, every_steps=4) == every_fourth
    pairs = network(1, steps_per_execution=2)
    assert places(model=pairs, every_epochs=None, every_steps=4) == every_fourth
    assert len(places(every_epochs=None, every_minutes=1e-9)) == 21
    assert places(every_epochs=None, every_minutes=5) == [(3, 0)]


def test_one_checkpoint_object_resumes_its_own_run(tmp_path):
    """The second `fit` continues where the first ended; an error releases the folder."""
    model, checkpoint = network(1), checkpoint_in(tmp_path / "run")
    with pytest.raises(Stopped):
        fit(model, batches(), [StopAt(1, 2)], checkpoint)
    assert checkpoint.resumed_from is None
    history = fit(model, batches(), [], checkpoint)
    assert checkpoint.resumed_from.name == "checkpoint-000008.kmg"
    assert history.epoch == [0, 1, 2]
    assert fit(model, batches(), [], checkpoint).history == history.history
    expected = values_of(model)
    whole = network(1)
    assert fit(whole, batches(), [], checkpoint_in(tmp_path / "b")).history == history.history
    assert_same_values(values_of(whole), expected)


def test_a_resumed_run_says_how_long_it_has_run_and_what_was_lost(tmp_path, monkeypatch, capsys):
    """All times are those of the clock on the wall, so a night without training is lost, too."""
    now = [1e9]
    monkeypatch.setattr(time, "time", lambda: now[0])

    class Minutes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            now[0] += 60 * 60

    def said(model, *stop, epochs=4):
        with contextlib.suppress(Stopped):
            fit(model, batches(), [Minutes(), *stop], checkpoint_in(tmp_path), epochs=epochs)
        now[0] += 4 * 60
        return capsys.readouterr().out

    assert "lost" not in said(network(1), StopAt(1, 2))
    assert said(network(1), StopAt(2, 2)) == (
        "This run began 1 h 4 min ago, of which 4 min were lost: 4 min from the last checkpoint "
        "to this start.\n"
    )
    assert said(network(1)) == (
        "This run began 2 h 8 min ago, of which 8 min were lost: 4 min from the last checkpoint "
        "to this start, 4 min in earlier restarts.\n"
    )
    assert "lost" not in said(network(1)), "The run has ended."


def test_a_resumed_run_keeps_a_changed_rate_unless_the_user_sets_one(tmp_path):
    """Even in the same process, where the rate that a `fit` left is not the user's choice."""

    def lower(epoch, logs=None):
        model.optimizer.learning_rate = 0.005

    def trained(epochs, rate=None):
        if rate is not None:
            model.optimizer.learning_rate = rate
        callbacks = [keras.callbacks.LambdaCallback(on_epoch_begin=lower)] if epochs == 1 else []
        fit(model, batches(), callbacks, checkpoint_in(tmp_path), epochs=epochs)
        return float(model.optimizer.learning_rate)

    model = network(1)
    assert trained(1) == trained(2) == np.float32(0.005), "In the same process."
    model = network(1)
    assert trained(3) == np.float32(0.005), "In another one, which begins with 0.02 again."
    assert trained(4, rate=0.25) == 0.25


@pytest.mark.slow
def test_a_finished_run_leaves_the_same_rate_when_repeated(tmp_path):
    """A script with two phases then begins its second one with the same rate."""
    rates = []
    for _ in range(2):
        model = network(1)
        callbacks = [BatchSizeScaling(4, schedule={1: 8}), LearningRateWarmup(epochs=2)]
        fit(model, batches(), callbacks, checkpoint_in(tmp_path), epochs=1)
        rates.append(float(model.optimizer.learning_rate))
    np.testing.assert_allclose(rates, [0.02, 0.02], rtol=1e-6)
