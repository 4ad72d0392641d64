"""The networks whose speed is measured: in plain Keras on one device, in stock Keras, and here.

A convnet that computes, a transformer, and dense layers whose weights are large; tiny on CPUs.
"""

import contextlib
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from keras_multigpu.scoreboard.machine import CPU, devices, strategy
from keras_multigpu.training.distribute import distribute

SYSTEMS = ("one", "ours", "stock")

SIDE, CLASSES = (32, 10) if CPU else (224, 1000)
WIDTH = 256 if CPU else 3072  # 3072 ** 2 float32 numbers take 36 MiB.
BLOCKS, FEATURES, WORDS, LENGTH = (1, 32, 100, 16) if CPU else (6, 512, 8000, 128)


def resnet() -> keras.Model:
    x = keras.Input((SIDE, SIDE, 3), dtype="uint8")
    y = layers.Rescaling(1 / 255)(x)
    if CPU:
        y = layers.Conv2D(8, 3, strides=2)(y)
        y = layers.Activation("relu")(layers.BatchNormalization()(y))
        y = layers.Dense(CLASSES, "softmax", dtype="float32")(layers.GlobalAveragePooling2D()(y))
    else:
        shape = (SIDE, SIDE, 3)
        y = keras.applications.ResNet50(weights=None, classes=CLASSES, input_shape=shape)(y)
    return keras.Model(x, y)


def images(batch: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (batch, SIDE, SIDE, 3)).astype("uint8")


def transformer() -> keras.Model:
    x = keras.Input((LENGTH,), dtype="int32")
    y = layers.Embedding(WORDS, FEATURES)(x)
    for _ in range(BLOCKS):
        z = layers.LayerNormalization()(y)
        y = y + layers.MultiHeadAttention(8, FEATURES // 8, dropout=0.1)(z, z)
        z = layers.Dense(4 * FEATURES, "gelu")(layers.LayerNormalization()(y))
        y = y + layers.Dropout(0.1)(layers.Dense(FEATURES)(z))
    y = layers.GlobalAveragePooling1D()(layers.LayerNormalization()(y))
    return keras.Model(x, layers.Dense(CLASSES, "softmax", dtype="float32")(y))


def words(batch: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, WORDS, (batch, LENGTH)).astype("int32")


def dense() -> keras.Model:
    """Six layers, of which the weights take more than the activations."""
    hidden = [layers.Dense(WIDTH, "relu") for _ in range(6)]
    last = layers.Dense(CLASSES, "softmax", dtype="float32")
    return keras.Sequential([keras.Input((WIDTH,)), *hidden, last])


def vectors(batch: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(batch, WIDTH)).astype("float32")


NETWORKS: dict[str, Any] = {
    "resnet50": (resnet, images),
    "transformer": (transformer, words),
    "dense": (dense, vectors),
}


def made(system: str, network: str, policy: str, jit: bool) -> keras.Model:
    """A compiled network of a system."""
    keras.utils.set_random_seed(1)
    keras.config.set_dtype_policy(policy)
    scope = strategy().scope() if system == "stock" else contextlib.nullcontext()
    with scope, tf.device(devices()[0]) if system == "one" else contextlib.nullcontext():
        model = NETWORKS[network][0]()
        keras.config.set_dtype_policy("float32")
        if system == "ours":
            model = distribute(model, strategy())
        model.compile("adam", "sparse_categorical_crossentropy", jit_compile=jit)
    return model


def batches(network: str, batch: int, count: int) -> tf.data.Dataset:
    """An epoch of the same batch, from the host's memory."""
    labels = np.random.default_rng(0).integers(0, CLASSES, batch).astype("int32")
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    example = NETWORKS[network][1](batch), labels
    dataset = tf.data.Dataset.from_tensors(example).repeat(count)
    return dataset.prefetch(2).with_options(options)
