"""Train a convnet on handwritten digits, each batch split over several replicas.

    python examples/train_on_replicas.py                  # all GPUs, or one CPU
    python examples/train_on_replicas.py --replicas 2     # two GPUs, or a CPU split in two

The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse

import keras
import numpy as np

import keras_multigpu as kmg


# --8<-- [start:data]
def load_digits():
    """1,797 images of 8x8 pixels: four fifths to train on, the rest to validate."""
    from sklearn import datasets, model_selection

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    return model_selection.train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )


# --8<-- [end:data]


# --8<-- [start:model]
def build_model():
    """An ordinary Keras model. Nothing in it knows about replicas."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, padding="same", activation="relu"),
            keras.layers.Conv2D(64, 3, padding="same", activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            # Drops what one device drops. With Keras alone, all replicas would drop the same units.
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


# --8<-- [end:model]


def main(epochs=15, replicas=None, path="digits.keras"):
    """Train, save, and load again; returns the validation accuracy."""
    # --8<-- [start:devices]
    # First of all: once TensorFlow has started, it can neither split a CPU in two nor let a GPU
    # take memory as it needs it. None means all GPUs.
    strategy = kmg.strategy(devices=replicas)
    # --8<-- [end:devices]

    # --8<-- [start:train]
    keras.utils.set_random_seed(0)
    x, x_new, y, y_new = load_digits()

    # The one line that distributes the model. Everything below is plain Keras.
    model = kmg.distribute(build_model(), strategy)

    model.compile(
        keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    # The batch size is that of one optimizer step, whatever the number of replicas.
    # 1,437 images make 22 batches of 64 and one of 29: two replicas take 15 and 14 of these.
    history = model.fit(x, y, batch_size=64, epochs=epochs, validation_data=(x_new, y_new))
    accuracy = history.history["val_accuracy"][-1]
    # --8<-- [end:train]

    # --8<-- [start:save]
    # What was saved is a plain Keras model, which needs neither this package nor the replicas,
    # and it is the model that was validated.
    model.save(path)
    plain = keras.saving.load_model(path)
    _, accuracy_again = plain.evaluate(x_new, y_new, verbose=0)
    np.testing.assert_allclose(accuracy_again, accuracy)
    # --8<-- [end:save]

    print(f"{accuracy:.1%} of {len(y_new)} new digits are right; {path} knows how.")
    return accuracy


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--replicas", type=int, help="default: as many as there are GPUs")
    options = parser.parse_args()
    main(options.epochs, options.replicas)
