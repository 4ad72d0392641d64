"""`ResumableCheckpoint`: stopped anywhere, a run goes on and ends as if nothing had happened."""

import contextlib
import logging
import random
import resource
import signal
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from interrupted_runs import Remembering
from interrupted_runs import Sequence
from interrupted_runs import StopAt
from interrupted_runs import Stopped
from interrupted_runs import X
from interrupted_runs import Y
from interrupted_runs import assert_same_values
from interrupted_runs import batches
from interrupted_runs import checkpoint_in
from interrupted_runs import close_files
from interrupted_runs import fit
from interrupted_runs import generated
from interrupted_runs import keras_callbacks
from interrupted_runs import network
from interrupted_runs import values_of

from keras_multigpu.callbacks import ResumableCheckpoint
from keras_multigpu.callbacks.checkpoint_format import decoded

pytestmark = [
    pytest.mark.usefixtures("unoptimized_graphs"),
    # Keras itself, where its callbacks read the learning rate on replicas.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
]


def run(folder, stops, *, replicas=(2,), data=batches, last=False, extra=None, **arguments):
    """Train in one go, or with stops; the values, the history, the CSV file and the memory."""
    folder.mkdir()
    network_settings = arguments.pop("network", {})
    checkpoint_settings = arguments.pop("checkpoint", {})
    for number, stop in enumerate([*stops, None]):
        model = network(replicas[min(number, len(replicas) - 1)], **network_settings)
        memory = Remembering()
        callbacks = [memory, *keras_callbacks(folder), *(extra() if extra else [])]
        callbacks += [StopAt(*stop)] if stop else []
        checkpoint = checkpoint_in(folder / "run", **checkpoint_settings)
        if stop is None:
            history = fit(model, data(), callbacks, checkpoint, last, **arguments)
            text = (folder / "log.csv").read_text()
            return values_of(model), history, text, memory.state
        with pytest.raises(Stopped):
            fit(model, data(), callbacks, checkpoint, last, **arguments)
        close_files(callbacks)
    raise AssertionError


