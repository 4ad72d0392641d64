"""Small trainings on all devices against plain Keras on one: weights, logs and predictions.

Each has something that once differed, crashed or hung, or takes a way of its own on GPUs. Two equal
trainings of one device come first: no comparison can be closer than these are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_multigpu.explanation.planning import last_step
from keras_multigpu.scoreboard.machine import Checks, Row, devices, no_tf32, strategy
from keras_multigpu.training.distribute import distribute


class Training(NamedTuple):
    """A model, its data, and how both are used."""

    build: Callable[[], keras.Model]
    x: np.ndarray
    y: np.ndarray
    optimizer: Callable[[], Any] = partial(keras.optimizers.SGD, 0.1, momentum=0.9)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metrics: tuple[str, ...] = ("accuracy",)
    policy: str = "float32"
    steps: int = 1
    options: dict[str, Any] = {}
    limit: float = 5e-5
    """The relative difference that rounding makes."""
    plain: Callable[[], keras.Model] | None = None
    """The model on one device, where plain Keras fails with the other one."""


def checks(kind: str) -> Checks:
    strategy()
    tf.config.experimental.enable_tensor_float_32_execution(kind == "tf32")
    if kind == "spread":
        return {name: partial(spread, name) for name in ("MLP", "convnet, BatchNormalization")}
    if kind == "tf32" and (why := no_tf32()):
        return {"all trainings": lambda: [Row("all trainings", skipped=why)]}
    return {name: partial(alike, name, kind == "tf32") for name in trainings()}


def trainings() -> dict[str, Training]:
    """The trainings by name. The last batch is always smaller."""
    random = np.random.default_rng(0)
    shapes = ((101, 8), (61, 12, 12, 3), (61, 10, 6))
    numbers, images, series = (random.normal(size=shape).astype("float32") for shape in shapes)
    many, few = random.integers(0, 3, 101), random.integers(0, 3, 61)
    tokens = random.integers(0, 20, (61, 5))

    dense, convolved = Training(mlp, numbers, many), Training(convnet, images, few)
    halves: dict[str, Any] = {"policy": "mixed_float16", "limit": 5e-2}
    adam, sgd = partial(keras.optimizers.Adam, 0.01), partial(keras.optimizers.SGD, 0.1)

    def falling_scale() -> keras.optimizers.Optimizer:
        # The first scales are too large for float16, so that those steps are left out.
        scaled = keras.optimizers.LossScaleOptimizer
        return scaled(sgd(), initial_scale=2.0**18, dynamic_growth_steps=3)

    return {
        "MLP": dense,
        "convnet, BatchNormalization": convolved,
        "dropout": dense._replace(build=partial(mlp, layers.Dropout(0.3))),
        "LSTM": Training(partial(recurrent, layers.LSTM(8)), series, few),
        "bidirectional GRU": Training(
            partial(recurrent, layers.Bidirectional(layers.GRU(8))), series, few
        ),
        "attention over int64 tokens": Training(attention, tokens, few, optimizer=sgd),
        "mixed_float16, convnet": convolved._replace(**halves),
        "mixed_float16, a scale that falls": dense._replace(optimizer=falling_scale, **halves),
        "mixed_bfloat16": dense._replace(policy="mixed_bfloat16", limit=5e-2),
        "gradient accumulation": dense._replace(
            optimizer=partial(adam, gradient_accumulation_steps=2)
        ),
        "global clipnorm": dense._replace(optimizer=partial(adam, global_clipnorm=0.1)),
        "steps_per_execution": convolved._replace(steps=4),
        "optimizer in parts": dense._replace(optimizer=adam, options={"shard": "optimizer"}),
        "weights in parts": dense._replace(optimizer=adam, options={"shard": "weights"}),
        "RematScope": convolved._replace(build=remat, plain=convnet),
        "contrastive, float16": dense._replace(
            build=embedding, loss=contrast, metrics=(), **halves
        ),
    }


def mlp(*middle: keras.Layer) -> keras.Model:
    # Layers of its own for each model.
    own = [layer.from_config(layer.get_config()) for layer in middle]
    return keras.Sequential([keras.Input((8,)), layers.Dense(32, "tanh"), *own, logits()])


def logits() -> keras.Layer:
    return layers.Dense(3, dtype="float32")


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
    return keras.Sequential([keras.Input((10, 6)), layer.from_config(layer.get_config()), logits()])


def attention() -> keras.Model:
    x = keras.Input((5,), dtype="int64")
    y = layers.Embedding(20, 8)(x)
    y = layers.LayerNormalization()(y + layers.MultiHeadAttention(2, 4)(y, y))
    return keras.Model(x, logits()(layers.GlobalAveragePooling1D()(y)))


def embedding() -> keras.Model:
    return keras.Sequential([keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dense(8)])


def contrast(labels: Any, rows: Any) -> Any:
    """Pulls examples with equal labels together: each needs the rows and labels of all others."""
    rows, labels = keras.ops.normalize(keras.ops.cast(rows, "float32")), keras.ops.ravel(labels)
    alike = keras.ops.cast(labels[:, None] == labels[None, :], "float32")
    return keras.ops.binary_crossentropy(alike, rows @ keras.ops.transpose(rows), True)


def numbers_of(one: Training, place: Callable[[keras.Model], keras.Model]) -> list[np.ndarray]:
    """Weights, logs and predictions after two epochs."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(one.policy)
    model = place(one.build())
    keras.config.set_dtype_policy("float32")
    model.compile(
        one.optimizer(),
        one.loss,
        metrics=[*one.metrics],
        jit_compile=False,
        steps_per_execution=one.steps,
    )
    use = {"batch_size": 16, "verbose": 0}
    history = model.fit(one.x, one.y, epochs=2, shuffle=False, **use).history
    found = [*(weight.numpy() for weight in model.weights), *history.values()]
    found += [model.predict(one.x, **use), model.evaluate(one.x, one.y, **use)]
    return [np.asarray(value, "float64") for value in found]


