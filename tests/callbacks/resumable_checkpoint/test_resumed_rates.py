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
        ((1, 2), "on_train_batch_end", (2, "schedule")),
        ((2, 0), "on_epoch_begin", (1, None)),
        ((1, None), "on_epoch_end", (2, "schedule")),
    ],
)
@pytest.mark.in_test_all("one of the stops shows it", after=1)
@pytest.mark.slow
def test_a_growing_batch_and_a_warm_up_resume(tmp_path, caplog, whole, settings, place, hook):
    """Stopped in the warm-up, before growth, and between the last step and the epoch's end."""
    values, history = whole(*settings)
    callbacks = [*rate_callbacks(), StopAt(*place, hook=hook)]
    with pytest.raises(Stopped):
        fit(network(*settings), batches(), callbacks, checkpoint_in(tmp_path / "run"))
    model = network(*settings)
    rest = fit(model, batches(), rate_callbacks(), checkpoint_in(tmp_path / "run")).history
    assert rest == history
    assert_same_values(values, values_of(model))
    # They are there; only they have no state before they begin.
    assert "not among the callbacks" not in caplog.text


def test_a_rate_that_a_callback_has_changed_stays_unless_another_is_written(tmp_path):
    """Also if the same process tries again: the rate that a `fit` left is not the user's."""

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


@pytest.mark.in_test_all("fewer replicas take more pieces alike")
def test_pieces_that_the_user_asks_for_now_count(tmp_path):
    for epochs, pieces in ((1, 1), (2, 2)):
        note = NotePieces()
        model = network(1, micro_batches=pieces)
        fit(model, batches(), [note], checkpoint_in(tmp_path), epochs=epochs)
    assert note.pieces == {2}


@pytest.mark.slow
def test_a_run_that_has_ended_leaves_the_rate_as_it_did_then(tmp_path):
    """So that a script with two phases begins its second one with the same rate, run again."""
    rates = []
    for _ in range(2):
        model = network(1)
        fit(model, batches(), rate_callbacks(), checkpoint_in(tmp_path), epochs=1)
        rates.append(float(model.optimizer.learning_rate))
    np.testing.assert_allclose(rates, [0.02, 0.02], rtol=1e-6)


@pytest.mark.in_test_all("the first of the file resumes growing batches")
def test_with_more_epochs_the_batch_grows_where_it_would_have(tmp_path):
    """One epoch, and then three: the batches have the sizes of three epochs from the start."""
    for epochs in (1, 3):
        model = network(1)
        callbacks = [BatchSizeScaling(4, schedule={1: 8})]
        history = fit(model, batches(), callbacks, checkpoint_in(tmp_path), epochs=epochs).history
    assert history["global_batch_size"] == [4, 8, 8]


@pytest.mark.in_test_all("test_another_number_of_replicas is the training")
def test_fewer_replicas_take_their_larger_shares_in_more_pieces(tmp_path):
    """On two replicas two examples each, on one at most two at a time: two pieces."""
    for replicas, epochs in ((2, 1), (1, 2)):
        callbacks = [BatchSizeScaling(4, max_replica_batch_size=2), note := NotePieces()]
        model = network(replicas, dropout=0.0)
        fit(model, batches(), callbacks, checkpoint_in(tmp_path), epochs=epochs)
        assert note.pieces == {epochs}


@pytest.mark.in_test_all("histories are compared in all of these tests")
def test_a_metric_of_several_numbers_stays_in_the_history(tmp_path):
    """Also where a run was stopped between the last step and the end of the epoch."""
    model = network(1, metrics=[keras.metrics.MeanSquaredError(), PerColumn()])
    stop = StopAt(0, hook="on_epoch_end")
    with pytest.raises(Stopped):
        fit(model, batches(), [stop], checkpoint_in(tmp_path), epochs=2)
    history = fit(model, batches(), [], checkpoint_in(tmp_path), epochs=2).history
    assert [np.shape(value) for value in history["per_column"]] == [(2,), (2,)]


class NotePieces(keras.callbacks.Callback):
    """Records into how many micro-batches a replica's part is split."""

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


@pytest.mark.in_test_all("test_rates.py gives rates back")
def test_a_lowered_rate_is_given_back_where_training_fails():
    """The compiled schedule is restored after an exception of another callback."""
    model = network(1, "schedule")
    with pytest.raises(Stopped):
        callbacks = [NaNGuard("rollback"), StopAt(0, 2)]
        model.fit(batches(), verbose=0, callbacks=callbacks)
    assert type(model.optimizer._learning_rate) is keras.optimizers.schedules.CosineDecay


def test_a_scheduler_that_would_undo_the_scaling_is_refused():
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(ValueError, match="undoes the scaling.*Received: callbacks="):
        network(1).fit(batches(), verbose=0, callbacks=[BatchSizeScaling(4), scheduler])
