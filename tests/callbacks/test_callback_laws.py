"""What every callback promises: watching changes no bit, and a resumed run has its state."""

import csv
import random

import keras
import numpy as np
import pytest
from helpers.fake_run import fake_fit
from helpers.interrupted_runs import X, Y, assert_same_values, network, values_of
from helpers.stopped_runs import StopAt, Stopped

import keras_multigpu as kmg
from keras_multigpu import callbacks as ours


class Counter(ours.RunCallback):
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


def test_every_counts_the_steps_of_an_epoch():
    """Of three steps in an epoch the second; of a single step none."""
    counter = Counter()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")

    def count(**arguments):
        return fake_fit(model, counter, x=X, y=Y, **arguments).history["count"]

    assert count(epochs=2, batch_size=8) == [3, 6]
    assert counter.seconds == [1, 1]
    count(epochs=3, batch_size=22)
    assert counter.seconds == []


def test_a_callback_prints_unless_it_is_silent(capsys):
    Counter().say("done")
    Counter(verbose=0).say("not asked for")
    assert capsys.readouterr().out == "Counter: done\n"


def changing(folder):
    """Callbacks that change training, ours before Keras's."""
    return [
        ours.BatchSizeScaling(4, schedule={2: 16}),
        ours.LearningRateWarmup(epochs=2),
        keras.callbacks.EarlyStopping("val_loss", patience=50),
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=1, min_delta=10.0),
        keras.callbacks.ModelCheckpoint(folder / "best.keras", save_best_only=True),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ]


WATCHING = {
    "alone": lambda folder: [],
    "trying": lambda folder: [
        ours.BatchSizeFinder(None, verbose=0),
        ours.LearningRateFinder(steps=10, verbose=0),
    ],
    "watched": lambda folder: [
        ours.NaNGuard("skip", every_steps=1),
        ours.ReplicaMetrics(),
        ours.ReplicaDriftCheck(),
        ours.ThroughputReport(verbose=0),
        ours.ResumableCheckpoint(folder / "checkpoints", every_steps=4),
    ],
}


def columns(path):
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


@pytest.mark.slow
def test_watching_changes_nothing(tmp_path):
    """Weights, optimizer, seeds, metrics, logs and random numbers are equal, bit for bit."""
    ends = {}
    for kind, watching in WATCHING.items():
        folder = tmp_path / kind
        folder.mkdir()
        scaling, warmup, *rest = changing(folder)
        callbacks = [scaling, warmup, *watching(folder), *rest]
        model = network(2, normalized=True, steps_per_execution=2)
        data = kmg.data.from_arrays(X, Y, global_batch_size=8, seed=5)
        random.seed(5)
        history = model.fit(
            data, epochs=4, verbose=0, validation_data=(X[:9], Y[:9]), callbacks=callbacks
        ).history
        draws = random.random(), np.random.random(), keras.random.uniform(()).numpy()
        ends[kind] = values_of(model), history, draws
    values, history, draws = ends["alone"]
    for kind in ("trying", "watched"):
        assert_same_values(values, ends[kind][0])
        assert history.items() <= ends[kind][1].items() and draws == ends[kind][2]
    written = set(columns(tmp_path / "watched" / "log.csv"))
    of_keras = {"epoch", "loss", "uneven", "val_loss", "val_uneven"}
    named = {name for one in callbacks for name in getattr(one, "writes", ())}
    # `ReplicaMetrics` names two of those that it writes.
    assert named <= written
    others = {name for name in written - of_keras - named if not name.startswith("replica")}
    assert not others
    assert ends["watched"][1]["skipped_steps"] == [0, 0, 0, 0]
    assert ends["watched"][1]["global_batch_size"] == [8, 8, 16, 16]
    assert (tmp_path / "watched" / "best.keras").exists()


# Each with what it knows after a training.
STATEFUL = {
    "RunCallback": (lambda folder: [Counter()], lambda one: (one.count, one.seconds)),
    "NaNGuard, skip": (
        lambda folder: [ours.NaNGuard("skip", every_steps=3)],
        lambda guard: guard.skipped_steps,
    ),
    "ReplicaMetrics": (lambda folder: [ours.ReplicaMetrics(["mae"])], lambda metrics: None),
    "ThroughputReport": (
        lambda folder: [ours.ThroughputReport(path=folder / "speed.json", verbose=0)],
        lambda report: [one.epoch for one in report.reports],
    ),
    "rates": (
        lambda folder: [
            ours.BatchSizeScaling(4, schedule={1: 8}),
            ours.LearningRateWarmup(epochs=2),
        ],
        lambda scaling: None,
    ),
    "finders": (
        lambda folder: [
            ours.BatchSizeFinder(maximum=4, verbose=0),
            ours.LearningRateFinder(1e-4, high=1.0, steps=20, verbose=0),
        ],
        lambda finder: finder.best_replica_batch_size,
    ),
}
OF_TIME = ("time", "second", "wait")


def trained(name, folder, *stops):
    """Train until each stop and then to the end; the values, the history, and the callbacks."""
    make, _ = STATEFUL[name]
    optimizer = "schedule" if name in ("rates", "finders") else None
    x = X.copy()
    if name.startswith("NaNGuard"):
        x[13] = np.nan
    folder.mkdir()
    for stop in [*stops, None]:
        callbacks = make(folder)
        model = network(2, optimizer, row=name)
        saves = ours.ResumableCheckpoint(folder / "run", every_steps=2)
        data = kmg.data.from_arrays(x, Y, global_batch_size=4, seed=7)
        given = {"epochs": 2, "verbose": 0, "callbacks": [saves, *callbacks]}
        if stop is not None:
            with pytest.raises(Stopped):
                model.fit(data, **{**given, "callbacks": [saves, *callbacks, StopAt(*stop)]})
    history = model.fit(data, **given).history
    return values_of(model), history, callbacks


@pytest.mark.filterwarnings("ignore:Epoch ., step")
@pytest.mark.parametrize("name", STATEFUL)
@pytest.mark.slow
def test_a_resumed_run_has_its_state(name, tmp_path):
    """Stopped a step after its last checkpoint."""
    values, history, whole = trained(name, tmp_path / "whole")
    known = STATEFUL[name][1](whole[0])
    found, again, callbacks = trained(name, tmp_path / "parts", (1, 3))
    assert_same_values(values, found)
    assert history.keys() == again.keys() and STATEFUL[name][1](callbacks[0]) == known
    for key in history:
        if not any(word in key for word in OF_TIME):
            np.testing.assert_allclose(again[key], history[key], rtol=1e-6, err_msg=key)
    # A resumed run does not search again.
    assert not any(getattr(one, "tries", ()) or getattr(one, "curve", ()) for one in callbacks)
