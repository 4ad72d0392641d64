"""Keras's own step, with layers and data that do more than usual."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from published.learner import ROWS, draws, net


class Router(layers.Layer):
    """Sends each row to one of the experts, as long as that has room; adds a loss of balance."""

    def __init__(self, experts=3):
        super().__init__()
        self.experts = experts
        self.router = layers.Dense(experts)

    def build(self, shape):
        self.router.build(shape)
        self.kernels = self.add_weight(
            shape=(self.experts, shape[-1], shape[-1]), initializer="random_normal"
        )

    def call(self, x):
        rows = tf.shape(x)[0]
        shares = tf.nn.softmax(self.router(x))
        chosen = tf.one_hot(tf.argmax(shares, axis=1), self.experts)
        used = tf.reduce_mean(chosen, axis=0) * tf.reduce_mean(shares, axis=0)
        self.add_loss(self.experts * tf.reduce_sum(used))
        room = (rows + self.experts - 1) // self.experts
        place = tf.cumsum(chosen, axis=0) * chosen
        chosen *= tf.cast(place <= tf.cast(room, "float32"), "float32")
        place = tf.cast(tf.reduce_sum(place * chosen, axis=1), "int32") - 1
        sent = chosen[:, :, None] * tf.one_hot(place, room)[:, None, :]
        taken = tf.einsum("bec,bd->ecd", sent, x)
        done = tf.nn.relu(tf.einsum("ecd,edf->ecf", taken, self.kernels))
        gate = tf.reduce_sum(shares * chosen, axis=1, keepdims=True)
        return x + gate * tf.einsum("bec,ecd->bd", sent, done)


class Ctc(layers.Layer):
    """Adds the loss of an alignment; passes the predictions on."""

    def call(self, inputs):
        labels, found = inputs
        rows, steps, count = ops.shape(found)[0], ops.shape(found)[1], ops.shape(labels)[1]
        full = ops.ones((rows,), "int32")
        losses = ops.ctc_loss(labels, found, full * count, full * steps, mask_index=0)
        self.add_loss(ops.mean(losses))
        return found


def listener():
    sound, text = keras.Input((6, 3), name="sound"), keras.Input((2,), dtype="int32", name="text")
    found = layers.Dense(4)(layers.GRU(5, return_sequences=True)(sound))
    return keras.Model({"sound": sound, "text": text}, Ctc()([text, found]))


def sounds():
    text = np.random.default_rng(3).integers(1, 4, (ROWS, 2)).astype("int32")
    return {"sound": draws(ROWS, 6, 3), "text": text}, None, None


WORDS = ["red", "green", "blue"]


def texts():
    rows = [" ".join(WORDS[: 1 + row % 3]) for row in range(ROWS)]
    return tf.constant(rows)[:, None], draws(ROWS, 1), None


def text_reader():
    """Texts are split inside of the model, by an operation that only takes whole ones."""
    words = layers.TextVectorization(vocabulary=WORDS, output_sequence_length=4)
    parts = [words, layers.Embedding(6, 3), layers.Flatten(), layers.Dense(1)]
    return keras.Sequential([keras.Input((1,), dtype="string"), *parts])


class Ragged(keras.Model):
    def __init__(self):
        super().__init__()
        self.table, self.last = layers.Embedding(9, 4), layers.Dense(1)

    def call(self, x):
        rows = tf.ragged.map_flat_values(tf.gather, self.table.embeddings, x)
        return self.last(tf.reduce_mean(rows, axis=1))

    def build(self, shape):
        self.table.build(shape)
        self.last.build((None, 4))
        self.built = True


def sentences():
    draw = np.random.default_rng(6)
    rows = [draw.integers(1, 9, length).tolist() for length in draw.integers(1, 6, ROWS)]
    return tf.ragged.constant(rows, dtype="int32"), draws(ROWS, 1), None


class AlongTheBatch(layers.Layer):
    """Standard layers that were told to work along the batch's axis."""

    def __init__(self):
        super().__init__()
        self.parts = [
            layers.Softmax(axis=0),
            layers.UnitNormalization(axis=0),
            layers.LayerNormalization(axis=1, center=False),
        ]
        self.double = layers.Concatenate(axis=0)

    def call(self, x):
        for part in self.parts:
            x = part(x) + 0.1 * x
        return self.double([x, -x])[: ops.shape(x)[0]]


def of_body(kind, *units):
    return lambda: kind(body=net(6, *units))


def sequential(*parts):
    return lambda: keras.Sequential(
        [keras.Input((6,)), *(make() for make in parts), layers.Dense(1)]
    )


def contrast(kind):
    def make():
        augment = keras.Sequential([layers.GaussianNoise(0.2, seed=3), layers.Dropout(0.2, seed=4)])
        return kind(augment=augment, body=net(6, 8, 4))

    return make
