"""A chief with a parameter server and a worker in its process, and two workers that are killed.

    parameter_servers.py FOLDER

The chief leaves `synchronous.npz` and `masked.npz` with all that two trainings left behind, and
prints as JSON what became of an asynchronous one. `environments` says which process is which.
"""

import json
import os
import signal
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf


def model_and_data(middle=(), momentum=0.9):
    """A model with a penalty, and 41 examples, for batches of 8: the last has one."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Dense(8, "relu"),
        *middle,
        keras.layers.Dense(1, kernel_regularizer="l2"),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    x = np.random.default_rng(0).normal(size=(41, 4)).astype("float32")
    model.compile(keras.optimizers.SGD(0.05, momentum), "mse", metrics=["mae"])
    return model, x, x[:, :1] - 2 * x[:, 1:2]


def numbers(model, history, x):
    """All that training has left behind; paths count the models of a process."""
    found = {f"{i} {each.name}": each.numpy() for i, each in enumerate(model.variables)}
    logs = {f"log {name}": np.array(values) for name, values in history.history.items()}
    predicted = enumerate(keras.tree.flatten(model.predict(x, verbose=0)))
    return {**found, **logs, **{f"predictions {i}": each for i, each in predicted}}


def masked_training(place=lambda model: model):
    """What a training leaves behind whose losses are divided by masks and by weights."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5,), dtype="int32")
    embedded = keras.layers.Embedding(7, 4, mask_zero=True)(inputs)
    words = keras.layers.Dense(1, name="words")(embedded)
    whole = keras.layers.Dense(1, name="whole")(keras.layers.GlobalAveragePooling1D()(embedded))
    model = place(keras.Model(inputs, {"words": words, "whole": whole}))
    by_weight = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    model.compile(keras.optimizers.Adam(0.05), {"words": "mae", "whole": by_weight})
    random = np.random.default_rng(0)
    # Words are zeros, which count for nothing, far more often at the end than at the beginning.
    x = np.where(random.uniform(size=(13, 5)) < np.linspace(0.1, 0.8, 13)[:, None], 0, 3)
    x = (x * random.integers(1, 3, x.shape)).astype("int32")
    x[:, 0] = 1
    y = {"words": random.normal(size=(13, 5, 1)), "whole": random.normal(size=(13, 1))}
    weights = {"words": np.ones((13, 1)), "whole": random.uniform(size=13)}
    fit = {"batch_size": 6, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, sample_weight=weights, **fit)
    return numbers(model, history, x)


class Kill(keras.callbacks.Callback):
    """Kills a worker in the middle of an epoch."""

    def __init__(self, folder, index):
        super().__init__()
        self.process = int((folder / f"worker{index}").read_text())

    def on_train_batch_end(self, batch, logs=None):
        if batch == 3 and self.process:
            os.kill(self.process, signal.SIGKILL)
            self.process = None


def environments(ports):
    """The variables of the chief and of two workers; its process has a server and a worker, too."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    tasks = [{"type": role, "index": i} for role, i in (("chief", 0), ("worker", 1), ("worker", 2))]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


def main(folder):
    """Train in both ways, or serve until somebody kills this process."""
    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["type"] == "worker":
        (folder / f"worker{config['task']['index']}").write_text(str(os.getpid()))
        import keras_multigpu  # noqa: F401 (which serves)

    spec = tf.train.ClusterSpec(config["cluster"])
    here = [tf.distribute.Server(spec, role, 0) for role in ("ps", "worker")]
    import keras_multigpu as kmg

    model, x, y = model_and_data()
    model = kmg.distribute(model)
    kill = [Kill(folder, 1)]
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=kill)
    np.savez(folder / "synchronous.npz", **numbers(model, history, x))

    masked = masked_training(kmg.distribute)
    np.savez(folder / "masked.npz", **masked)

    drawn = [keras.layers.BatchNormalization(), keras.layers.Dropout(0.1)]
    model, x, y = model_and_data(drawn, momentum=0.0)
    model = kmg.distribute(model, asynchronous=True)
    before = model.evaluate(x, y, verbose=0)[0]
    history = model.fit(x, y, batch_size=8, epochs=20, verbose=0, callbacks=[Kill(folder, 2)])
    found = {
        "before": before,
        "after": model.evaluate(x, y, verbose=0)[0],
        "steps": int(model.optimizer.iterations),
        "losses": history.history["loss"],
    }
    print("result", json.dumps(found), flush=True)
    del here
    os._exit(0)  # The servers in this process have no end.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
