"""`ResumableCheckpoint` saves before a signal ends the process."""

import signal
import threading
import traceback
from pathlib import Path

import keras
import pytest
from helpers.interrupted_runs import (
    assert_same_values,
    batches,
    checkpoint_in,
    fit,
    network,
    values_of,
)
from helpers.processes_left import PATIENCE

import keras_multigpu
from keras_multigpu.callbacks.resumable_checkpoint.ending import StopSignals

PACKAGE = str(Path(keras_multigpu.__file__).parent)


@pytest.fixture(autouse=True)
def hears_signals():
    """As at a terminal: a process in the background ignores Ctrl-C."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Signal(keras.callbacks.Callback):
    """Sends this process a signal, in a hook of the second epoch."""

    def __init__(self, name, hook="on_train_batch_begin", at=2):
        super().__init__()
        self.number, self.at = getattr(signal, name), at
        setattr(self, hook, self._send)

    def _send(self, number, logs=None):
        if self.model.training_run.epoch == 1 and number == self.at:
            signal.raise_signal(self.number)


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """A run with validation that no signal ends: values and history."""
    model, folder = network(1), tmp_path_factory.mktemp("validated")
    data = {"validation_data": batches()}
    history = fit(model, batches(), [], checkpoint_in(folder, every_steps=None), **data)
    return values_of(model), history.history


@pytest.mark.parametrize(
    ("name", "hook", "at", "place"),
    [
        ("SIGTERM", "on_test_batch_end", 1, "step 6 of epoch 2"),
        ("SIGINT", "on_train_batch_end", 2, "step 3 of epoch 2"),
    ],
)
@pytest.mark.slow
def test_a_signal_saves_and_ends(tmp_path, caplog, capfd, validated, name, hook, at, place):
    """It is logged, and the next run ends as if nothing had happened."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def trained(*callbacks):
        model = network(1)
        checkpoint = checkpoint_in(tmp_path, every_steps=None)
        history = fit(model, batches(), callbacks, checkpoint, validation_data=batches())
        return values_of(model), history.history

    with pytest.raises(KeyboardInterrupt if name == "SIGINT" else SystemExit) as ended:
        trained(Signal(name, hook, at))
    if name == "SIGINT":
        # Frames of this package would bury what was said.
        frames = traceback.extract_tb(ended.value.__traceback__)
        assert not [each for each in frames if PACKAGE in each.filename]
        assert "run the same command again" in str(ended.value)
    assert name == "SIGINT" or ended.value.code == 143
    assert f"Ended by {name} after {place}. Everything is saved in" in caplog.text
    assert f"{name}: saving after this step" in capfd.readouterr().err
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    values, history = trained()
    assert history == validated[1]
    assert_same_values(values, validated[0])


def test_a_signal_does_not_cut_short_the_users_own_evaluation(tmp_path):
    """Only validation ends early, not an evaluation by a callback."""

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            result.append(self.model.evaluate(batches(), verbose=0, callbacks=[Once()]))

    class Once(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            if batch == 0:
                signal.raise_signal(signal.SIGTERM)

    result = []
    with pytest.raises(SystemExit) as ended:
        fit(network(1), batches(), [Evaluate()], checkpoint_in(tmp_path), epochs=2)
    assert ended.value.code == 128 + signal.SIGTERM
    assert result[0][1] == 0, "All examples were evaluated."


@pytest.fixture
def signals():
    """What listens while a run lasts, and whether it was told of a signal."""
    told = []
    signals = StopSignals(lambda: told.append(True))
    signals.listen()
    yield signals, told
    signals.ignore()


def test_a_second_signal_ends_at_once(signals):
    signal.raise_signal(signal.SIGINT)
    assert (signals[0].pending, signals[1]) == (signal.SIGINT, [True])
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_after_the_last_step_still_ends_the_process(signals):
    """There is nothing left to save."""
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signals[0].close()


def test_signals_are_left_alone_outside_the_main_thread():
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=StopSignals(list).listen)
    thread.start()
    thread.join(PATIENCE)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_that_the_process_ignores_stays_ignored():
    """Ctrl-C is not meant for a process in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    listening = StopSignals(list)
    listening.listen()
    signal.raise_signal(signal.SIGINT)
    assert listening.pending is None and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    listening.close()
