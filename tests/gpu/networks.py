"""The networks that are timed and measured, under plain Keras, `MirroredStrategy` and this package.

ResNet50 on images, and dense layers whose weights are large, both tiny with `--cpu`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers
from machine import CPU, strategy

import keras_multigpu as kmg

SYSTEMS = ("one", "stock", "ours")
SIZE, BATCH, CLASSES = (32, 8, 10) if CPU else (224, 64, 1000)
WIDTH = 512 if CPU else 3072  # 3072 ** 2 float32 numbers take 36 MiB.


def resnet(on_device: bool = False) -> keras.Model:
    """On uint8 images, or on images that the device generates itself."""

    def draw(index: tf.Tensor) -> tf.Tensor:
        shape = (tf.shape(index)[0], SIZE, SIZE, 3)
        pixels = tf.random.stateless_uniform(shape, (1, 2), 0, 256, tf.int32)
        return tf.cast(pixels, "float32") / 255.0

    if on_device:
        x = keras.Input((1,), dtype="int32")
        y = layers.Lambda(draw, output_shape=(SIZE, SIZE, 3))(x)
    else:
        x = keras.Input((SIZE, SIZE, 3), dtype="uint8")
        y = layers.Rescaling(1 / 255)(x)
    if CPU:
        y = layers.Conv2D(8, 3, strides=2)(y)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        y = layers.Conv2D(8, 3, strides=2)(y)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        y = layers.Dense(CLASSES, "softmax")(layers.GlobalAveragePooling2D()(y))
    else:
        whole = keras.applications.ResNet50
        y = whole(weights=None, classes=CLASSES, input_shape=(SIZE, SIZE, 3))(y)
    return keras.Model(x, y)


def images(on_device: bool = False, batch: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    shape, top = ((batch, 1), 9) if on_device else ((batch, SIZE, SIZE, 3), 256)
    x = random.integers(0, top, shape).astype("int32" if on_device else "uint8")
    return x, random.integers(0, CLASSES, batch).astype("int32")


def dense() -> keras.Model:
    """Six layers, of which the weights take more than the activations."""
    hidden = [layers.Dense(WIDTH, "relu") for _ in range(6)]
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, layers.Dense(CLASSES, "softmax")])


def vectors(batch: int = BATCH) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(batch, WIDTH)).astype("float32")
    return x, random.integers(0, CLASSES, batch).astype("int32")


NETWORKS: dict[str, Any] = {"ResNet50": (resnet, images), "dense": (dense, vectors)}


@contextlib.contextmanager
def placing(system: str, names: list[str]) -> Iterator[Any]:
    """What makes a model one of this system; a model must be compiled in the context."""
    both = strategy(names) if system != "one" else None
    with both.scope() if both and system == "stock" else contextlib.nullcontext():
        yield (
            (lambda model: kmg.distribute(model, both)) if system == "ours" else lambda model: model
        )


def made(system: str, names: list[str], model: Any = resnet, jit: Any = False) -> keras.Model:
    """A compiled network of a system; `model` makes it."""
    keras.utils.set_random_seed(1)
    with placing(system, names) as place:
        network = place(model())
        network.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return network


def batches(example: tuple[np.ndarray, np.ndarray], count: int) -> tf.data.Dataset:
    """An epoch of the same batch, from the host's memory."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    dataset = tf.data.Dataset.from_tensors(example).repeat(count)
    return dataset.prefetch(2).with_options(options)
