"""Write a callback that looks into steps: how large a batch is useful?

    python examples/gradient_noise_scale.py --replicas 2     # two GPUs, or a CPU split in two

The simple noise scale of McCandlish et al. (2018), https://arxiv.org/abs/1812.06162, is the
variance of one example's gradient over the squared norm of the true gradient. Well below it, twice
the batch halves the steps; well above it, examples are wasted. It compares the gradients of
replicas, so it needs two of them.

The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse

import keras
import tensorflow as tf
from train_on_replicas import build_model, load_digits

import keras_multigpu as kmg


# --8<-- [start:callback]
class Noise(kmg.callbacks.Probe):
    """Running means of the gradient's variance tr(C) and of its squared norm.

    Replica j has b_j of the B examples and the mean gradient g_j; the step's gradient is G. Then

        E |g_j|^2 = |true gradient|^2 + tr(C) / b_j      E |G|^2 = |true gradient|^2 + tr(C) / B
    """

    callback = "NoiseScale"

    def build(self, strategy):
        self.means = tf.Variable([0.0, 0.0], trainable=False, dtype=tf.float64)

    def on_replica(self, view):
        examples = tf.cast(view.examples, tf.float32)
        return [tf.stack([examples, view.square_norm, view.total_square_norm])]

    def collect(self, measured, allowed):
        # In double precision: the noise is a small difference of large numbers.
        numbers = tf.cast(tf.stack([of_replica for (of_replica,) in measured]), tf.float64)
        examples, own, total = numbers[:, 0], numbers[:, 1], numbers[0, 2]
        batch = tf.reduce_sum(examples)
        others = tf.reduce_sum(tf.cast(examples > 0, tf.float64)) - 1
        variance = (tf.reduce_sum(examples * own) - batch * total) / others
        new = tf.stack([variance, total - variance / batch])
        # One group has nothing to compare, and gradients that overflowed say nothing.
        known = (others > 0) & tf.reduce_all(tf.math.is_finite(new))
        self.means.assign(tf.where(known, 0.98 * self.means + 0.02 * new, self.means))


class NoiseScale(kmg.callbacks.RunCallback):
    """Logs the noise scale, in examples, with each epoch."""

    writes = ("noise_scale",)

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self.probe = Noise()
        self.run.watch(self.probe)

    def on_epoch_end(self, epoch, logs=None):
        variance, square = self.probe.means.numpy()
        # Noise can hide the gradient: then the estimate of its squared norm is negative.
        logs["noise_scale"] = variance / square if square > 0 else float("nan")

    @property
    def state(self):
        """What `ResumableCheckpoint` saves and restores."""
        return {"means": self.probe.means.numpy()}

    @state.setter
    def state(self, state):
        self.probe.means.assign(state["means"])


# --8<-- [end:callback]


def main(epochs=10, replicas=None):
    """Train; returns the validation accuracy."""
    strategy = kmg.strategy(devices=replicas)
    keras.utils.set_random_seed(0)
    model = kmg.distribute(build_model(), strategy)
    x, x_new, y, y_new = load_digits()
    model.compile(
        keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    history = model.fit(
        x, y, 64, epochs, validation_data=(x_new, y_new), callbacks=[NoiseScale()]
    ).history
    for epoch, scale in enumerate(history["noise_scale"], 1):
        print(f"epoch {epoch}: a batch of about {scale:.0f} examples is useful")
    return history["val_accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    options = parser.parse_args()
    main(options.epochs, options.replicas)
