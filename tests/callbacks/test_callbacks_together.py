"""All callbacks in one `fit`, with Keras's: those that only watch change no bit."""

import csv

import keras
import numpy as np
import pytest
from helpers.all_replicas import ALL_REPLICAS

import keras_multigpu as kmg
from keras_multigpu import callbacks as ours
from keras_multigpu.training.variables.model_state import ModelState

pytestmark = [
    # Keras's ReduceLROnPlateau turns a variable into an array in NumPy 1's way.
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword"),
]

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(44, 4)).astype("float32")
Y = RANDOM.integers(0, 3, 44)


def network(**compiled):
    """A small model with all that training changes, on two replicas."""
    keras.utils.set_random_seed(2)
    layers = [keras.Input((4,)), keras.layers.Dense(5), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.2, seed=4), keras.layers.Dense(3)]
    strategy = kmg.strategy("mirrored", devices=["CPU:0", "CPU:1"])
    model = kmg.distribute(keras.Sequential(layers), strategy)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], **compiled)
    return model


def data():
    """Batches of eight, the last one of each epoch smaller."""
    return kmg.data.from_arrays(X, Y, global_batch_size=8, seed=5)


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


def watching(folder):
    """Callbacks that observe training, after those that set the rate."""
    return [
        ours.NaNGuard("skip", every_steps=1),
        ours.ReplicaMetrics(),
        ours.ReplicaDriftCheck(),
        ours.ThroughputReport(verbose=0),
        ours.ResumableCheckpoint(folder / "checkpoints", every_steps=4),
    ]


def columns(path):
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


@pytest.mark.parametrize("steps_per_execution", [1, 3] if ALL_REPLICAS else [2])
@pytest.mark.slow
def test_watching_changes_nothing(steps_per_execution, tmp_path):
    """Weights, optimizer, seeds, metrics and logs are equal, bit for bit."""
    ends = {}
    for kind in ("alone", "watched"):
        folder = tmp_path / kind
        folder.mkdir()
        first, rest = changing(folder)[:2], changing(folder)[2:]
        callbacks = [*first, *(watching(folder) if kind == "watched" else []), *rest]
        model = network(steps_per_execution=steps_per_execution)
        history = model.fit(
            data(), epochs=4, verbose=0, validation_data=(X[:9], Y[:9]), callbacks=callbacks
        ).history
        ends[kind] = ModelState.of(model).values, history, columns(folder / "log.csv")
    alone, watched = ends["alone"], ends["watched"]
    assert alone[0].keys() == watched[0].keys()
    for name, value in alone[0].items():
        np.testing.assert_array_equal(value, watched[0][name], name)
    for name, values in alone[1].items():
        assert watched[1][name] == values, name
    of_keras = {"epoch", "accuracy", "loss", "val_accuracy", "val_loss"}
    ours_write = {name for each in callbacks for name in getattr(each, "writes", ())}
    assert set(watched[2]) - of_keras == ours_write
    assert watched[1]["skipped_steps"] == [0, 0, 0, 0]
    assert {"skipped_steps", "learning_rate", "global_batch_size"} < set(watched[2])
    assert watched[1]["global_batch_size"] == [8, 8, 16, 16]
    assert (tmp_path / "watched" / "best.keras").exists()
