"""Steps with ways of their own to get and to use gradients, or with rows by their places."""

import tensorflow as tf

from published.learner import Learner, cross_entropy, net
from published.random_draws import Diffusion


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
