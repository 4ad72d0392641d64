"""Steps that people publish, each in a few lines and with a handful of weights.

A row of `PUBLISHED` is a `Case` that trains one epoch of three batches, of which the last is
smaller; `gathers` names the operations for which replicas may gather rows, which is what a change
of the partition must not add to.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from exactness import models as made
from exactness.cases import Case
from keras import layers, ops

ROWS, BATCH = 12, 5


def draws(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


def numbers(width=6, outputs=1):
    """Rows of numbers, and targets."""
    return lambda: (draws(ROWS, width), draws(ROWS, outputs, seed=1), None)


ROWS_OF_SIX = numbers()


def classes(width=6, count=3):
    """Rows of numbers, and a class for each."""
    return lambda: (
        draws(ROWS, width),
        np.random.default_rng(1).integers(0, count, ROWS).astype("int32"),
        None,
    )


def pictures(count=3):
    """Small pictures, and a class for each."""
    return lambda: (draws(ROWS, 6, 6, 2), classes(count=count)()[1], None)


def net(width, *units):
    """Dense layers, one after another."""
    parts = [layers.Dense(size, activation="tanh") for size in units[:-1]]
    return keras.Sequential([keras.Input((width,)), *parts, layers.Dense(units[-1])])


class Learner(keras.Model):
    """A model with networks of its own, and a loss of them.

    Args:
        **networks: What becomes an attribute.
    """

    def __init__(self, **networks):
        super().__init__()
        for name, network in networks.items():
            setattr(self, name, network)

    def objective(self, x, y):
        """The loss of a batch."""
        raise NotImplementedError

    def learn(self, function, weights=None, optimizer=None, change=lambda gradients: gradients):
        """Take a step down a loss."""
        weights = self.trainable_weights if weights is None else weights
        with tf.GradientTape() as tape:
            loss = function()
        gradients = change(tape.gradient(loss, weights))
        (optimizer or self.optimizer).apply(gradients, weights)
        return loss

    def train_step(self, data):
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        loss = self.learn(lambda: self.objective(x, y))
        return {"objective": loss, **self.after(x, y)}

    def after(self, x, y):
        """What happens after a step; more logs."""
        return {}


def cross_entropy(labels, logits):
    loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    return tf.reduce_mean(loss)


def unit(rows):
    return tf.math.l2_normalize(rows, axis=-1)


# Each row against the others of the batch.


class SimClr(Learner):
    """Two views of a picture find each other among all views of the batch."""

    def views(self, x):
        seen = [self.augment(x, training=True) for _ in range(2)]
        return unit(self.body(tf.concat(seen, axis=0), training=True))

    def objective(self, x, y):
        rows = self.views(x)
        total = tf.shape(rows)[0]
        logits = tf.matmul(rows, rows, transpose_b=True) / 0.5
        logits -= 1e9 * tf.eye(total)
        partners = tf.roll(tf.range(total), total // 2, axis=0)
        return cross_entropy(partners, logits)


class SupervisedContrast(SimClr):
    """All views of a class attract each other."""

    def objective(self, x, y):
        rows, labels = self.views(x), tf.tile(y, [2])
        logits = tf.matmul(rows, rows, transpose_b=True) / 0.3
        logits -= tf.stop_gradient(tf.reduce_max(logits, axis=1, keepdims=True))
        others = 1.0 - tf.eye(tf.shape(rows)[0])
        same = tf.cast(labels[:, None] == labels[None, :], "float32") * others
        shares = logits - tf.math.log(tf.reduce_sum(tf.exp(logits) * others, 1, keepdims=True))
        return -tf.reduce_mean(tf.reduce_sum(same * shares, 1) / tf.reduce_sum(same, 1))


class NearestNeighbours(Learner):
    """NNCLR: a view's neighbour in a queue stands in for it; the queue moves on by a batch."""

    def __init__(self):
        super().__init__(body=net(6, 8, 4))
        self.queue = self.add_weight(shape=(16, 4), initializer="random_normal", trainable=False)

    def nearest(self, rows):
        similar = tf.matmul(unit(rows), unit(self.queue.value), transpose_b=True)
        return tf.gather(unit(self.queue.value), tf.argmax(similar, axis=1))

    def objective(self, x, y):
        self.left, self.right = self.body(x + 0.1), self.body(x * 0.9)
        labels = tf.range(tf.shape(x)[0])
        logits = tf.matmul(self.nearest(self.left), unit(self.right), transpose_b=True) / 0.2
        turned = tf.matmul(self.nearest(self.right), unit(self.left), transpose_b=True) / 0.2
        return cross_entropy(labels, logits) + cross_entropy(labels, turned)

    def after(self, x, y):
        fresh = unit(self.body(x))
        self.queue.assign(tf.concat([fresh, self.queue.value], axis=0)[:16])
        return {"queue": tf.reduce_sum(self.queue.value)}


