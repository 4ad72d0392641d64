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


def test_a_second_signal_ends_at_once(tmp_path):
    twice = [Signal("SIGINT"), Signal("SIGINT")]
    with pytest.raises(KeyboardInterrupt):
        fit(network(1), batches(), twice, checkpoint_in(tmp_path, every_steps=None))
    assert len(list(tmp_path.glob("*.kmg"))) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_after_training_still_ends_the_process(tmp_path):
    """In `on_train_end` there is nothing left to save."""
    late = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        fit(network(1), batches(), [late], checkpoint_in(tmp_path), epochs=1)


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


def test_signals_are_left_alone_outside_the_main_thread(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(signal.getsignal(signal.SIGTERM))
    )
    model, checkpoint = network(1), checkpoint_in(tmp_path)
    thread = threading.Thread(target=fit, args=(model, batches(), [look], checkpoint))
    thread.start()
    thread.join(PATIENCE)
    assert seen == [before] * 3
    assert len(list(tmp_path.glob("*.kmg"))) == 2


def test_a_signal_that_the_process_ignores_stays_ignored(tmp_path):
    """Ctrl-C is not meant for a process in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    history = fit(network(1), batches(), [Signal("SIGINT")], checkpoint_in(tmp_path))
    assert history.epoch == [0, 1, 2]
