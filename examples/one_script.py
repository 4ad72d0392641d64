r"""One script for JAX, PyTorch and TensorFlow: a convnet on all devices that the backend can use.

    KERAS_BACKEND=tensorflow python examples/one_script.py
    KERAS_BACKEND=jax python examples/one_script.py
    KERAS_BACKEND=torch python examples/one_script.py             # one device

    KERAS_BACKEND=tensorflow python examples/one_script.py --replicas 2    # a CPU split in two
    XLA_FLAGS=--xla_force_host_platform_device_count=2 KERAS_BACKEND=jax \
        python examples/one_script.py

It needs Keras 3.15. The digits are those of scikit-learn: pip install scikit-learn
"""

import argparse
import contextlib

import keras


def load_digits():
    """Images of 8x8 pixels: 1,408 to train on, 384 to validate."""
    from sklearn import datasets

    images, labels = datasets.load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype("float32") / 16
    # Full batches of 64, the only ones that JAX divides: 22 of them, and 6.
    return images[:1408], labels[:1408], images[1408:1792], labels[1408:1792]


def build_model():
    """An ordinary Keras model. Nothing in it knows about devices."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )


# --8<-- [start:devices]
def all_devices():
    """Keras's distribution over all devices, of a backend that has one."""
    if keras.config.backend() == "torch":
        return contextlib.nullcontext()
    return keras.distribution.DataParallel().scope()


def distributed(model):
    """The model; with TensorFlow, on the devices of Keras's distribution."""
    if keras.config.backend() != "tensorflow":
        return model
    import keras_multigpu as kmg

    return kmg.distribute(model)


# --8<-- [end:devices]


def main(epochs=10, replicas=None):
    """Train; returns the validation accuracy."""
    if replicas:
        import keras_multigpu as kmg

        kmg.strategy(devices=replicas)  # Before TensorFlow starts: it splits a CPU.
    # --8<-- [start:train]
    keras.utils.set_random_seed(0)
    x, y, x_new, y_new = load_digits()
    with all_devices():
        model = distributed(build_model())
        model.compile(
            keras.optimizers.Adam(0.003), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        history = model.fit(
            x, y, batch_size=64, epochs=epochs, validation_data=(x_new, y_new), verbose=2
        ).history
    # --8<-- [end:train]
    return history["val_accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--replicas", type=int, help="split a CPU: with TensorFlow")
    main(**vars(parser.parse_args()))