class Moco(NearestNeighbours):
    """A slow copy makes the keys; its queue is read after the batch has joined it."""

    def __init__(self):
        super().__init__()
        self.slow = net(6, 8, 4)
        self.slow.trainable = False
        self.slow.set_weights(self.body.get_weights())

    def train_step(self, data):
        x, y = data
        for slow, fast in zip(self.slow.weights, self.body.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        keys = unit(self.slow(x + 0.1))
        self.queue.assign(tf.concat([keys, self.queue.value], axis=0)[:16])

        def loss():
            found = tf.matmul(unit(self.body(x)), self.queue.value, transpose_b=True) / 0.2
            return cross_entropy(tf.range(tf.shape(x)[0]), found)

        return {"objective": self.learn(loss), "queue": tf.reduce_mean(self.queue.value)}


class Clip(Learner):
    """Pictures and captions find each other, with a temperature that is learned."""

    def __init__(self):
        super().__init__(
            pictures=net(6, 8, 4),
            captions=keras.Sequential(
                [
                    keras.Input((5,), dtype="int32"),
                    layers.Embedding(9, 4, mask_zero=True),
                    layers.GlobalAveragePooling1D(),
                ]
            ),
        )
        self.temperature = self.add_weight(shape=(), initializer="ones")

    def objective(self, x, y):
        left, right = unit(self.pictures(x["picture"])), unit(self.captions(x["caption"]))
        logits = tf.exp(self.temperature) * tf.matmul(left, right, transpose_b=True)
        labels = tf.range(tf.shape(logits)[0])
        turned = cross_entropy(labels, tf.transpose(logits))
        return 0.5 * (cross_entropy(labels, logits) + turned)


def captions():
    words = np.random.default_rng(2).integers(0, 9, (ROWS, 5)).astype("int32")
    words[:, 0] = 1
    return {"picture": draws(ROWS, 6), "caption": words}, None, None


class Towers(Learner):
    """Retrieval: what others of the batch have bought are the wrong answers, less if popular."""

    def objective(self, x, y):
        users, items = self.body(x), tf.gather(self.items.value, y)
        logits = tf.matmul(users, items, transpose_b=True)
        counts = tf.math.unsorted_segment_sum(tf.ones_like(y, "float32"), y, 3)
        popular = tf.gather(counts, y) / tf.cast(tf.size(y), "float32")
        same = tf.cast(y[:, None] == y[None, :], "float32") - tf.eye(tf.size(y))
        logits = logits - tf.math.log(popular)[None, :] - 1e9 * same
        return cross_entropy(tf.range(tf.size(y)), logits)

    def __init__(self):
        super().__init__(body=net(6, 4))
        self.items = self.add_weight(shape=(3, 4), initializer="random_normal")


class Barlow(Learner):
    """The correlation of two views' features over the batch is to be the identity."""

    def objective(self, x, y):
        left, right = self.body(x + 0.1), self.body(x * 0.9)
        rows = tf.cast(tf.shape(x)[0], "float32")

        def normal(z):
            return (z - tf.reduce_mean(z, 0)) / (tf.math.reduce_std(z, 0) + 1e-2)

        cross = tf.matmul(normal(left), normal(right), transpose_a=True) / rows
        return tf.reduce_sum((cross - tf.eye(4)) ** 2)


class Triplets(Learner):
    """The hardest positive and the hardest negative of each row."""

    def objective(self, x, y):
        rows = unit(self.body(x))
        apart = 2.0 - 2.0 * tf.matmul(rows, rows, transpose_b=True)
        same = y[:, None] == y[None, :]
        positive = tf.reduce_max(tf.where(same, apart, 0.0), axis=1)
        negative = tf.reduce_min(tf.where(same, 9.0, apart), axis=1)
        return tf.reduce_mean(tf.nn.relu(positive - negative + 0.5))


class Anchors(Learner):
    """Metric learning: a batch is two pictures of each class, (2, classes, ...)."""

    def objective(self, x, y):
        anchors, positives = unit(self.body(x[0])), unit(self.body(x[1]))
        similar = tf.einsum("ae,pe->ap", anchors, positives) / 0.2
        return cross_entropy(tf.range(tf.shape(similar)[0]), similar)


class Moments(Learner):
    """The distance of two samples by a kernel: MMD."""

    def objective(self, x, y):
        rows, others = self.body(x), tf.repeat(y, 3, axis=1)

        def kernel(a, b):
            return tf.reduce_mean(tf.exp(-tf.reduce_sum((a[:, None] - b[None]) ** 2, -1)))

        return kernel(rows, rows) + kernel(others, others) - 2.0 * kernel(rows, others)


# Random draws of the step's own.


class Diffusion(Learner):
    """DDIM: noise of a random strength is to be found; a slow copy follows the network."""

    def __init__(self):
        super().__init__(body=net(7, 8, 6), slow=net(7, 8, 6), normal=layers.Normalization())
        self.normal.adapt(draws(30, 6, seed=5) * 2.0 + 1.0)
        self.slow.set_weights(self.body.get_weights())
        self.noise = keras.random.SeedGenerator(11)

    @property
    def trainable_weights(self):
        return self.body.trainable_weights

    def objective(self, x, y):
        rows = tf.shape(x)[0]
        noise = keras.random.normal((rows, 6), seed=self.noise)
        angle = keras.random.uniform((rows, 1), 0.1, 1.4, seed=self.noise)
        mixed = tf.cos(angle) * self.normal(x) + tf.sin(angle) * noise
        found = self.body(tf.concat([mixed, tf.sin(angle) ** 2], axis=1), training=True)
        return tf.reduce_mean(tf.abs(noise - found))

    def after(self, x, y):
        for slow, fast in zip(self.slow.weights, self.body.weights, strict=True):
            slow.assign(0.99 * slow + 0.01 * fast)
        return {"slow": tf.add_n([tf.reduce_sum(w) for w in self.slow.weights])}


class Gan(Learner):
    """Two networks with an optimizer each, a `compile` of its own, noise, and noisy labels."""

    def __init__(self):
        super().__init__(maker=net(3, 6, 6), judge=net(6, 6, 1))
        self.noise = keras.random.SeedGenerator(7)
        self.tracker = keras.metrics.Mean(name="judged")

    @property
    def metrics(self):
        return [self.tracker]

    def compile(self, judges, makes, loss, **options):
        super().compile(**options)
        self.judges, self.makes, self.loss_fn = judges, makes, loss

    def train_step(self, data):
        real, _ = data
        rows = ops.shape(real)[0]
        made_up = self.maker(keras.random.normal((rows, 3), seed=self.noise))
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        labels += 0.05 * keras.random.uniform(ops.shape(labels), seed=self.noise)
        both = ops.concatenate([made_up, real], axis=0)
        judged = self.learn(
            lambda: self.loss_fn(labels, self.judge(both)),
            self.judge.trainable_weights,
            self.judges,
        )
        latent = keras.random.normal((rows, 3), seed=self.noise)
        cheated = self.learn(
            lambda: self.loss_fn(ops.zeros((rows, 1)), self.judge(self.maker(latent))),
            self.maker.trainable_weights,
            self.makes,
        )
        self.tracker.update_state(judged)
        return {"judged": self.tracker.result(), "cheated": cheated}


def adversaries():
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    rates = keras.optimizers.Adam(0.02), keras.optimizers.Adam(0.01)
    return {"judges": rates[0], "makes": rates[1], "loss": loss, "jit_compile": False}


class Sampling(layers.Layer):
    """Draws around a mean, and adds the divergence to the model's loss."""

    def __init__(self):
        super().__init__()
        self.noise = keras.random.SeedGenerator(3)

    def call(self, inputs):
        mean, spread = inputs
        noise = keras.random.normal(ops.shape(mean), seed=self.noise)
        divergence = 1 + spread - ops.square(mean) - ops.exp(spread)
        self.add_loss(-0.5 * ops.mean(ops.sum(divergence, axis=1)))
        return mean + ops.exp(0.5 * spread) * noise


def autoencoder():
    x = keras.Input((6,))
    hidden = layers.Dense(5, activation="tanh")(x)
    drawn = Sampling()([layers.Dense(2)(hidden), layers.Dense(2)(hidden)])
    return keras.Model(x, layers.Dense(1)(drawn))


class Codebook(layers.Layer):
    """VQ-VAE: each row becomes the code next to it, through which the gradient passes."""

    def build(self, shape):
        self.codes = self.add_weight(shape=(4, shape[-1]), initializer="random_normal")

    def call(self, x):
        apart = ops.sum(x**2, 1, keepdims=True) + ops.sum(self.codes**2, 1)
        apart -= 2 * ops.matmul(x, ops.transpose(self.codes))
        chosen = ops.one_hot(ops.argmin(apart, axis=1), 4)
        near = ops.matmul(chosen, self.codes)
        self.add_loss(0.25 * ops.mean((ops.stop_gradient(near) - x) ** 2))
        self.add_loss(ops.mean((near - ops.stop_gradient(x)) ** 2))
        return x + ops.stop_gradient(near - x)


class DropPath(layers.Layer):
    """Stochastic depth: leaves a row's branch out."""

    def __init__(self, branch):
        super().__init__()
        self.branch, self.noise = branch, keras.random.SeedGenerator(5)

    def call(self, x, training=None):
        kept = keras.random.uniform((ops.shape(x)[0], 1), seed=self.noise)
        return x + self.branch(x) * ops.floor(0.7 + kept) / 0.7


class Mixup(Learner):
    """Each row is mixed with another one, by a share of its own."""

    def __init__(self):
        super().__init__(body=net(6, 8, 3))
        self.noise = keras.random.SeedGenerator(9)

    def objective(self, x, y):
        rows = tf.shape(x)[0]
        order = keras.random.shuffle(tf.range(rows), seed=self.noise)
        share = keras.random.beta((rows, 1), 0.4, 0.4, seed=self.noise)
        labels = tf.one_hot(y, 3)
        mixed = share * x + (1 - share) * tf.gather(x, order)
        wanted = share * labels + (1 - share) * tf.gather(labels, order)
        found = self.body(mixed, training=True)
        return tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(wanted, found))


