"""Batches that grow and rates that warm up resume where they stopped, in every combination."""

import functools

import keras
import numpy as np
import pytest
from helpers.stopped_runs import StopAt, Stopped
from interrupted_runs import (
    OPTIMIZERS,
    assert_same_values,
    batches,
    checkpoint_in,
    fit,
    network,
    values_of,
)

from keras_multigpu.callbacks import BatchSizeScaling, LearningRateWarmup, NaNGuard

OPTIMIZERS["schedule"] = lambda: keras.optimizers.SGD(
    keras.optimizers.schedules.CosineDecay(0.02, 40), momentum=0.9
)


def rate_callbacks():
    """A batch that grows while its rate still warms up."""
    return [
        BatchSizeScaling(4, schedule={1: 8, 2: 16}),
        LearningRateWarmup(epochs=2),
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function that returns the values and the history of an uninterrupted run."""

    @functools.cache
    def trained(replicas, optimizer):
        model, folder = network(replicas, optimizer), tmp_path_factory.mktemp("whole")
        history = fit(model, batches(), rate_callbacks(), checkpoint_in(folder)).history
        return values_of(model), history

    return trained


@pytest.mark.parametrize(
    ("place", "hook", "settings"),
    [
        ((1, 2), "on_train_batch_end", (1, "schedule")),
        ((2, 0), "on_epoch_begin", (1, None)),
        ((1, None), "on_epoch_end", (2, "schedule")),
    ],
)
@pytest.mark.in_test_all("one stop shows it", after=1)
@pytest.mark.slow
def test_a_growing_batch_and_a_warm_up_resume(tmp_path, caplog, whole, settings, place, hook):
    """Stopped during the warm-up, before growth, or between the last step and the epoch's end."""
    values, history = whole(*settings)
    callbacks = [*rate_callbacks(), StopAt(*place, hook=hook)]
    with pytest.raises(Stopped):
        fit(network(*settings), batches(), callbacks, checkpoint_in(tmp_path / "run"))
    model = network(*settings)
    rest = fit(model, batches(), rate_callbacks(), checkpoint_in(tmp_path / "run")).history
    assert rest == history
    assert_same_values(values, values_of(model))
    # They are among the callbacks, though they have no state before they begin.
    assert "not among the callbacks" not in caplog.text


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


@pytest.mark.in_test_all("fewer replicas compute more micro-batches, too")
def test_the_new_number_of_micro_batches_counts(tmp_path):
    for epochs, pieces in ((1, 1), (2, 2)):
        note = NotePieces()
        model = network(1, micro_batches=pieces)
        fit(model, batches(), [note], checkpoint_in(tmp_path), epochs=epochs)
    assert note.pieces == {2}


@pytest.mark.slow
def test_a_finished_run_leaves_the_same_rate_when_repeated(tmp_path):
    """A script with two phases then begins its second one with the same rate."""
    rates = []
    for _ in range(2):
        model = network(1)
        fit(model, batches(), rate_callbacks(), checkpoint_in(tmp_path), epochs=1)
        rates.append(float(model.optimizer.learning_rate))
    np.testing.assert_allclose(rates, [0.02, 0.02], rtol=1e-6)


@pytest.mark.in_test_all("the first test here resumes growing batches")
def test_the_batch_grows_on_schedule_when_epochs_are_added(tmp_path):
    """One epoch, then three: batches have the sizes of a run of three epochs."""
    for epochs in (1, 3):
        model = network(1)
        callbacks = [BatchSizeScaling(4, schedule={1: 8})]
        history = fit(model, batches(), callbacks, checkpoint_in(tmp_path), epochs=epochs).history
    assert history["global_batch_size"] == [4, 8, 8]


@pytest.mark.in_test_all("test_resumable_checkpoint.py resumes on fewer replicas")
def test_fewer_replicas_split_their_larger_shares(tmp_path):
    """Two replicas have two examples each; one takes its four in two micro-batches."""
    for replicas, epochs in ((2, 1), (1, 2)):
        callbacks = [BatchSizeScaling(4, max_replica_batch_size=2), note := NotePieces()]
        model = network(replicas, dropout=0.0)
        fit(model, batches(), callbacks, checkpoint_in(tmp_path), epochs=epochs)
        assert note.pieces == {epochs}


@pytest.mark.in_test_all("histories are compared in all of these tests")
def test_a_metric_of_several_numbers_stays_in_the_history(tmp_path):
    """Even if the run stops between the last step and the end of the epoch."""
    model = network(1, metrics=[keras.metrics.MeanSquaredError(), PerColumn()])
    stop = StopAt(0, hook="on_epoch_end")
    with pytest.raises(Stopped):
        fit(model, batches(), [stop], checkpoint_in(tmp_path), epochs=2)
    history = fit(model, batches(), [], checkpoint_in(tmp_path), epochs=2).history
    assert [np.shape(value) for value in history["per_column"]] == [(2,), (2,)]


class NotePieces(keras.callbacks.Callback):
    """Records the number of micro-batches."""

    pieces = frozenset()

    def on_train_batch_end(self, batch, logs=None):
        self.pieces |= {self.model.training_run.micro_batches}


class PerColumn(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="per_column")
        self.sums = self.add_variable((2,), "zeros", name="sums")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.sums.assign(self.sums + keras.ops.sum(y_true, axis=0))

    def result(self):
        return self.sums + 0.0


@pytest.mark.in_test_all("test_rates.py restores schedules")
def test_the_schedule_is_restored_when_training_fails():
    model = network(1, "schedule")
    with pytest.raises(Stopped):
        callbacks = [NaNGuard("rollback"), StopAt(0, 2)]
        model.fit(batches(), verbose=0, callbacks=callbacks)
    assert type(model.optimizer._learning_rate) is keras.optimizers.schedules.CosineDecay


def test_a_scheduler_that_would_undo_the_scaling_is_refused():
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(ValueError, match="undoes the scaling.*Received: callbacks="):
        network(1).fit(batches(), verbose=0, callbacks=[BatchSizeScaling(4), scheduler])
