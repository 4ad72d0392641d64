"""A training with three mistakes that show only later: rehearse it before the night.

    keras-multigpu rehearse examples/rehearse.py --epochs 200
    python examples/rehearse.py             # all GPUs

The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse
from pathlib import Path

import keras

import keras_multigpu as kmg


# --8<-- [start:train]
class BestSoFar(keras.callbacks.Callback):
    """Notes the best accuracy in a file."""

    best = 0.0

    def on_epoch_end(self, epoch, logs=None):
        if logs["accuracy"] > self.best:
            self.best = logs["accuracy"]
            Path("best.txt").write_text(str(self.best))


def main(epochs=200, replicas=None):
    """Train; returns the accuracy."""
    from sklearn import datasets

    kmg.strategy(devices=replicas)
    x, y = datasets.load_digits(return_X_y=True)
    layers = [keras.layers.Rescaling(1 / 16), keras.layers.Dense(64, "relu")]
    model = kmg.distribute(keras.Sequential([*layers, keras.layers.Dense(10, "softmax")]))
    # For the 1797 examples: without those that are kept for validation there are fewer steps.
    rate = keras.optimizers.schedules.CosineDecay(0.005, epochs * 1797 // 64)
    loss = "sparse_categorical_crossentropy"
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    callbacks = [
        keras.callbacks.EarlyStopping("val_acc", mode="max", patience=20),
        keras.callbacks.ModelCheckpoint("digits/{epoch}.keras"),
        BestSoFar(),
        kmg.callbacks.ResumableCheckpoint("digits_run"),
    ]
    fitted = model.fit(x, y, 64, epochs, validation_split=0.25, verbose=2, callbacks=callbacks)
    return fitted.history["val_accuracy"][-1]


# --8<-- [end:train]

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--replicas", type=int)
    main(**vars(parser.parse_args()))
