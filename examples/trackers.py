"""Log a training to CSV, TensorBoard, and W&B and MLflow if they are installed.

    python examples/trackers.py              # all GPUs
    python examples/trackers.py --epochs 6   # goes on, in the same runs
    keras-multigpu launch --workers 2 examples/trackers.py

The digits are those of scikit-learn: pip install scikit-learn tensorboard wandb mlflow
"""

import argparse
import importlib.util
from pathlib import Path

import keras

import keras_multigpu as kmg


# --8<-- [start:loggers]
def loggers(folder):
    """The callbacks that log; first the one whose logs the others write."""
    found = [
        kmg.callbacks.ReplicaMetrics(),
        keras.callbacks.CSVLogger(folder / "log.csv"),
        keras.callbacks.TensorBoard(folder / "board", profile_batch=(3, 5)),
    ]
    if importlib.util.find_spec("wandb"):
        import wandb
        from wandb.integration.keras import WandbMetricsLogger

        wandb.init(project="digits", id="digits", resume="allow", dir=folder)
        found.append(WandbMetricsLogger())
    if importlib.util.find_spec("mlflow"):
        import mlflow.keras

        mlflow.set_tracking_uri(f"sqlite:///{folder.resolve()}/mlflow.db")
        if kmg.cluster.is_chief():
            note = folder / "mlflow_run"
            known = note.read_text() if note.exists() else None
            note.write_text(mlflow.start_run(known).info.run_id)
        found.append(mlflow.keras.MlflowCallback())
    return found


# --8<-- [end:loggers]


def main(epochs=3, replicas=None, folder="trackers_run"):
    """Train; returns the accuracy."""
    from sklearn import datasets

    kmg.strategy(devices=replicas)
    folder = Path(folder)
    folder.mkdir(exist_ok=True)
    x, y = datasets.load_digits(return_X_y=True)
    layers = [keras.layers.Rescaling(1 / 16), keras.layers.Dense(64, "relu")]
    model = kmg.distribute(keras.Sequential([*layers, keras.layers.Dense(10, "softmax")]))
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    callbacks = [*loggers(folder), kmg.callbacks.ResumableCheckpoint(folder / "checkpoints")]
    fitted = model.fit(x, y, 64, epochs, validation_split=0.25, verbose=2, callbacks=callbacks)
    return fitted.history["val_accuracy"][-1]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--replicas", type=int)
    main(**vars(parser.parse_args()))
