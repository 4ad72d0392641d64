"""What each callback refuses, and what its error says: a wrong argument, place, model or data."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from helpers.own_step import UnseenStep

from keras_multigpu import callbacks
from keras_multigpu.callbacks import (
    BatchSizeFinder,
    BatchSizeScaling,
    LearningRateFinder,
    LearningRateWarmup,
    NaNGuard,
    ReplicaDriftCheck,
    ReplicaMetrics,
    ResumableCheckpoint,
    ThroughputReport,
)

NAN = float("nan")
NO_SCHEDULE = "does not map epochs to batch.*Received: schedule="
NO_METRIC = "not a metric.*list of names.*Received: metrics="

ARGUMENTS = [
    (BatchSizeFinder, {"apply": "global"}, "`apply` has an unknown value.*: apply='global'"),
    (BatchSizeFinder, {"minimum": 0}, "`minimum` is not a positive integer.*: minimum=0"),
    (BatchSizeFinder, {"maximum": 2.5}, "`maximum` is not a positive integer.*: maximum=2.5"),
    (BatchSizeFinder, {"minimum": 8, "maximum": 4}, "not below `minimum`.*: maximum=4"),
    (BatchSizeScaling, {"base_batch_size": 0}, "not a positive integer.*: base_batch_size=0"),
    (BatchSizeScaling, {"rule": "cube"}, "`rule` has an unknown value.*: rule='cube'"),
    (BatchSizeScaling, {"max_replica_batch_size": -1}, "`max_replica_batch_size` is not a pos"),
    (BatchSizeScaling, {"schedule": {}}, NO_SCHEDULE + "{}"),
    (BatchSizeScaling, {"schedule": {-1: 4}}, NO_SCHEDULE + "{-1: 4}"),
    (BatchSizeScaling, {"schedule": {1: -4}}, NO_SCHEDULE + "{1: -4}"),
    (BatchSizeScaling, {"schedule": {1: NAN}}, NO_SCHEDULE + "{1: nan}"),
    (BatchSizeScaling, {"schedule": {1: 8.0}}, NO_SCHEDULE + "{1: 8.0}"),
    (BatchSizeScaling, {"schedule": [4, 8]}, NO_SCHEDULE + r"\[4, 8\]"),
    (LearningRateFinder, {"low": 0.0}, "`low` is not a number in its range.*: low=0.0"),
    (LearningRateFinder, {"low": 1.0, "high": 0.1}, "a number above `low`.*: high=0.1"),
    (LearningRateFinder, {"high": NAN}, "Received: high=nan"),
    (LearningRateFinder, {"low": "small"}, "Received: low='small'"),
    (LearningRateFinder, {"steps": 9}, "a number of at least 10.*: steps=9"),
    (LearningRateFinder, {"steps": 20.0}, "`steps` is not a positive integer.*: steps=20.0"),
    (LearningRateWarmup, {"epochs": 0}, "length .* not defined.*: epochs=0, steps=None"),
    (LearningRateWarmup, {"epochs": NAN}, "not defined.*: epochs=nan"),
    (LearningRateWarmup, {"epochs": 1, "steps": 5}, "not both.*: epochs=1, steps=5"),
    (LearningRateWarmup, {"steps": -3}, "`steps` is not a positive integer.*: steps=-3"),
    (LearningRateWarmup, {"steps": 1.5}, "`steps` is not a positive integer.*: steps=1.5"),
    (LearningRateWarmup, {"initial_rate": -0.1}, "cannot begin with.*: initial_rate=-0.1"),
    (LearningRateWarmup, {"initial_rate": NAN}, "cannot begin with this.*initial_rate=nan"),
    (NaNGuard, {"action": "ignore"}, "`action` has an unknown value.*'skip'.*: action"),
    (NaNGuard, {"every_steps": 0}, "`every_steps` is not a positive integer.*: every_steps=0"),
    (NaNGuard, {"patience": 1.5}, "`patience` is not a positive integer"),
    (ReplicaDriftCheck, {"action": "stop"}, "Expected one of 'raise', 'warn'.*action='stop'"),
    (ReplicaMetrics, {"metrics": "accuracy"}, NO_METRIC + "'accuracy'"),
    (ReplicaMetrics, {"metrics": [3]}, NO_METRIC + r"\[3\]"),
    (ReplicaMetrics, {"metrics": keras.metrics.Mean()}, NO_METRIC + "<Mean"),
    (ReplicaMetrics, {"metrics": ["acuracy"]}, "acuracy"),
    (ResumableCheckpoint, {"every_steps": 0}, "`every_steps` is not a positive integer"),
    (ResumableCheckpoint, {"every_epochs": 1.5}, "`every_epochs` is not a positive integer"),
    (ResumableCheckpoint, {"keep": 0}, "`keep` is not a positive integer"),
    (ResumableCheckpoint, {"every_minutes": -1}, "`every_minutes` is not a number in its range"),
    (ResumableCheckpoint, {"folder": Path("gs://a/b")}, "lost a slash.*Received: folder=PosixPath"),
    (ThroughputReport, {"path": "a.csv"}, r"not a JSON file.*ends in \.json.*: path='a.csv'"),
    (ThroughputReport, {"verbose": 3}, "`verbose` has an unknown value.*0, 1, 2.*: verbose=3"),
]
NEEDED = {BatchSizeScaling: {"base_batch_size": 4}, ResumableCheckpoint: {"folder": "never_made"}}


@pytest.mark.parametrize(("kind", "given", "text"), ARGUMENTS)
def test_a_wrong_argument_is_named(kind, given, text):
    with pytest.raises(ValueError, match=text):
        kind(**{**NEEDED.get(kind, {}), **given})


X, Y = np.zeros((22, 3), "float32"), np.zeros((22, 1), "float32")


def network(distributed=True):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    return on_replicas(model, 1) if distributed else model


def fit(model, *given, x=X, **arguments):
    """Two epochs without a graph, which takes longer to make."""
    if isinstance(x, np.ndarray):
        arguments = {"y": Y, "batch_size": 4, **arguments}
    model.compile("sgd", "mse", run_eagerly=arguments.pop("run_eagerly", True))
    return model.fit(x, verbose=0, epochs=2, callbacks=list(given), **arguments).history


NEED_A_RUN = [
    NaNGuard(),
    ReplicaDriftCheck(),
    ReplicaMetrics(),
    BatchSizeFinder(),
    BatchSizeScaling(4),
    LearningRateFinder(),
    ResumableCheckpoint("never_written"),
    ThroughputReport(),
]


@pytest.mark.parametrize("callback", NEED_A_RUN, ids=lambda callback: type(callback).__name__)
def test_a_model_of_stock_keras_is_refused(callback):
    with pytest.raises(ValueError, match="Write `model = kmg.distribute") as caught:
        fit(network(distributed=False), callback, run_eagerly=False)
    start = f"`{type(callback).__name__}` needs a running `fit` of a distributed model. Expected "
    assert str(caught.value).startswith(start)
    assert str(caught.value).endswith("Received: model='Sequential'")


def test_a_model_without_one_learning_rate_is_refused():
    model = network()
    model.compile(None, "mse", run_eagerly=True)
    with pytest.raises(ValueError, match="no single learning rate.*Received: optimizer=None"):
        model.fit(X, Y, verbose=0, callbacks=[LearningRateWarmup(steps=3)])


@pytest.mark.parametrize("callback", [ReplicaMetrics(), NaNGuard()])
def test_a_train_step_with_a_loss_of_its_own_is_refused(callback):
    name = type(callback).__name__
    text = f"^`{name}` cannot look inside this `train_step`.*or take the loss from `compute_"
    with pytest.raises(ValueError, match=f"{text}loss`.*Received: callback='{name}'$"):
        fit(on_replicas(UnseenStep(), 2), callback, run_eagerly=False)


class First(callbacks.RunCallback):
    writes = ("count",)
    single = True

    def on_epoch_end(self, epoch, logs=None):
        logs["count"] = epoch


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([First(), First()], "more than one `First`.*Expected at most one.*Received: callbacks="),
        (
            [keras.callbacks.EarlyStopping("count", mode="min"), First()],
            "EarlyStopping comes before First and would miss `count`.*Move First to the front",
        ),
    ],
)
def test_a_wrong_order_is_refused(given, text):
    """The error names both callbacks. In the other order `fit` works."""
    model = network()
    with pytest.raises(ValueError, match=text):
        fit(model, *given)
    fit(model, *(given[::-1] if type(given[0]) is not type(given[1]) else given[:1]))


def test_callbacks_that_write_the_logs_come_later(tmp_path):
    """A CSV file without `skipped_steps` would look as if no step had been skipped."""
    before = keras.callbacks.CSVLogger(tmp_path / "log.csv")
    with pytest.raises(ValueError, match="CSVLogger comes before NaNGuard.*Received: callbacks="):
        fit(network(), before, NaNGuard("skip"), run_eagerly=False)
    before.on_train_end()


def test_a_scheduler_that_would_undo_the_scaling_is_refused():
    scheduler = keras.callbacks.LearningRateScheduler(lambda epoch: 0.1)
    with pytest.raises(ValueError, match="undoes the scaling.*Received: callbacks="):
        fit(network(), BatchSizeScaling(4), scheduler)


class Batches(keras.utils.PyDataset):
    """Of a size that nothing can change."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[:4], Y[:4]


def generator():
    return iter([(X[:4], Y[:4])])


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)


TOO_MANY = "more examples than the data.*Received: global_batch_size="


@pytest.mark.parametrize(
    ("callback", "data", "text"),
    [
        (lambda: BatchSizeFinder(), Batches, "already batched.*Received: data='Batches'"),
        (lambda: BatchSizeFinder(None), generator, "already batched.*'a generator'"),
        (lambda: BatchSizeScaling(4), generator, "number of examples .* is not known.*data='list_"),
        (lambda: LearningRateWarmup(), generator, "length of an epoch is not.*: epochs=None"),
        (lambda: LearningRateWarmup(initial_rate=0.9), dataset, "begin above its target.*rate=0.9"),
        (lambda: BatchSizeScaling(4, schedule={1: 23}), dataset, TOO_MANY + "23, examples=22"),
    ],
)
def test_data_that_do_not_suit_a_callback_are_refused(callback, data, text):
    """Before the first step."""
    with pytest.raises(ValueError, match=text):
        fit(network(), callback(), x=data())