# Other ways to get and to use gradients.


class Sharpness(Learner):
    """SAM: the gradient where the loss is worst nearby, back from where the step begins."""

    def train_step(self, data):
        x, y = data

        def loss():
            return tf.reduce_mean((self.body(x, training=True) - y) ** 2)

        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            first = loss()
        gradients = tape.gradient(first, weights)
        norm = tf.linalg.global_norm(gradients)
        moves = [0.05 * gradient / (norm + 1e-6) for gradient in gradients]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        with tf.GradientTape() as tape:
            second = loss()
        gradients = tape.gradient(second, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizer.apply(gradients, weights)
        return {"first": first, "second": second}


class Collected(Learner):
    """Gradients of two batches are added up before they are applied, as is their count of rows."""

    def __init__(self):
        super().__init__(body=net(6, 8, 1))
        self.sums = [
            self.add_weight(shape=w.shape, initializer="zeros", trainable=False)
            for w in self.body.trainable_weights
        ]
        self.rows = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((self.body(x) - y) ** 2)
        weights = self.body.trainable_weights
        for total, gradient in zip(self.sums, tape.gradient(loss, weights), strict=True):
            total.assign_add(gradient)
        self.rows.assign_add(tf.cast(tf.shape(x)[0], "float32"))

        def apply():
            means = [total / self.rows for total in self.sums]
            self.optimizer.apply(means, weights)
            for value in [*self.sums, self.rows]:
                value.assign(tf.zeros_like(value))

        tf.cond(self.rows > 7.0, apply, lambda: None)
        return {"objective": loss, "rows": self.rows.value}


class Adaptive(Learner):
    """AGC: each unit's gradient is held to a part of its weights' norm; all to a common norm."""

    def train_step(self, data):
        x, y = data

        def clipped(gradients):
            held = []
            for weight, gradient in zip(self.trainable_weights, gradients, strict=True):
                most = 0.05 * tf.maximum(tf.norm(weight, axis=0, keepdims=True), 1e-3)
                norm = tf.norm(gradient, axis=0, keepdims=True)
                held.append(tf.where(norm > most, gradient * most / (norm + 1e-6), gradient))
            return tf.clip_by_global_norm(held, 0.02)[0]

        loss = self.learn(lambda: tf.reduce_mean((self.body(x) - y) ** 2), change=clipped)
        return {"objective": loss}


class Private(Learner):
    """DP-SGD: the gradient of each row is clipped before they are added up."""

    def train_step(self, data):
        x, y = data
        weights = self.trainable_weights
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean((self.body(x) - y) ** 2, axis=1)
        each = tape.jacobian(losses, weights)
        squares = [tf.reduce_sum(g**2, list(range(1, len(g.shape)))) for g in each]
        scale = tf.minimum(1.0, 0.5 * tf.math.rsqrt(tf.add_n(squares) + 1e-9))
        means = [
            tf.reduce_mean(g * tf.reshape(scale, [-1] + [1] * (len(g.shape) - 1)), 0) for g in each
        ]
        self.optimizer.apply(means, weights)
        return {"objective": tf.reduce_mean(losses)}


class Physics(Learner):
    """PINN: a loss of second derivatives by the inputs."""

    def objective(self, x, y):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                u = self.body(x)
            slope = inner.gradient(u, x)
        curve = outer.batch_jacobian(slope, x)
        residual = tf.linalg.trace(curve)[:, None] + u - y
        return tf.reduce_mean(residual**2)


class Teacher(Learner):
    """Mean teacher: labelled rows, and rows of which only a sure guess counts."""

    def __init__(self):
        super().__init__(body=net(6, 8, 3), slow=net(6, 8, 3))
        self.slow.trainable = False

    def objective(self, x, y):
        sure = tf.nn.softmax(self.slow(x) * 20.0)
        mask = tf.cast(tf.reduce_max(sure, axis=1) > 0.6, "float32")
        both = self.body(tf.concat([x, x + 0.1], axis=0), training=True)
        known, guessed = tf.split(both, 2, axis=0)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(sure, 1), guessed)
        part = tf.reduce_sum(mask * losses) / tf.maximum(tf.reduce_sum(mask), 1.0)
        return cross_entropy(y, known) + part

    after = Diffusion.after


