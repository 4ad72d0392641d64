"""Train a GAN: two models, two optimizers, and one step that is written for one device.

    python examples/gan.py                  # all GPUs, or one CPU
    python examples/gan.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import keras_multigpu as kmg


def load():
    """The images of the digits."""
    from sklearn import datasets

    images, _ = datasets.load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8, 1).astype("float32") / 16


LATENT = 16


def build_generator():
    """Makes images out of noise."""
    return keras.Sequential(
        [
            keras.Input((LATENT,)),
            layers.Dense(4 * 4 * 32, activation="relu"),
            layers.Reshape((4, 4, 32)),
            layers.Conv2DTranspose(32, 4, strides=2, padding="same", activation="relu"),
            layers.Conv2D(1, 3, padding="same", activation="sigmoid"),
        ]
    )


def build_discriminator():
    """Distinguishes real images from generated ones."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(32, 3, strides=2, padding="same", activation="leaky_relu"),
            layers.Dropout(0.3),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )


def distance(made, real):
    """How far the pixels of made images are from those of real ones, in mean and deviation."""
    return np.abs(made.mean(0) - real.mean(0)).mean() + np.abs(made.std(0) - real.std(0)).mean()


def main(epochs=30, replicas=None):
    """Train; returns how much of the distance to the real images has gone."""
    images = load()
    # --8<-- [start:loop]
    kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    generator, discriminator = build_generator(), build_discriminator()
    for_generator, for_discriminator = (keras.optimizers.Adam(3e-3, beta_1=0.5) for _ in range(2))
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)
    seeds = keras.random.SeedGenerator(1)

    @kmg.function
    def train_step(real):
        noise = keras.random.normal((tf.shape(real)[0], LATENT), seed=seeds)
        with tf.GradientTape() as of_generator, tf.GradientTape() as of_discriminator:
            made = generator(noise, training=True)
            on_real = discriminator(real, training=True)
            on_made = discriminator(made, training=True)
            fools = entropy(tf.ones_like(on_made), on_made)
            tells = entropy(tf.ones_like(on_real), on_real)
            tells += entropy(tf.zeros_like(on_made), on_made)
        gradients = of_generator.gradient(fools, generator.trainable_variables)
        for_generator.apply(gradients, generator.trainable_variables)
        gradients = of_discriminator.gradient(tells, discriminator.trainable_variables)
        for_discriminator.apply(gradients, discriminator.trainable_variables)
        return {"generator": fools, "discriminator": tells}

    noise = keras.random.normal((500, LATENT), seed=2)
    before = distance(generator.predict(noise, verbose=0), images)
    dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(2000).batch(64)
    for epoch in range(epochs):
        for real in dataset:
            losses = train_step(real)
        print(f"epoch {epoch + 1}:", {name: f"{loss:.3f}" for name, loss in losses.items()})
    # --8<-- [end:loop]
    return float(1 - distance(generator.predict(noise, verbose=0), images) / before)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    options = parser.parse_args()
    main(options.epochs, options.replicas)
