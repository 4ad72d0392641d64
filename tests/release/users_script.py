"""A user's training, which `make dist` runs, and checks by mypy and pyright, on the wheel."""

# pyright: reportUnnecessaryTypeIgnoreComment=true

import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf

import keras_multigpu as kmg

strategy: tf.distribute.Strategy = kmg.strategy(devices=2)


def built(width: int = 8) -> keras.Model:
    """A small classifier with layers on which replicas have to agree."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(width, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.2),
        keras.layers.Dense(3, activation="softmax"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def train(batches: kmg.data.Batches, folder: str) -> list[float]:
    """The losses of two epochs."""
    model: kmg.DistributedModel = kmg.distribute(built(), strategy)
    callbacks: list[keras.callbacks.Callback] = [
        kmg.callbacks.ResumableCheckpoint(folder),
        kmg.callbacks.ReplicaDriftCheck(),
    ]
    history = model.fit(batches, epochs=2, callbacks=callbacks, verbose=0)
    losses: list[float] = history.history["loss"]
    return losses


if __name__ == "__main__":
    rows = np.random.default_rng(0).normal(size=(50, 4)).astype("float32")
    classes = (rows[:, 0] > 0).astype("int32") + (rows[:, 1] > 0)
    batches: kmg.data.Batches = kmg.data.from_arrays(rows, classes, global_batch_size=16, seed=3)
    print(train(batches, "run"))

    agrees: bool = kmg.verify(built, batches, replicas=(2,), steps=2).agrees
    assert agrees

    # The package's types reach its users: both checkers have to object here.
    try:
        kmg.data.from_arrays(rows, classes, global_batch_size="16")  # type: ignore[arg-type]
    except ValueError as error:
        print(error)