# Rows by their places and their number.


class Places(Learner):
    """Later rows count more, every other one is left out, and neighbours are to be alike."""

    def objective(self, x, y):
        losses = tf.reduce_mean((self.body(x) - y) ** 2, axis=1)
        rows = tf.shape(x)[0]
        weights = tf.cast(tf.range(rows), "float32") / tf.cast(rows, "float32")
        even = tf.cast(tf.range(rows) % 2 == 0, "float32")
        near = tf.reduce_sum((x - tf.roll(x, 1, axis=0)) ** 2, axis=1)
        return tf.reduce_sum(weights * even * losses) + 0.01 * tf.reduce_sum(near * losses)


class Count(Learner):
    """The number of rows decides, in a branch and in a loop."""

    def objective(self, x, y):
        losses = tf.reduce_mean((self.body(x) - y) ** 2, axis=1)
        rows = tf.shape(x)[0]
        factor = tf.cond(rows > 3, lambda: tf.math.log(tf.cast(rows, "float32")), lambda: 2.0)
        _, total = tf.while_loop(
            lambda i, _: i < rows, lambda i, t: (i + 1, t + losses[i] / (1.0 + t**2)), [0, 0.0]
        )
        return factor * tf.reduce_mean(losses) + 0.1 * total


class OneByOne(Learner):
    """A function of one row, mapped over all."""

    def objective(self, x, y):
        found = self.body(x)
        each = tf.map_fn(
            lambda pair: tf.norm(pair[0] - pair[1]), (found, y), fn_output_signature="float32"
        )
        also = tf.vectorized_map(
            lambda row: tf.linalg.logdet(tf.eye(2) + row[:2, None] * row[None, :2]), x
        )
        return tf.reduce_mean(each * (1.0 + also))


