"""Steps that draw: diffusion, adversaries, codebooks, mixtures."""

import keras
import tensorflow as tf
from keras import layers, ops

from published.learner import Learner, draws, net


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
