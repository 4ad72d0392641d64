"""Models whose steps follow the recipes of keras.io, small, and with data in place of noise."""

import keras
import tensorflow as tf
from keras import layers, ops

from exactness import models as made


def dense(units, width):
    return keras.Sequential(
        [keras.Input((width,)), layers.Dense(4, activation="tanh"), layers.Dense(units)]
    )


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


class Spread(LossObject):
    """A mean of values with another mean inside, of which the gradient goes through both."""

    def of(self, x, y, y_pred):
        spread = tf.reduce_mean(tf.square(y_pred - tf.reduce_mean(y_pred)))
        return ops.mean(ops.square(y - y_pred)) + tf.square(spread - 1.0)


class Accumulating(LossObject):
    """Gradients of two batches, added up by hand and applied in a branch."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body.build((None, 5))
        self.head.build((None, 4))
        self.sums = [
            self.add_weight(shape=w.shape, initializer="zeros", trainable=False)
            for w in self.trainable_weights
        ]
        self.count = self.add_weight(shape=(), initializer="zeros", dtype="int32", trainable=False)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.of(x, y, y_pred)
        for total, gradient in zip(self.sums, self.gradients(tape, loss), strict=True):
            total.assign_add(gradient)
        self.count.assign_add(1)
        tf.cond(self.count % 2 == 0, self.update, lambda: None)
        return self.logs(loss, y, y_pred)

    def update(self):
        self.optimizer.apply([total / 2 for total in self.sums], self.trainable_weights)
        for total in self.sums:
            total.assign(ops.zeros_like(total))


class Autoencoder(keras.Model):
    """The VAE; a part of the data stands in for its noise."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.encoder, self.decoder = dense(2, 5), dense(5, 1)
        self.total = keras.metrics.Mean(name="loss")
        self.divergence = keras.metrics.Mean(name="kl_loss")
        self.build((None, 5))

    @property
    def metrics(self):
        return [self.total, self.divergence]

    def call(self, x):
        return self.decoder(self.encoder(x)[:, :1])[:, :1]

    def train_step(self, data):
        x, noise = data
        with tf.GradientTape() as tape:
            mean, log_var = ops.split(self.encoder(x), 2, axis=1)
            rebuilt = self.decoder(mean + ops.exp(0.5 * log_var) * noise)
            loss = ops.mean(ops.sum(ops.square(x - rebuilt), axis=1))
            kl = -0.5 * (1 + log_var - ops.square(mean) - ops.exp(log_var))
            kl = ops.mean(ops.sum(kl, axis=1))
            loss = loss + kl
        self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
        self.total.update_state(loss)
        self.divergence.update_state(kl)
        return {"loss": self.total.result(), "kl_loss": self.divergence.result()}

    def test_step(self, data):
        return {"loss": ops.mean(ops.square(data[1] - self(data[0])))}


class Gan(keras.Model):
    """The GAN: one batch of real and generated rows, twice as long, and two loss trackers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator, self.discriminator = dense(1, 5), dense(1, 1)
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
        self.d_optimizer = keras.optimizers.Adam(0.02)
        self.d_loss = keras.metrics.Mean(name="d_loss")
        self.g_loss = keras.metrics.Mean(name="g_loss")
        self.add_networks()
        self.build((None, 5))

    def add_networks(self):
        """More of them, before the model is built."""

    @property
    def metrics(self):
        return [self.d_loss, self.g_loss]

    def call(self, x):
        return self.discriminator(self.generator(x))

    def train_step(self, data):
        x, real = data
        rows = ops.shape(real)[0]
        both = ops.concatenate([self.generator(x), real], axis=0)
        labels = ops.concatenate([ops.ones((rows, 1)), ops.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply_gradients(zip(tape.gradient(d_loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(ops.zeros((rows, 1)), self(x))
        weights = self.generator.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(g_loss, weights), weights, strict=True))
        return self.logs(d_loss, g_loss)

    def test_step(self, data):
        loss = self.loss_fn(ops.ones_like(data[1]), self(data[0]))
        return self.logs(loss, 2 * loss)

    def logs(self, d_loss, g_loss):
        self.d_loss.update_state(d_loss)
        self.g_loss.update_state(g_loss)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}


class Wgan(Gan):
    """The WGAN-GP: several updates of the critic in a step, and a penalty on its gradient."""

    def add_networks(self):
        # One of the gradients is almost zero, mostly rounding, which Adam would make large.
        self.d_optimizer = keras.optimizers.Adam(0.02, epsilon=1e-3)

    def train_step(self, data):
        x, real = data
        for _ in range(2):
            with tf.GradientTape() as tape:
                fake = self.generator(x)
                d_loss = tf.reduce_mean(self.discriminator(fake))
                d_loss -= tf.reduce_mean(self.discriminator(real))
                d_loss += 0.5 * self.penalty(x[:, :1], real, fake)
            weights = self.discriminator.trainable_weights
            self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = -tf.reduce_mean(self(x))
        weights = self.generator.trainable_weights
        self.optimizer.apply(tape.gradient(g_loss, weights), weights)
        return self.logs(d_loss, g_loss)

    def penalty(self, alpha, real, fake):
        between = real + alpha * (fake - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = self.discriminator(between)
        slope = tape.gradient(score, [between])[0]
        norm = tf.sqrt(tf.reduce_sum(tf.square(slope), axis=[1]) + 1e-6)
        return tf.reduce_mean((norm - 1.0) ** 2)


class Cycle(Gan):
    """The CycleGAN: several losses and optimizers, one persistent tape."""

    def add_networks(self):
        self.back = dense(5, 1)
        self.back_optimizer = keras.optimizers.Adam(0.02)
        self.cycle_fn = keras.losses.MeanAbsoluteError()

    def train_step(self, data):
        x, real = data
        with tf.GradientTape(persistent=True) as tape:
            fake = self.generator(x)
            cycled = self.cycle_fn(x, self.back(fake)) * 10.0
            g_loss = self.loss_fn(ops.zeros_like(real), self.discriminator(fake)) + cycled
            d_loss = self.loss_fn(ops.zeros_like(real), self.discriminator(real))
            d_loss += self.loss_fn(ops.ones_like(real), self.discriminator(fake))
            d_loss *= 0.5
        for loss, part, optimizer in (
            (g_loss, self.generator, self.optimizer),
            (g_loss, self.back, self.back_optimizer),
            (d_loss, self.discriminator, self.d_optimizer),
        ):
            weights = part.trainable_weights
            optimizer.apply(tape.gradient(loss, weights), weights)
        return self.logs(d_loss, g_loss)