class Graph(Learner):
    """Nodes along the batch's axis exchange messages along edges, by their numbers."""

    def objective(self, x, y):
        rows = tf.shape(x)[0]
        sources = tf.range(rows)
        targets = (sources * 3 + 1) % rows
        hidden = self.body(x)
        messages = tf.gather(hidden, sources) - tf.gather(hidden, targets)
        summed = tf.math.unsorted_segment_sum(messages, targets, rows)
        return tf.reduce_mean((summed + hidden - y) ** 2)


class Positives(Learner):
    """RetinaNet: a focal sum, divided by how many of the batch are positive."""

    def objective(self, x, y):
        logits = self.body(x)
        wanted = tf.one_hot(y - 1, 2)
        losses = tf.nn.sigmoid_cross_entropy_with_logits(wanted, logits)
        sure = tf.where(wanted > 0, tf.sigmoid(logits), 1 - tf.sigmoid(logits))
        count = tf.maximum(1.0, tf.reduce_sum(tf.cast(y > 0, "float32")))
        return tf.reduce_sum((1 - sure) ** 2 * losses) / count


# Layers.


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
    """Sentences of unequal length."""

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


def barlow():
    # A last bias would have no gradient but what is rounded, for features are normalised.
    body = [layers.Dense(8, activation="tanh"), layers.Dense(4, use_bias=False)]
    return Barlow(body=keras.Sequential([keras.Input((6,)), *body]))


