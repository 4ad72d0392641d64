"""Steps that compare each row with the others of the batch."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from published.learner import ROWS, Learner, cross_entropy, draws, net, unit


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
