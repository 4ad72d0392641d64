"""Contrastive learning as in SimCLR: each image is compared with all others of the batch.

    python examples/contrastive.py                  # all GPUs, or one CPU
    python examples/contrastive.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse

import keras
import tensorflow as tf
from keras import layers

import keras_multigpu as kmg


def load():
    """The digits as `(images, labels)`."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8, 1).astype("float32") / 16, labels.astype("int32")


def build_encoder():
    """The embedding of an image."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(32),
        ]
    )


def build_views():
    """What changes an image and leaves its digit."""
    return keras.Sequential(
        [layers.RandomTranslation(0.1, 0.1, seed=1), layers.GaussianNoise(0.1, seed=2)]
    )


def nearest_are_alike(rows, labels):
    """How often the row most like another has the same label."""
    rows = tf.math.l2_normalize(rows, axis=1)
    likeness = tf.linalg.set_diag(rows @ tf.transpose(rows), tf.fill([len(rows)], -1.0))
    found = labels[tf.argmax(likeness, axis=1).numpy()]
    return float((found == labels).mean())


def main(epochs=20, replicas=None):
    """Train without labels; returns how often the nearest embedding has the same label."""
    images, labels = load()
    # --8<-- [start:loop]
    kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    encoder, views = build_encoder(), build_views()
    optimizer = keras.optimizers.Adam(3e-3)

    @kmg.function
    def train_step(x):
        with tf.GradientTape() as tape:
            both = tf.concat([views(x, training=True), views(x, training=True)], axis=0)
            rows = tf.math.l2_normalize(encoder(both, training=True), axis=1)
            # Every row against the rows of the whole batch: these are gathered.
            logits = rows @ tf.transpose(rows) / 0.2
            logits -= 1e9 * tf.eye(tf.shape(rows)[0])
            size = tf.shape(x)[0]
            partners = tf.concat([tf.range(size) + size, tf.range(size)], axis=0)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(partners, logits))
        gradients = tape.gradient(loss, encoder.trainable_variables)
        optimizer.apply(gradients, encoder.trainable_variables)
        return loss

    dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(2000).batch(128)
    for epoch in range(epochs):
        for x in dataset:
            loss = train_step(x)
        print(f"epoch {epoch + 1}: loss {loss:.3f}")
    # --8<-- [end:loop]
    return nearest_are_alike(encoder.predict(images, verbose=0), labels)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    options = parser.parse_args()
    main(options.epochs, options.replicas)