def contrast(kind):
    def make():
        augment = keras.Sequential([layers.GaussianNoise(0.2, seed=3), layers.Dropout(0.2, seed=4)])
        return kind(augment=augment, body=net(6, 8, 4))

    return make


@dataclasses.dataclass(frozen=True)
class Published(Case):
    """A published step.

    Args:
        gathers: The types of operations for which rows are gathered.
        alone: Whether one replica takes the whole batch.
    """

    model: Callable[[], keras.Model] = made.mlp
    batch_size: int = BATCH
    fit: Callable[[Any], dict[str, Any]] = lambda directory: {"epochs": 1}
    after: tuple[str, ...] = ()
    gathers: frozenset[str] = frozenset()
    alone: bool = False


def own(name, model, data=ROWS_OF_SIX, gathers="", **more):
    """A row for a `train_step` of its own, with an optimizer alone."""
    compiled = more.pop("compile", lambda: {"optimizer": sgd(), "jit_compile": False})
    return Published(name, model, compiled, data, gathers=frozenset(gathers.split()), **more)


def sgd():
    return keras.optimizers.SGD(0.05, momentum=0.9)


def usual(loss="mse", **options):
    return lambda: {"optimizer": sgd(), "loss": loss, "jit_compile": False, **options}


def layered(name, model, data=ROWS_OF_SIX, gathers="", loss="mse", **options):
    """A row for Keras's own step."""
    alone = options.pop("alone", False)
    return own(name, model, data, gathers, compile=usual(loss, **options), alone=alone)


LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

PUBLISHED = [
    own("SimCLR", contrast(SimClr), gathers="MatMul"),
    own("SupCon", contrast(SupervisedContrast), classes(), gathers="Equal MatMul"),
    own("NNCLR", NearestNeighbours, gathers="ConcatV2 MatMul"),
    own("MoCo", Moco, gathers="ConcatV2"),
    own("CLIP", Clip, captions, gathers="MatMul SparseSoftmaxCrossEntropyWithLogits"),
    own("two towers", Towers, classes(), gathers="Equal MatMul Sub"),
    own("Barlow Twins", barlow),
    own("triplets", of_body(Triplets, 8, 4), classes(), gathers="Equal MatMul"),
    own(
        "metric learning",
        of_body(Anchors, 8, 4),
        lambda: (draws(6, 5, 6), np.zeros((6, 1), "float32"), None),
        batch_size=2,
        gathers="StridedSlice",
    ),
    own("MMD", of_body(Moments, 8, 3), gathers="Sub"),
    own("DDIM", Diffusion),
    own("GAN", Gan, compile=adversaries),
    layered("VAE", autoencoder),
    layered("VQ-VAE", sequential(lambda: layers.Dense(3), Codebook)),
    layered("stochastic depth", sequential(lambda: DropPath(layers.Dense(6)))),
    own("mixup", Mixup, classes(), gathers="GatherV2"),
    own("SAM", of_body(Sharpness, 8, 1)),
    own("gradient accumulation", Collected),
    own("clipping by unit", of_body(Adaptive, 8, 1)),
    own("gradients of each row", of_body(Private, 4, 1), gathers="Reshape Transpose"),
    own("second derivatives", of_body(Physics, 4, 1)),
    own("mean teacher", Teacher, classes()),
    own("places of rows", of_body(Places, 8, 1), gathers="Roll"),
    own("number of rows", of_body(Count, 8, 1), gathers="StatelessWhile"),
    own("mapped functions", of_body(OneByOne, 4, 1), gathers="TensorListFromTensor"),
    own("graph", of_body(Graph, 4, 1), gathers="GatherV2"),
    own("focal sum", of_body(Positives, 4, 2), classes()),
    layered("experts with capacity", sequential(Router), gathers="Cumsum"),
    own("CTC by add_loss", listener, sounds),
    layered("remat", Rematerialized, gathers="StridedSlice"),
    layered("masks", reader, lambda: made.words(ROWS)),
    layered("strings", speller, colors),
    layered("texts", text_reader, texts, alone=True),
    layered("ragged", Ragged, sentences, gathers="GatherV2"),
    layered("sparse", sparse_net, sparse, gathers="Sub"),
    layered("along the batch", sequential(AlongTheBatch), gathers="Softmax"),
    layered("augmentation in the model", augmented, pictures(), loss=LOGITS),
    layered("losses of a list", listed(ListedLosses), two_targets, loss=["mse", "bce"]),
    layered("losses of a list in a step", listed(ListedInStep), two_targets, loss=["mse", "bce"]),
]
BY_NAME = {case.name: case for case in PUBLISHED}
