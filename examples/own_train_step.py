"""Train with a `train_step` of your own, on images that were made harder to recognize.

    python examples/own_train_step.py                  # all GPUs, or one CPU
    python examples/own_train_step.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse

import keras
import tensorflow as tf
from keras import ops

import keras_multigpu as kmg

PUSH = 0.5  # How far an image moves, in the length of the vector of its 64 pixels.


# --8<-- [start:step]
class Sturdy(keras.Model):
    """A classifier that trains on images moved towards what it would get wrong."""

    def train_step(self, data):
        """One step, as one device takes it."""
        x, y = data

        # In which direction does the loss grow?
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = self.compute_loss(x, y, self(x))
        slope = tape.gradient(loss, x)
        length = ops.sqrt(ops.sum(ops.square(slope), axis=(1, 2, 3), keepdims=True))
        harder = x + PUSH * slope / (length + 1e-7)

        with tf.GradientTape() as tape:
            y_pred = self(harder, training=True)
            loss = self.compute_loss(x, y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)

        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


# --8<-- [end:step]


# --8<-- [start:build]
def build_model():
    """A new compiled model, as `verify` wants it."""
    images = keras.Input((8, 8, 1))
    x = keras.layers.Conv2D(32, 3, padding="same", activation="relu")(images)
    x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Flatten()(x)
    model = Sturdy(images, keras.layers.Dense(10, activation="softmax")(x))
    model.compile(
        keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    return model


# --8<-- [end:build]


def load():
    """The digits as `(x, y)`."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    return images.reshape(-1, 8, 8, 1).astype("float32") / 16, labels


def main(epochs=10, replicas=None):
    """Train; returns the accuracy on the harder images."""
    # --8<-- [start:train]
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    model = kmg.distribute(build_model(), strategy)
    x, y = load()
    history = model.fit(x, y, batch_size=64, epochs=epochs)
    # --8<-- [end:train]
    accuracy = history.history["accuracy"][-1]
    print(f"In the last epoch {accuracy:.1%} of the harder digits were right.")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    options = parser.parse_args()
    main(options.epochs, options.replicas)
