"""Steps that compare each row with the others of the batch."""

import tensorflow as tf

from published.learner import Learner, cross_entropy, net, unit


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


class Moco(Learner):
    """A slow copy makes the keys; a queue is read after the batch has joined it."""

    def __init__(self):
        super().__init__(body=net(6, 8, 4))
        self.queue = self.add_weight(shape=(16, 4), initializer="random_normal", trainable=False)
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
