"""Models whose steps follow those that people publish, each in a few lines, and small."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from exactness import models as made


class LossObject(made.Subclassed):
    """A loss object, fed to a `Mean`; a metric of one's own: the guide to custom steps."""

    def __init__(self, loss=None, **kwargs):
        super().__init__(**kwargs)
        self.loss_fn = loss or keras.losses.MeanSquaredError()
        self.tracker = keras.metrics.Mean(name="loss")
        self.error = keras.metrics.MeanAbsoluteError(name="mae")

    @property
    def metrics(self):
        return [self.tracker, self.error]

    def of(self, x, y, y_pred):
        return self.loss_fn(y, y_pred)

    def gradients(self, tape, loss):
        return tape.gradient(loss, self.trainable_weights)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.of(x, y, y_pred)
        self.optimizer.apply(self.gradients(tape, loss), self.trainable_weights)
        return self.logs(loss, y, y_pred)

    def test_step(self, data):
        x, y = data
        y_pred = self(x, training=False)
        return self.logs(self.of(x, y, y_pred), y, y_pred)

    def logs(self, loss, y, y_pred):
        self.tracker.update_state(loss)
        self.error.update_state(y, y_pred)
        return {"loss": self.tracker.result(), "mae": self.error.result()}


class Masked(LossObject):
    """Sums over a mask, penalties of weights, clipping by hand."""

    def of(self, x, y, y_pred):
        mask = ops.cast(x[:, :1] > -0.5, "float32")
        loss = ops.sum(mask * ops.square(y - y_pred)) / ops.sum(mask)
        penalty = tf.add_n([tf.nn.l2_loss(w) for w in self.trainable_weights])
        return loss + 0.01 * penalty + 0.01 * sum(ops.sum(ops.abs(w)) for w in self.weights[:2])

    def gradients(self, tape, loss):
        return tf.clip_by_global_norm(super().gradients(tape, loss), 0.3)[0]


def draws(*shape):
    return np.random.default_rng(5).normal(size=shape).astype("float32")


def net(width, *units):
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

    def learn(self, function, weights=None, optimizer=None):
        weights = self.trainable_weights if weights is None else weights
        with tf.GradientTape() as tape:
            loss = function()
        (optimizer or self.optimizer).apply(tape.gradient(loss, weights), weights)
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
        super().__init__(body=net(5, 8, 4))
        self.queue = self.add_weight(shape=(16, 4), initializer="random_normal", trainable=False)
        self.slow = net(5, 8, 4)
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


class Gan(Learner):
    """Two networks with an optimizer each, a `compile` of its own, noise, and noisy labels."""

    def __init__(self):
        super().__init__(maker=net(3, 6, 5), judge=net(5, 6, 1))
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


def adversaries(**judges):
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    rates = keras.optimizers.Adam(0.02, **judges), keras.optimizers.Adam(0.01)
    return {"judges": rates[0], "makes": rates[1], "loss": loss, "jit_compile": False}


class Wgan(Gan):
    """The WGAN-GP: the judge learns twice in a step, with a penalty on its gradient."""

    def train_step(self, data):
        real = data[0]

        def made_up():
            return self.maker(keras.random.normal((ops.shape(real)[0], 3), seed=self.noise))

        def judged():
            fake = made_up()
            apart = tf.reduce_mean(self.judge(fake)) - tf.reduce_mean(self.judge(real))
            return apart + 0.5 * self.penalty((real + fake) / 2)

        for _ in range(2):
            loss = self.learn(judged, self.judge.trainable_weights, self.judges)
        cheated = self.learn(
            lambda: -tf.reduce_mean(self.judge(made_up())), self.maker.trainable_weights, self.makes
        )
        self.tracker.update_state(loss)
        return {"judged": self.tracker.result(), "cheated": cheated}

    def penalty(self, between):
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.judge(between)
        slope = tape.gradient(score, between)
        return tf.reduce_mean((tf.sqrt(tf.reduce_sum(slope**2, axis=1) + 1e-6) - 1.0) ** 2)


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
    x = keras.Input((5,))
    hidden = layers.Dense(5, activation="tanh")(x)
    drawn = Sampling()([layers.Dense(2)(hidden), layers.Dense(2)(hidden)])
    return keras.Model(x, layers.Dense(1)(drawn))


class Collected(Learner):
    """Gradients of two batches are added up before they are applied, as is their count of rows."""

    def __init__(self):
        super().__init__(body=net(5, 8, 1))
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
        super().__init__(body=net(5, 8, 3), slow=net(5, 8, 3))
        self.slow.trainable = False

    def objective(self, x, y):
        sure = tf.nn.softmax(self.slow(x) * 20.0)
        mask = tf.cast(tf.reduce_max(sure, axis=1) > 0.6, "float32")
        both = self.body(tf.concat([x, x + 0.1], axis=0), training=True)
        known, guessed = tf.split(both, 2, axis=0)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.argmax(sure, 1), guessed)
        part = tf.reduce_sum(mask * losses) / tf.maximum(tf.reduce_sum(mask), 1.0)
        return cross_entropy(y, known) + part

    def after(self, x, y):
        for slow, fast in zip(self.slow.weights, self.body.weights, strict=True):
            slow.assign(0.99 * slow + 0.01 * fast)
        return {"slow": tf.add_n([tf.reduce_sum(w) for w in self.slow.weights])}


class Places(Learner):
    """Later rows count more, every other one is left out, and neighbours are to be alike."""

    def objective(self, x, y):
        losses = tf.reduce_mean((self.body(x) - y) ** 2, axis=1)
        rows = tf.shape(x)[0]
        weights = tf.cast(tf.range(rows), "float32") / tf.cast(rows, "float32")
        even = tf.cast(tf.range(rows) % 2 == 0, "float32")
        near = tf.reduce_sum((x - tf.roll(x, 1, axis=0)) ** 2, axis=1)
        return tf.reduce_sum(weights * even * losses) + 0.01 * tf.reduce_sum(near * losses)


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


class Queue(Learner):
    """A queue that is written in slices, counts at places, and noise of a generator's."""

    def __init__(self):
        super().__init__(body=net(5, 8, 4))
        self.queue, self.place = tf.Variable(draws(8, 4)), tf.Variable(0)
        self.table, self.counts = tf.Variable(draws(3, 3)), tf.Variable(tf.zeros((3,)))
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
    rows = [draw.integers(1, 9, length).tolist() for length in draw.integers(1, 6, 12)]
    return tf.ragged.constant(rows, dtype="int32"), made.regression(12)[1], None


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
    return lambda: kind(body=net(5, *units))


def sequential(*parts):
    return lambda: keras.Sequential(
        [keras.Input((5,)), *(make() for make in parts), layers.Dense(1)]
    )


def contrast(kind):
    def make():
        augment = keras.Sequential([layers.GaussianNoise(0.2, seed=3), layers.Dropout(0.2, seed=4)])
        return kind(augment=augment, body=net(5, 8, 4))

    return make
