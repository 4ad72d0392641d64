"""What exactness costs: the time of a step with something that needs the whole batch, and without.

    python tests/benchmarks/bench_cost_of_exactness.py [--write]

A feature costs something on one device, too. So the figure is by how much more it lengthens the
step of two replicas than that of plain Keras on one device: 1.00 means that exactness is free.
Times are processor times of epochs, run in turn; replicas are logical CPU devices, which share the
cores.
"""

import os
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers, ops
from report import main, spread

import keras_multigpu as kmg

BATCH, STEPS, REPLICAS = 64, 10, 2


class Feature(NamedTuple):
    """A feature, what its exactness takes, and how a model gets it."""

    name: str
    takes: str
    layers: Callable[[], list[keras.Layer]] = list
    compile: Callable[[], dict[str, Any]] = dict


def related(y: Any, found: Any) -> Any:
    """A supervised contrastive loss: the rows of other replicas are needed."""
    found = ops.normalize(found)
    same = ops.cast(ops.equal(y, ops.transpose(y)), "float32")
    return -ops.mean(same * ops.log_softmax(found @ ops.transpose(found) / 0.1), axis=-1)


FEATURES = (
    Feature("BatchNormalization", "two sums for each", lambda: [layers.BatchNormalization()]),
    Feature("Dropout", "the draws of the whole batch", lambda: [layers.Dropout(0.5)]),
    Feature("RandomFlip", "the draws of the whole batch", lambda: [layers.RandomFlip()]),
    Feature("global_clipnorm", "nothing", compile=lambda: {"global_clipnorm": 1.0}),
    Feature("AUC", "nothing: its counts are summed", compile=lambda: {"metrics": ["auc"]}),
    Feature("accumulation over 4", "nothing", compile=lambda: {"accumulate": 4}),
    Feature("contrastive loss", "all outputs are gathered", compile=lambda: {"loss": related}),
)


def model_with(feature: Feature | None, replicas: int) -> keras.Model:
    """A small convnet, compiled, with the feature twice between its layers."""
    keras.utils.set_random_seed(0)

    def extra() -> list[keras.Layer]:
        return feature.layers() if feature else []

    body = [layers.Conv2D(32, 3, padding="same"), *extra(), layers.ReLU(), layers.MaxPooling2D()]
    body += [layers.Conv2D(64, 3, padding="same"), *extra(), layers.ReLU()]
    head = [layers.GlobalAveragePooling2D(), layers.Dense(10, activation="softmax")]
    model = keras.Sequential([keras.Input((32, 32, 3)), *body, *head])
    given = feature.compile() if feature else {}
    if replicas > 1:
        model = kmg.distribute(model, kmg.strategy(devices=replicas))
    optimizer = keras.optimizers.Adam(
        global_clipnorm=given.get("global_clipnorm"),
        gradient_accumulation_steps=given.get("accumulate"),
    )
    metrics = [keras.metrics.AUC()] if "metrics" in given else []
    model.compile(optimizer, given.get("loss", "categorical_crossentropy"), metrics=metrics)
    return model


def seconds(model: keras.Model, x: np.ndarray, y: np.ndarray) -> float:
    """Processor time of an epoch."""
    start = time.process_time()
    model.fit(x, y, batch_size=BATCH, verbose=0)
    return time.process_time() - start


def costs(rounds: int) -> Iterator[tuple[str, ...]]:
    """A row for each feature."""
    random = np.random.default_rng(0)
    x = random.random((BATCH * STEPS, 32, 32, 3), "float32")
    labels = random.integers(0, 10, (BATCH * STEPS, 1))
    one_hot = np.eye(10, dtype="float32")[labels[:, 0]]
    kmg.strategy(devices=REPLICAS)
    for feature in FEATURES:
        y = labels if "loss" in feature.compile() else one_hot
        counts = 1, REPLICAS
        sides = [(model_with(f, n), y if f else one_hot) for n in counts for f in (None, feature)]
        for model, targets in sides:
            model.fit(x, targets, batch_size=BATCH, verbose=0)
        ratios = []
        for _ in range(rounds):
            plain, with_it, split, split_with_it = (seconds(m, x, t) for m, t in sides)
            ratios.append(split_with_it / split / (with_it / plain))
        yield feature.name, feature.takes, spread(ratios)


if __name__ == "__main__":
    columns = "feature | what its exactness takes | cost (range)"
    main(__doc__, {"cost": (columns, costs)}, rounds=7)
