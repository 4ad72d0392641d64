"""Small trainings on all devices, against plain Keras on one: weights, logs and predictions.

Each has something that once differed, crashed or hung, or that takes a way of its own on GPUs.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from machine import Check, Row, devices, exact, strategy

import keras_multigpu as kmg
from keras_multigpu.explanation.planning import last_step


class Training(NamedTuple):
    """A model, its data, and how both are used."""

    build: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    batch: int = 16
    optimizer: Callable[[], Any] = partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics: tuple[Any, ...] = ("accuracy",)
    policy: str = "float32"
    steps: int = 1
    options: dict[str, Any] = {}
    limit: float = 5e-5
    """The relative difference that rounding makes."""
    plain: Callable[[], keras.Model] | None = None
    """The model on one device, where plain Keras fails with the other one."""


def checks() -> dict[str, Check]:
    exact()
    both = strategy(devices())
    return {name: partial(alike, name, one, both) for name, one in trainings().items()}


def trainings() -> dict[str, Training]:
    """The trainings by name. The last batch is always smaller."""
    random = np.random.default_rng(0)
    shapes = ((101, 8), (61, 12, 12, 3), (61, 10, 6))
    numbers, images, series = (random.normal(size=shape).astype("float32") for shape in shapes)
    many, few = random.integers(0, 3, 101), random.integers(0, 3, 61)
    tokens, masks = random.integers(0, 20, (61, 5)), random.integers(0, 2, (101, 1))

    dense, convolved = Training(mlp, numbers, many), Training(convnet, images, few)
    in_halves = {"policy": "mixed_float16", "limit": 5e-2}
    contrasted = dense._replace(build=contrastive, loss=None, metrics=())
    adam, sgd = partial(keras.optimizers.Adam, 0.01), partial(keras.optimizers.SGD, 0.1)

    def falling_scale() -> keras.optimizers.Optimizer:
        # The first scales are too large for float16, so that those steps are left out.
        scaled = keras.optimizers.LossScaleOptimizer
        return scaled(sgd(), initial_scale=2.0**18, dynamic_growth_steps=3)

    return {
        "MLP": dense,
        "convnet, BatchNormalization": convolved,
        "dropout": dense._replace(build=dropout),
        "LSTM": Training(partial(recurrent, layers.LSTM(8)), series, few),
        "bidirectional GRU": Training(
            partial(recurrent, layers.Bidirectional(layers.GRU(8))), series, few
        ),
        "Embedding of int64 tokens": Training(embedding, tokens, few, optimizer=sgd),
        "attention": Training(attention, tokens, few, optimizer=sgd),
        "a float64 layer": dense._replace(build=float64_layer),
        "BinaryIoU": dense._replace(
            build=mask,
            y=masks,
            loss="binary_crossentropy",
            metrics=(keras.metrics.BinaryIoU,),
        ),
        "mixed_float16": dense._replace(**in_halves),
        "mixed_float16, convnet": convolved._replace(**in_halves),
        "mixed_float16, a scale that falls": dense._replace(optimizer=falling_scale, **in_halves),
        "mixed_bfloat16": dense._replace(policy="mixed_bfloat16", limit=5e-2),
        "gradient accumulation": dense._replace(
            optimizer=partial(adam, gradient_accumulation_steps=2)
        ),
        "global clipnorm": dense._replace(optimizer=partial(adam, global_clipnorm=0.1)),
        "steps_per_execution=4": convolved._replace(batch=8, steps=4),
        "sharded optimizer": dense._replace(optimizer=adam, options={"shard": "optimizer"}),
        "RematScope": convolved._replace(build=remat, plain=convnet),
        "contrastive": contrasted,
        "contrastive, mixed_float16": contrasted._replace(**in_halves),
    }


# Models


def mlp() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dense(16, "tanh"), logits()]
    )


def logits() -> keras.Layer:
    return layers.Dense(3, dtype="float32")


def dropout() -> keras.Model:
    return keras.Sequential(
        [keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dropout(0.3), logits()]
    )


def float64_layer() -> keras.Model:
    middle = layers.Dense(16, "tanh", dtype="float64")
    return keras.Sequential([keras.Input((8,)), layers.Dense(32, "tanh"), middle, logits()])


def mask() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), layers.Dense(1, "sigmoid", dtype="float32")])


def convnet() -> keras.Model:
    x = keras.Input((12, 12, 3))
    y = layers.Conv2D(8, 3, use_bias=False)(x)
    y = layers.Activation("relu")(layers.BatchNormalization()(y))
    y = layers.Conv2D(8, 3, strides=2)(y)
    return keras.Model(x, logits()(layers.GlobalAveragePooling2D()(y)))


def remat() -> keras.Model:
    with keras.RematScope(mode="full"):
        return convnet()


def recurrent(layer: keras.Layer) -> keras.Model:
    # A layer of its own for each model.
    return keras.Sequential([keras.Input((10, 6)), layer.from_config(layer.get_config()), logits()])


def embedding() -> keras.Model:
    x = keras.Input((5,), dtype="int64")
    return keras.Model(x, logits()(layers.Flatten()(layers.Embedding(20, 4)(x))))


def attention() -> keras.Model:
    x = keras.Input((5,), dtype="int64")
    y = layers.Embedding(20, 8)(x)
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 4)(y, y))
    return keras.Model(x, logits()(layers.GlobalAveragePooling1D()(y)))


class Contrastive(keras.Model):
    """Pulls examples with equal labels together: each needs the rows and labels of all others."""

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        rows = keras.ops.normalize(keras.ops.cast(y_pred, "float32"))
        alike = keras.ops.cast(y[:, None] == y[None, :], "float32")
        return keras.ops.mean(
            keras.ops.binary_crossentropy(alike, rows @ keras.ops.transpose(rows), True)
        )


def contrastive() -> keras.Model:
    x = keras.Input((8,))
    return Contrastive(x, layers.Dense(8)(layers.Dense(32, "tanh")(x)))


# Their numbers


def numbers_of(one: Training, place: Callable[[keras.Model], keras.Model]) -> list[np.ndarray]:
    """Weights, logs and predictions after two epochs."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(one.policy)
    model = place(one.build())
    keras.config.set_dtype_policy("float32")
    model.compile(
        one.optimizer(),
        one.loss,
        metrics=[metric() if callable(metric) else metric for metric in one.metrics],
        jit_compile=False,
        steps_per_execution=one.steps,
    )
    use = {"batch_size": one.batch, "verbose": 0}
    history = model.fit(one.x, one.y, epochs=2, shuffle=False, **use).history
    predictions = model.predict(one.x, **use)
    logs = model.evaluate(one.x, one.y, **use)
    found = [*(w.numpy() for w in model.weights), *history.values(), predictions, logs]
    return [np.asarray(value, "float64") for value in found]


def difference(expected: list[np.ndarray], got: list[np.ndarray]) -> float:
    """The largest difference, relative to the largest value of its array."""
    pairs = zip(expected, got, strict=True)
    return max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-3)) for a, b in pairs)


def alike(name: str, one: Training, both: tf.distribute.Strategy) -> Row:
    """Whether a training is the same on all devices, and shared by them."""
    placed: list[keras.Model] = []

    def place(model: keras.Model) -> keras.Model:
        # The error tells what the self-check saw; a fallback to one device would look equal.
        placed.append(kmg.distribute(model, both, on_inexact="error", **one.options))
        return placed[0]

    plain = one._replace(build=one.plain or one.build)
    found = difference(numbers_of(plain, lambda model: model), numbers_of(one, place))
    step = last_step(placed[0])
    if step is None or step.unsplit_because is not None:
        return Row(name, "shared", "one device took whole batches", False)
    return Row(name, f"<= {one.limit:g}", found, found <= one.limit)
