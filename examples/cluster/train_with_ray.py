"""Train on workers that Ray starts, and starts again when one of them is killed.

    python examples/cluster/train_with_ray.py --workers 2

The digits are those of scikit-learn: pip install scikit-learn "ray[train]"
"""

import argparse
import functools
import tempfile
from pathlib import Path

import keras

import keras_multigpu as kmg


# --8<-- [start:train]
def fit(epochs, callbacks):
    """A training as on one device; the model."""
    from sklearn import datasets

    keras.utils.set_random_seed(1)
    images, labels = datasets.load_digits(return_X_y=True)
    data = kmg.data.from_arrays(images.astype("float32") / 16, labels, global_batch_size=64)
    layers = [keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")]
    model = kmg.distribute(keras.Sequential([keras.Input((64,)), *layers]))
    model.compile(
        keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy", metrics=["accuracy"]
    )
    model.fit(data, epochs=epochs, verbose=2, callbacks=callbacks)
    return model


class Report(keras.callbacks.Callback):
    """Reports the logs of each epoch, and the model of the first worker."""

    def on_epoch_end(self, epoch, logs=None):
        import ray.train

        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if ray.train.get_context().get_world_rank() == 0:
                self.model.save(Path(folder, "model.keras"))
                checkpoint = ray.train.Checkpoint.from_directory(folder)
            ray.train.report({**logs, "epoch": epoch}, checkpoint=checkpoint)


def train(epochs, folder):
    """What each worker calls."""
    checkpoint = kmg.callbacks.ResumableCheckpoint(folder, every_steps=10)
    fit(epochs, [Report(), checkpoint])


# --8<-- [end:train]


# --8<-- [start:start]
def start(fn, workers, epochs, folder):
    """Let Ray run a function on workers; the last logs, and the model."""
    import ray.train

    folder = Path(folder).absolute()
    result = kmg.cluster.ray.train(
        functools.partial(fn, epochs, folder / "checkpoints"),
        workers,
        run_config=ray.train.RunConfig(
            name="digits",
            storage_path=str(folder),
            failure_config=ray.train.FailureConfig(max_failures=3),
        ),
    )
    with result.checkpoint.as_directory() as reported:
        return result.metrics, keras.models.load_model(Path(reported, "model.keras"))


# --8<-- [end:start]


def main(workers=2, epochs=5, folder="ray_digits"):
    """Train, and say what Ray has heard last."""
    import ray

    # --8<-- [start:init]
    # Without an address Ray starts on this machine, for others to join it.
    ray.init(include_dashboard=False)
    # --8<-- [end:init]
    metrics, model = start(train, workers, epochs, folder)
    print(metrics)
    model.summary()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--folder", default="ray_digits")
    main(**vars(parser.parse_args()))
