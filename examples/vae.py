"""Train a variational autoencoder in a loop of your own.

    python examples/vae.py                  # all GPUs, or one CPU
    python examples/vae.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse

import keras
import tensorflow as tf
from keras import layers, ops

import keras_multigpu as kmg


def load():
    """The images of the digits."""
    from sklearn import datasets

    images, _ = datasets.load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8, 1).astype("float32") / 16


LATENT = 8


def build_encoder():
    """The mean and the logarithm of the variance of an image's code."""
    images = keras.Input((8, 8, 1))
    x = layers.Dense(64, activation="relu")(layers.Flatten()(images))
    return keras.Model(images, [layers.Dense(LATENT)(x), layers.Dense(LATENT)(x)])


def build_decoder():
    """An image of a code."""
    codes = keras.Input((LATENT,))
    x = layers.Dense(64, activation="relu")(codes)
    return keras.Model(codes, layers.Reshape((8, 8, 1))(layers.Dense(64, activation="sigmoid")(x)))


def main(epochs=30, replicas=None):
    """Train; returns which part of the images' variance is met."""
    images = load()
    # --8<-- [start:loop]
    kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    encoder, decoder = build_encoder(), build_decoder()
    optimizer = keras.optimizers.Adam(3e-3)
    seeds = keras.random.SeedGenerator(1)
    tracked = keras.metrics.Mean()

    @kmg.function
    def train_step(x):
        with tf.GradientTape() as tape:
            mean, log_var = encoder(x, training=True)
            noise = keras.random.normal(ops.shape(mean), seed=seeds)
            again = decoder(mean + ops.exp(0.5 * log_var) * noise, training=True)
            error = ops.mean(ops.sum(ops.square(x - again), axis=(1, 2, 3)))
            kl = -0.5 * ops.mean(ops.sum(1 + log_var - ops.square(mean) - ops.exp(log_var), axis=1))
            loss = error + 0.1 * kl
        weights = encoder.trainable_variables + decoder.trainable_variables
        optimizer.apply(tape.gradient(loss, weights), weights)
        tracked.update_state(loss)
        return error, kl

    dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(2000).batch(64)
    for epoch in range(epochs):
        tracked.reset_state()
        for x in dataset:
            error, kl = train_step(x)
        print(f"epoch {epoch + 1}: loss {tracked.result():.2f}, error {error:.2f}, KL {kl:.2f}")
    # --8<-- [end:loop]
    mean, _ = encoder.predict(images, verbose=0)
    rest = images - decoder.predict(mean, verbose=0)
    return float(1 - rest.var() / (images - images.mean(axis=0)).var())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    options = parser.parse_args()
    main(options.epochs, options.replicas)
