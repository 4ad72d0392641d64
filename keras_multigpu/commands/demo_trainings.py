"""Trains the demo's cases in one way, in a process of its own, because stock Keras may crash.

python -m keras_multigpu.commands.demo_trainings one|ours|stock DIGITS RESULTS.json
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.commands.demo_cases import BATCH_SIZE
from keras_multigpu.commands.demo_cases import CASES
from keras_multigpu.commands.demo_cases import EPOCHS
from keras_multigpu.commands.demo_cases import Case
from keras_multigpu.commands.demo_cases import Result
from keras_multigpu.commands.demo_digits import SIZE
from keras_multigpu.data import Batches
from keras_multigpu.writing import whole


def main(way: str, folder: str, path: str) -> None:
    """Train all cases; after each, write what there is so far."""
    # Before TensorFlow's first operation, so that all three ways see the same devices.
    two_replicas = kmg.strategy(devices=2)
    # To optimise graphs of trainings as short as these takes longer than the trainings.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    scope: Any = contextlib.nullcontext
    if way == "stock":
        scope = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope
    digits = kmg.data.from_directory(
        folder,
        color_mode="grayscale",
        image_size=SIZE,
        global_batch_size=BATCH_SIZE,
        verbose=False,
    )
    training, validation = digits.split(0.2)
    results: list[Result] = []
    for case in CASES:
        with scope():
            model = build(case)
            if way == "ours":
                model = kmg.distribute(model, two_replicas, sync_batch_norm=True)
            compile_model(model)
        results.append(train(model, training.take(case.examples), validation))
        write(results, Path(path))


def build(case: Case) -> keras.Model:
    """The model of a case, with the same first weights whenever it is built."""
    keras.utils.set_random_seed(1)
    layers = keras.layers
    norm = [layers.BatchNormalization()] if case.batch_norm else []
    if case.layers == "dense":
        first = [layers.Flatten(), layers.Dense(64), *norm, layers.Activation("gelu")]
    else:
        first = [layers.Conv2D(16, 3, padding="same"), *norm, layers.Activation("gelu")]
        first += [layers.Conv2D(32, 3, strides=2), layers.Activation("gelu"), layers.Flatten()]
    inputs = [keras.Input((*SIZE, 1)), layers.Rescaling(1 / 255)]
    return keras.Sequential([*inputs, *first, layers.Dense(10)])


def compile_model(model: keras.Model) -> None:
    """Compile a model as all ways do."""
    model.compile(
        keras.optimizers.SGD(0.05, momentum=0.9),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )


def train(model: keras.Model, training: Batches, validation: Batches) -> Result:
    """Train a model; what came of it.

    A model of plain Keras reads the batches as a `tf.data.Dataset`: the same ones in each epoch.
    """
    data: Any = (training, None, validation)
    if not isinstance(model, kmg.DistributedModel):
        data = (training.epochs(), len(training), validation.evaluation().epoch(0))
    x, steps, new = data
    history = keras.callbacks.History()
    try:
        model.fit(x, steps_per_epoch=steps, epochs=EPOCHS, verbose=0, callbacks=[history])
        scores = model.evaluate(new, verbose=0, return_dict=True)
    except Exception as error:  # Whatever stock Keras raises is its result.
        losses = getattr(history, "history", {}).get("loss", [])
        return Result(losses, None, [], type(error).__name__)
    weights = np.concatenate([weight.ravel() for weight in model.get_weights()])
    return Result(history.history["loss"], scores["accuracy"], weights.tolist())


def write(results: list[Result], path: Path) -> None:
    """Write the results, the whole file at once."""
    with whole(path) as partial:
        partial.write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