def difference(expected: list[np.ndarray], got: list[np.ndarray]) -> float:
    """The largest difference, relative to the largest value of its array."""
    pairs = zip(expected, got, strict=True)
    return max(float(np.max(np.abs(a - b)) / max(np.max(np.abs(a)), 1e-3)) for a, b in pairs)


def spread(name: str) -> list[Row]:
    """Without TensorFloat-32 and with it, and what it changes by itself."""
    one, found, why = trainings()[name], {}, no_tf32()
    again, with_tf32, changes = (
        f"{name}: {what}" for what in ("twice", "twice, with TF32", "with TF32 and without")
    )
    for on in (False, True)[: 1 if why else 2]:
        tf.config.experimental.enable_tensor_float_32_execution(on)
        with tf.device(devices()[0]):
            found[on] = [numbers_of(one, lambda model: model) for _ in range(2)]
    rows = [Row(again, difference(*found[False]))]
    if why:
        return [*rows, Row(with_tf32, skipped=why), Row(changes, skipped=why)]
    rows.append(Row(with_tf32, difference(*found[True])))
    return [*rows, Row(changes, difference(found[False][0], found[True][0]))]


def alike(name: str, in_tf32: bool) -> list[Row]:
    """Whether a training is the same on all devices, and shared by them."""
    one, placed = trainings()[name], []

    def place(model: keras.Model) -> keras.Model:
        # The error tells what the self-check saw; a fallback to one device would look equal.
        on_inexact = "one_device" if in_tf32 else "error"
        placed.append(distribute(model, strategy(), on_inexact=on_inexact, **one.options))
        return placed[0]

    plain = one._replace(build=one.plain or one.build)
    with tf.device(devices()[0]):
        expected = numbers_of(plain, lambda model: model)
    found = difference(expected, numbers_of(one, place))
    step = last_step(placed[0])
    if step is None or step.unsplit_because is not None:
        return [Row(name, "one device took whole batches", "shared", None if in_tf32 else False)]
    if in_tf32:
        return [Row(name, found)]
    return [Row(name, found, f"<= {one.limit:g}", found <= one.limit)]