def assert_same(one, other):
    """Values, history, CSV file and a callback's own state are equal, bit for bit."""
    assert_same_values(one[0], other[0])
    assert one[1].history == other[1].history
    assert one[1].epoch == other[1].epoch
    assert one[2] == other[2]
    assert one[3]["losses"] == other[3]["losses"]
    np.testing.assert_array_equal(one[3]["total"], other[3]["total"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nobody stops."""
    result = run(tmp_path_factory.mktemp("whole") / "a", [])
    assert result[1].history["uneven"] == [0, 0, 0]
    assert result[1].history["learning_rate"][-1] < 0.02 * 0.9**2
    return result


@pytest.mark.parametrize(
    ("stops", "last"),
    [
        ([(0, 1)], False),
        ([(0, 6), (1, 3)], True),
        ([(1, 2), (1, 2), (1, 4)], False),
        ([(0, None, "on_epoch_end"), (2, None, "on_epoch_begin")], False),
        ([(0, None, "on_epoch_end"), (2, None, "on_epoch_begin")], True),
        ([(2, 6)], True),
    ],
)
def test_it_goes_on_as_if_nothing_had_happened(tmp_path, whole, stops, last):
    """Weights, optimizer, seeds, metrics, history, rates and files, wherever it stands."""
    assert_same(whole, run(tmp_path / "b", stops, last=last))


@pytest.mark.parametrize(
    "settings",
    [
        {"network": {"steps_per_execution": 4}},
        {"network": {"micro_batches": 2}},
        {"network": {"run_eagerly": True}, "epochs": 2},
        {"network": {"jit_compile": True}},
        {"checkpoint": {"background": True, "every_steps": 2}},
        {"replicas": (1,)},
        {"replicas": (4,)},
        {"network": {"optimizer": "ema"}},
        {"network": {"optimizer": "loss scale"}},
        {"network": {"optimizer": "accumulation"}},
        {"validation_data": True},
        {"steps_per_epoch": 4, "epochs": 4},
    ],
    ids=str,
)
def test_it_goes_on_under_every_setting(tmp_path, settings):
    """Steps in one graph, pieces, threads, replicas without examples, more optimizers."""

    def arguments():
        prepared = {
            name: dict(value) for name, value in settings.items() if isinstance(value, dict)
        }
        chosen = {**settings, **prepared}
        if "validation_data" in chosen:
            chosen["validation_data"] = batches()
        return chosen

    one = run(tmp_path / "a", [], **arguments())
    other = run(tmp_path / "b", [(0, 4), (1, None)], **arguments())
    assert_same(one, other)


def test_another_number_of_replicas(tmp_path):
    """From one to two to four: equal up to the rounding of sums, as without a stop."""
    settings = {"network": {"dropout": 0.0, "normalized": False}}
    whole = run(tmp_path / "a", [], replicas=(1,), **settings)
    moved = run(tmp_path / "b", [(0, 3), (1, 2)], replicas=(1, 2, 4), **settings)
    assert whole[0].keys() == moved[0].keys()
    for name, value in whole[0].items():
        np.testing.assert_allclose(moved[0][name], value, rtol=2e-5, atol=2e-6, err_msg=name)
    for name, values in whole[1].history.items():
        np.testing.assert_allclose(moved[1].history[name], values, rtol=2e-5, err_msg=name)
    assert moved[1].history["uneven"] == [0, 0, 0]


@pytest.mark.parametrize(
    "source", ["arrays", "shuffled", "dataset", "repeated dataset", "generator", "sequence"]
)
def test_data_that_are_read_from_the_front(tmp_path, caplog, source):
    """What comes before is read again, and a line says so."""
    steps = 5 if source in ("repeated dataset", "generator") else None

    def data():
        if source == "sequence":
            return Sequence()
        if source == "generator":
            return generated()
        made = tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(22, seed=5).batch(4)
        return made.repeat() if steps else made

    arguments = {}
    if source in ("arrays", "shuffled"):
        data = lambda: X  # noqa: E731
        arguments = {"y": Y, "batch_size": 4, "shuffle": source == "shuffled"}
    arguments["steps_per_epoch"] = steps
    one = run(tmp_path / "a", [], data=data, **arguments)
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        other = run(tmp_path / "b", [(0, 3), (2, 1)], data=data, **arguments)
    assert_same(one, other)
    assert "To go on in epoch 3, after step 0, the batches before it are read again" in caplog.text


@pytest.mark.parametrize("source", ["batches", "generator"])
def test_a_run_that_has_ended_trains_no_further(tmp_path, caplog, source):
    """It has the same model and history again, also where early stopping has put weights back."""
    data, arguments = batches, {"epochs": 9}
    if source == "generator":
        data, arguments = generated, {"epochs": 9, "steps_per_epoch": 5}
    first = run(tmp_path / "a", [], replicas=(1,), data=data, **arguments)
    assert 3 < len(first[1].epoch) < 9, "EarlyStopping has acted."
    (tmp_path / "a").rename(tmp_path / "moved")
    (tmp_path / "a").mkdir()
    (tmp_path / "moved" / "run").rename(tmp_path / "a" / "run")
    (tmp_path / "a").rename(tmp_path / "b")
    steps = []
    count = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(batch)
    )
    model = network(1)
    callbacks = [memory := Remembering(), *keras_callbacks(tmp_path / "b"), count]
    history = fit(model, data(), callbacks, checkpoint_in(tmp_path / "b" / "run"), **arguments)
    text = (tmp_path / "b" / "log.csv").read_text()
    assert_same(first, (values_of(model), history, text, memory.state))
    assert steps == []
    assert "is of a run that has ended: no epoch is trained" in caplog.text


def test_more_epochs_go_on_from_the_end(tmp_path):
    """Three epochs and then five are five."""
    whole, parts = network(1), network(1)
    one = fit(whole, batches(), [], checkpoint_in(tmp_path / "a"), epochs=5)
    fit(parts, batches(), [], checkpoint_in(tmp_path / "b"), epochs=3)
    parts = network(1)
    other = fit(parts, batches(), [], checkpoint_in(tmp_path / "b"), epochs=5)
    assert_same_values(values_of(whole), values_of(parts))
    assert one.history == other.history


def test_batches_of_a_changed_size(tmp_path):
    """The size of now, the size that is asked for next, and the progress bar's number of steps."""

    class Grow(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.training_run.set_batch_size([7, 11][min(epoch, 1)], largest_share=3)

        def on_epoch_begin(self, epoch, logs=None):
            seen.append((epoch, self.params["steps"], self.model.replication.pieces))

    seen = []
    one = run(tmp_path / "a", [], extra=lambda: [Grow()])
    assert seen == [(0, 6, 1), (1, 4, 2), (2, 2, 2)]
    seen.clear()
    other = run(tmp_path / "b", [(1, None, "on_epoch_begin"), (1, 2)], extra=lambda: [Grow()])
    assert_same(one, other)
    assert seen == [(0, 6, 1), (1, 4, 2), (1, 4, 2), (1, 4, 2), (2, 2, 2)]


@pytest.mark.parametrize("swap_on_epoch", [False, True])
def test_swapped_weights(tmp_path, swap_on_epoch):
    """Averages that change places with the weights while they are validated, or between epochs."""
    settings = {"network": {"optimizer": "ema"}, "replicas": (1,), "validation_data": batches()}

    def swap():
        return [keras.callbacks.SwapEMAWeights(swap_on_epoch=swap_on_epoch)]

    one = run(tmp_path / "a", [], extra=swap, **settings)
    stops = [(0, None, "on_epoch_end"), (1, None, "on_epoch_begin"), (2, 3)]
    assert_same(one, run(tmp_path / "b", stops, extra=swap, **settings))


def test_the_steps_of_tensorboard_go_on(tmp_path):
    """They are counted from the first process on."""

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


def test_global_generators_go_on(tmp_path):
    """Those of Python and of NumPy, from which callbacks of a user's own may draw."""

    class Draw(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            drawn[:] = [*drawn, random.random(), np.random.rand()][-6:]

    drawn = []
    run(tmp_path / "a", [], replicas=(1,), extra=lambda: [Draw()])
    expected = list(drawn)
    run(tmp_path / "b", [(1, 3)], replicas=(1,), extra=lambda: [Draw()])
    assert drawn == expected


def test_when_it_saves(tmp_path):
    """After steps over all epochs, after minutes, at the end of epochs, and in the end."""

    def places(epochs=3, **settings):
        checkpoint = ResumableCheckpoint(
            tmp_path / str(len(list(tmp_path.iterdir()))), keep=99, **settings
        )
        fit(network(1), batches(), [], checkpoint, epochs=epochs)
        states = [decoded(path)["run"] for path in sorted(checkpoint.folder.glob("*.kmg"))]
        return [(state["epoch"], state["step"]) for state in states]

    assert places() == [(1, 0), (2, 0), (3, 0)]
    assert places(every_epochs=2) == [(2, 0), (3, 0)]
    assert places(every_epochs=None) == [(3, 0)]
    assert places(every_epochs=None, every_steps=4) == [(0, 4), (1, 2), (1, 6), (2, 4), (3, 0)]
    assert len(places(every_epochs=None, every_minutes=1e-9)) == 21
    assert places(every_epochs=None, every_minutes=5) == [(3, 0)]


def test_two_fits_with_one_object(tmp_path):
    """The second goes on where the first one has ended; after an error the folder is free again."""
    model, checkpoint = network(1), checkpoint_in(tmp_path / "run")
    with pytest.raises(Stopped):
        fit(model, batches(), [StopAt(1, 2)], checkpoint)
    assert checkpoint.resumed_from is None
    history = fit(model, batches(), [], checkpoint)
    assert checkpoint.resumed_from.name == "checkpoint-000008.kmg"
    assert history.epoch == [0, 1, 2]
    assert fit(model, batches(), [], checkpoint).history == history.history
    whole = network(1)
    assert fit(whole, batches(), [], checkpoint_in(tmp_path / "b")).history == history.history
    assert_same_values(values_of(whole), values_of(model))


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
    ("name", "hook", "at", "place", "background"),
    [
        ("SIGTERM", "on_train_batch_begin", 2, "step 3 of epoch 2", False),
        ("SIGINT", "on_train_batch_end", 2, "step 3 of epoch 2", True),
        ("SIGTERM", "on_test_batch_end", 1, "step 6 of epoch 2", False),
        ("SIGTERM", "on_epoch_end", 1, "step 6 of epoch 2", True),
    ],
)
def test_a_signal_saves_and_ends(
    tmp_path, caplog, capfd, validated, name, hook, at, place, background
):
    """With a clear line, and the next run ends as if nothing had happened."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)

    def trained(*callbacks):
        model = network(1)
        checkpoint = checkpoint_in(tmp_path, every_steps=None, background=background)
        history = fit(model, batches(), callbacks, checkpoint, validation_data=batches())
        return values_of(model), history.history

    with pytest.raises(KeyboardInterrupt if name == "SIGINT" else SystemExit) as ended:
        trained(Signal(name, hook, at))
    assert name == "SIGINT" or ended.value.code == 143
    assert f"Ended by {name} after {place}. All is saved in" in caplog.text
    assert f"{name}: saving after this step" in capfd.readouterr().err
    assert before == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    values, history = trained()
    assert history == validated[1]
    assert_same_values(values, validated[0])


def test_a_second_signal_ends_at_once(tmp_path):
    """Before the step is done, and without a checkpoint."""
    twice = [Signal("SIGINT"), Signal("SIGINT")]
    with pytest.raises(KeyboardInterrupt):
        fit(network(1), batches(), twice, checkpoint_in(tmp_path, every_steps=None))
    assert len(list(tmp_path.glob("*.kmg"))) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_signal_that_comes_too_late_still_counts(tmp_path):
    """In `on_train_end` there is nothing to save any more; the process is to end all the same."""
    late = keras.callbacks.LambdaCallback(
        on_train_end=lambda logs: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        fit(network(1), batches(), [late], checkpoint_in(tmp_path), epochs=1)


def test_a_signal_does_not_touch_an_evaluation_of_the_users_own(tmp_path):
    """Only validation is cut short. What a callback evaluates by itself is what it asked for."""

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            result.append(self.model.evaluate(batches(), verbose=0, callbacks=[Once()]))

    class Once(keras.callbacks.Callback):
        def on_test_batch_end(self, batch, logs=None):
            if batch == 0:
                signal.raise_signal(signal.SIGTERM)

    result = []
    with pytest.raises(SystemExit):
        fit(network(1), batches(), [Evaluate()], checkpoint_in(tmp_path), epochs=2)
    assert result[0][1] == 0, "All examples were evaluated."


def test_outside_of_the_main_thread_signals_are_left_alone(tmp_path):
    """Python lets only the main thread listen."""
    before = signal.getsignal(signal.SIGTERM)
    seen = []
    look = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda epoch, logs: seen.append(signal.getsignal(signal.SIGTERM))
    )
    model, checkpoint = network(1), checkpoint_in(tmp_path)
    thread = threading.Thread(target=fit, args=(model, batches(), [look], checkpoint))
    thread.start()
    thread.join()
    assert seen == [before] * 3
    assert len(list(tmp_path.glob("*.kmg"))) == 2


def test_a_thread_that_cannot_write_ends_training(tmp_path):
    """The error comes at the next step, and the checkpoints before are still there."""

    def limit(batch, logs):
        if batch == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=limit)
    try:
        with pytest.raises(OSError, match="cannot be written: File too large"):
            fit(network(1), batches(), [callback], checkpoint_in(tmp_path, background=True))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [decoded(path)["run"]["step"] for path in sorted(tmp_path.glob("*.kmg"))] == [1, 2]


def test_a_damaged_checkpoint_costs_steps_and_changes_nothing(tmp_path, whole, caplog):
    """The one before is taken, which a line says."""
    (tmp_path / "b").mkdir()
    callbacks = [Remembering(), *keras_callbacks(tmp_path / "b"), StopAt(1, 3)]
    with pytest.raises(Stopped):
        fit(network(), batches(), callbacks, checkpoint_in(tmp_path / "b" / "run"))
    close_files(callbacks)
    newest = sorted((tmp_path / "b" / "run").glob("*.kmg"))[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    model, memory = network(), Remembering()
    callbacks = [memory, *keras_callbacks(tmp_path / "b")]
    history = fit(model, batches(), callbacks, checkpoint_in(tmp_path / "b" / "run"))
    assert f"{newest.name} is damaged" in caplog.text
    text = (tmp_path / "b" / "log.csv").read_text()
    assert_same(whole, (values_of(model), history, text, memory.state))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder with a run of one epoch."""
    folder = tmp_path_factory.mktemp("begun") / "run"
    fit(network(1), batches(), [keras.callbacks.TerminateOnNaN()], checkpoint_in(folder), epochs=1)
    return folder


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"model": lambda: network(1, units=5)}, "is of another model: .*has shape"),
        (
            {"model": lambda: network(1, optimizer="adam")},
            "of another model: .*adam/.*has shape",
        ),
        (
            {"data": lambda: batches(global_batch_size=8)},
            "data have changed .*global_batch_size was 4",
        ),
        ({"data": lambda: batches(seed=8)}, "data have changed .*settings was '6 x 4, seed=7'"),
        ({"data": lambda: batches().take(21)}, "data have changed .*examples was 22"),
        ({"data": lambda: (X, Y)}, "data have changed .*kind was 'Batches'"),
        ({"steps_per_epoch": 5}, "data have changed .*steps_per_epoch was 6"),
        ({"initial_epoch": 2}, "comes after the one of .*at most 1.*initial_epoch=2"),
        ({"callbacks": [keras.callbacks.BackupAndRestore("x")]}, "A `BackupAndRestore` came with"),
        ({"callbacks": [ResumableCheckpoint("y")]}, "A second `ResumableCheckpoint` came with"),
    ],
)
def test_what_does_not_belong_together_is_refused(begun, change, phrase):
    """By name, before a step is trained, and the checkpoints stay as they are."""
    change = dict(change)
    model = change.pop("model", lambda: network(1))()
    data = change.pop("data", batches)()
    callbacks = change.pop("callbacks", [])
    if isinstance(data, tuple):
        data, change["y"] = data
    files = sorted(begun.glob("*.kmg"))
    before = values_of(model) if model.built else {}
    with pytest.raises(ValueError, match=phrase):
        fit(model, data, callbacks, checkpoint_in(begun), **change)
    assert sorted(begun.glob("*.kmg")) == files
    after = values_of(model)
    for name in before:
        np.testing.assert_array_equal(before[name], after[name])


