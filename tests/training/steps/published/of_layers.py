"""Keras's own step, with layers and data that do more than usual."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from published.learner import ROWS, draws, net, numbers


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


class Plain(layers.Layer):
    """A dense layer that takes nothing but its input."""

    # What Keras computes again may have no keyword arguments, which `Dense` has.
    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], 8))

    def call(self, x):
        return ops.tanh(ops.matmul(x, self.kernel))


class Rematerialized(keras.Model):
    """Computes a part again on the way back."""

    def __init__(self):
        super().__init__()
        with keras.RematScope(mode="full"):
            self.inner = Plain()
        self.normal, self.last = layers.BatchNormalization(), layers.Dense(1)

    def call(self, x, training=None):
        return self.last(self.normal(self.inner(x), training=training))


def reader():
    """Words with a mask, which attention and the pooling see."""
    words = keras.Input((6,), dtype="int32")
    x = layers.Embedding(12, 4, mask_zero=True)(words)
    x = layers.MultiHeadAttention(2, 3)(x, x)
    return keras.Model(words, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


WORDS = ["red", "green", "blue"]


def colors():
    return tf.constant(np.array(WORDS)[np.arange(ROWS) % 3])[:, None], draws(ROWS, 1), None


def texts():
    rows = [" ".join(WORDS[: 1 + row % 3]) for row in range(ROWS)]
    return tf.constant(rows)[:, None], draws(ROWS, 1), None


def speller():
    """Strings are looked up inside of the model."""
    known = layers.StringLookup(vocabulary=WORDS[:2], output_mode="one_hot")
    return keras.Sequential([keras.Input((1,), dtype="string"), known, layers.Dense(1)])


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


def sparse():
    x = np.where(np.random.default_rng(7).uniform(size=(ROWS, 8)) > 0.6, draws(ROWS, 8), 0.0)
    return tf.sparse.from_dense(x.astype("float32")), draws(ROWS, 1), None


def sparse_net():
    return keras.Sequential([keras.Input((8,), sparse=True), layers.Dense(4), layers.Dense(1)])


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


def augmented():
    return keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            layers.RandomFlip(seed=1),
            layers.RandomRotation(0.2, seed=2),
            layers.RandomContrast(0.3, seed=5),
            layers.Conv2D(3, 3, activation="relu"),
            layers.GlobalMaxPooling2D(),
            layers.Dense(3),
        ]
    )


class ListedLosses(keras.Model):
    """`compute_loss` makes two outputs of one."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, [y_pred, 2 * y_pred], sample_weight, training)


class ListedInStep(keras.Model):
    """`train_step` does."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=[found, 2 * found])
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {m.name: m.result() for m in self.metrics if m.name != "loss"}


def listed(kind):
    x = keras.Input((6,))
    return lambda: kind(x, layers.Dense(1)(x))


def two_targets():
    x, y, _ = numbers()()
    return x, (y, (y > 0).astype("int32")), None


def of_body(kind, *units):
    return lambda: kind(body=net(6, *units))


def sequential(*parts):
    return lambda: keras.Sequential(
        [keras.Input((6,)), *(make() for make in parts), layers.Dense(1)]
    )


def unbiased(kind):
    def make():
        # A last bias would have no gradient but what is rounded, for only differences count.
        body = [layers.Dense(8, activation="tanh"), layers.Dense(4, use_bias=False)]
        return kind(body=keras.Sequential([keras.Input((6,)), *body]))

    return make


def contrast(kind):
    def make():
        augment = keras.Sequential([layers.GaussianNoise(0.2, seed=3), layers.Dropout(0.2, seed=4)])
        return kind(augment=augment, body=net(6, 8, 4))

    return make
