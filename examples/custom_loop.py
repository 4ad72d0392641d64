"""Train with a loop of your own, whose step is written for one device.

    python examples/custom_loop.py                  # all GPUs, or one CPU
    python examples/custom_loop.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse

import keras
import tensorflow as tf

import keras_multigpu as kmg


def load():
    """The digits as `(images, labels)`."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8, 1).astype("float32") / 16, labels.astype("int32")


def build_model():
    """A small classifier."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(10),
        ]
    )


def main(epochs=10, replicas=None):
    """Train; returns the accuracy of the last epoch."""
    images, labels = load()
    # --8<-- [start:loop]
    kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    model = build_model()
    optimizer = keras.optimizers.Adam(0.005)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    accuracy = keras.metrics.SparseCategoricalAccuracy()

    @kmg.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = loss_fn(y, logits)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, logits)
        return loss

    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(2000).batch(64)
    for epoch in range(epochs):
        accuracy.reset_state()
        for x, y in dataset:
            loss = train_step(x, y)
        print(f"epoch {epoch + 1}: loss {loss:.3f}, accuracy {accuracy.result():.1%}")
    # --8<-- [end:loop]
    return float(accuracy.result())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    options = parser.parse_args()
    main(options.epochs, options.replicas)
