"""Steps that keep something from step to step, or need all rows at once."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from published.learner import ROWS, Learner, draws, net


class Queue(Learner):
    """A queue that is written in slices, counts at places, and noise of a generator's."""

    def __init__(self):
        super().__init__(body=net(6, 8, 4))
        self.queue, self.place = tf.Variable(draws(8, 4, seed=5)), tf.Variable(0)
        self.table, self.counts = tf.Variable(draws(3, 3, seed=6)), tf.Variable(tf.zeros((3,)))
        self.noise = tf.random.Generator.from_seed(5)

    def objective(self, x, y):
        keys = self.body(x + 0.1 * self.noise.normal(tf.shape(x)))
        chosen = tf.gather_nd(self.table, tf.stack([y, (y + 1) % 3], axis=1))
        self.keys = keys
        return tf.reduce_mean(tf.reduce_logsumexp(keys @ tf.transpose(self.queue), 1) - chosen)

    def after(self, x, y):
        count = tf.minimum(tf.shape(x)[0], 8 - self.place)
        self.queue[self.place : self.place + count].assign(self.keys[:count])
        self.place.assign((self.place + count) % 8)
        self.counts.scatter_nd_add(y[:, None], tf.ones_like(self.keys[:, 0]))
        kept = tf.reduce_sum(self.queue**2), tf.reduce_sum(self.counts**2)
        return {"queue": kept[0], "counts": kept[1], "state": self.noise.state[0] % 65536}


class Novelty(Learner):
    """Reinforcement: what was seen seldom counts more, by a table of visits."""

    def __init__(self):
        super().__init__(body=net(6, 8, 1))
        self.visits = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)

    def objective(self, x, y):
        kinds, _, counts = tf.unique_with_counts(y)
        before = self.visits.lookup(y)
        self.visits.insert(kinds, self.visits.lookup(kinds) + tf.cast(counts, tf.float32))
        wanted = tf.math.rsqrt(self.visits.lookup(y)) + 0.1 * before
        return tf.reduce_mean((self.body(x)[:, 0] - wanted) ** 2)


class Process(Learner):
    """A Gaussian process: the likelihood of all targets together."""

    def __init__(self):
        # A last bias would have no gradient but what is rounded, for only differences count.
        body = [layers.Dense(8, activation="tanh"), layers.Dense(4, use_bias=False)]
        super().__init__(body=keras.Sequential([keras.Input((6,)), *body]))

    def objective(self, x, y):
        rows = self.body(x)
        apart = tf.reduce_sum((rows[:, None] - rows[None]) ** 2, -1)
        root = tf.linalg.cholesky(tf.exp(-0.5 * apart) + 0.1 * tf.eye(tf.shape(x)[0]))
        fit = tf.reduce_sum(y * tf.linalg.cholesky_solve(root, y))
        return 0.5 * fit + tf.reduce_sum(tf.math.log(tf.linalg.diag_part(root)))


class Survival(Learner):
    """Cox: who lived longest is at risk with all others."""

    def objective(self, x, y):
        order = tf.argsort(y[:, 0], direction="DESCENDING")
        risk, event = tf.gather(self.body(x)[:, 0], order), tf.gather(y[:, 1], order)
        return tf.reduce_mean(
            (tf.math.cumulative_logsumexp(risk) - risk) * tf.cast(event > 0, "float32")
        )


def lives():
    events = np.random.default_rng(4).uniform(size=(ROWS, 1)) > 0.4
    return draws(ROWS, 6), np.concatenate([draws(ROWS, 1, seed=3), events], 1), None