def test_data_may_move_and_be_cached(begun):
    """No example changes by that."""
    model = network(1)
    fit(model, batches(cache="memory"), [], checkpoint_in(begun), epochs=1)


def test_callbacks_that_come_or_go_are_named(begun, caplog):
    """It is no error: somebody may have had enough of one."""
    stop = keras.callbacks.EarlyStopping("loss")
    fit(network(1), batches(), [stop], checkpoint_in(begun), epochs=1)
    assert "EarlyStopping is new since the checkpoint was saved" in caplog.text


def test_a_replica_batch_size_that_means_another_size_is_refused(tmp_path):
    """With the way out."""
    data = batches(global_batch_size=None, replica_batch_size=2)
    fit(network(2), data, [], checkpoint_in(tmp_path), epochs=1)
    with pytest.raises(ValueError, match="With another number of replicas say `global_batch_size="):
        fit(network(4), data, [], checkpoint_in(tmp_path), epochs=1)


def test_a_model_of_plain_keras_is_refused(tmp_path):
    """Its `fit` begins with the first step, whatever a callback does."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match="plain Keras.*`model = keras_multigpu.distribute"):
        model.fit(X, Y[:, 0], callbacks=[ResumableCheckpoint(tmp_path)], verbose=0)


def test_a_state_that_cannot_be_saved_is_named(tmp_path):
    """With the callback and the way to the value."""

    class Odd(keras.callbacks.Callback):
        state = {"model": object()}

    with pytest.raises(TypeError, match=r"\['Odd'\]\['own'\]\['model'\] is a object"):
        fit(network(1), batches(), [Odd()], checkpoint_in(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        ({"every_steps": 0}, "`every_steps` is not a positive integer"),
        ({"every_epochs": 1.5}, "`every_epochs` is not a positive integer"),
        ({"keep": 0}, "`keep` is not a positive integer"),
        ({"every_minutes": -1}, "`every_minutes` is no time"),
        ({"signals": "SIGTERM"}, "`signals` holds what is no signal .*'SIGTERM'"),
        ({"signals": ["SIGNOTHING"]}, "`signals` holds what is no signal .*'SIGNOTHING'"),
    ],
)
def test_wrong_arguments_are_named(arguments, phrase):
    """When the callback is made."""
    with pytest.raises(ValueError, match=phrase):
        ResumableCheckpoint("run", **arguments)
