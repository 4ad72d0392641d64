"""A chief with a parameter server and a worker in its process, and two workers that are killed.

    parameter_servers.py FOLDER

The chief saves the results of a training in which a worker is killed as `killed.npz`, those of
`ROW` as `row.npz`, and prints the results of other trainings as JSON. `environments` assigns the
roles.
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

ROW = "BatchNorm, empty replicas"
"""A row of `exactness/cases.py` that needs more than sums over examples."""


def model_and_data(middle=(), momentum=0.9):
    """A model with a penalty, and 41 examples: of batches of 8, the last has one."""
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
    found = {f"{i} {each.name}": each.numpy() for i, each in enumerate(model.variables)}
    logs = {f"log {name}": np.array(values) for name, values in history.history.items()}
    predicted = enumerate(keras.tree.flatten(model.predict(x, verbose=0)))
    return {**found, **logs, **{f"predictions {i}": each for i, each in predicted}}


def looked_up(place=lambda model: model, **options):
    """The losses of a model with a lookup table, which exists only in one process."""
    keras.utils.set_random_seed(1)
    words = keras.layers.StringLookup(vocabulary=["a", "b", "c"])
    inputs = keras.Input((), dtype="string")
    model = place(keras.Model(inputs, keras.layers.Embedding(4, 1)(words(inputs))), **options)
    model.compile("sgd", "mse")
    x = tf.constant(["a", "b", "c", "d", "a"])
    return model.fit(x, np.ones((5, 1)), batch_size=3, epochs=2, verbose=0).history["loss"]


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
    """Variables for the chief, whose process also runs a server and a worker, and two workers."""
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    tasks = [{"type": role, "index": i} for role, i in (("chief", 0), ("worker", 1), ("worker", 2))]
    return [{"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} for task in tasks]


def guarded(place=lambda model: model, rows=slice(None), callbacks=()):
    """What a training without a batch leaves, or with one that a guard skips."""
    model, x, y = model_and_data()
    model, known = place(model), x[:8].copy()
    x[8:16] = np.nan
    fit = {"batch_size": 8, "shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    history = model.fit(x[:24][rows], y[:24][rows], **fit)
    return numbers(model, history, known)


def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return None


def main(folder):
    config = json.loads(os.environ["TF_CONFIG"])
    if config["task"]["type"] == "worker":
        (folder / f"worker{config['task']['index']}").write_text(str(os.getpid()))
        import keras_multigpu  # noqa: F401 (it serves, and never returns)

    spec = tf.train.ClusterSpec(config["cluster"])
    here = [tf.distribute.Server(spec, role, 0) for role in ("ps", "worker")]
    from exactness.cases import CASES
    from exactness.runs import run

    import keras_multigpu as kmg

    model, x, y = model_and_data()
    model = kmg.distribute(model)
    kill = [Kill(folder, 1)]
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=kill)
    np.savez(folder / "killed.npz", **numbers(model, history, x))

    (case,) = (case for case in CASES if case.name == ROW)
    found = run(case, lambda case: kmg.distribute(case.compiled()))
    np.savez(folder / "row.npz", **found.numbers)

    watching = [kmg.callbacks.NaNGuard("skip"), kmg.callbacks.ReplicaMetrics()]
    np.savez(folder / "guarded.npz", **guarded(kmg.distribute, callbacks=watching))

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
        "looked up": looked_up(kmg.distribute),
        "refused": [
            refused(lambda: looked_up(kmg.distribute, asynchronous=True)),
            refused(lambda: model.fit(x, y, verbose=0, callbacks=[kmg.callbacks.NaNGuard()])),
        ],
    }
    print("result", json.dumps(found), flush=True)
    del here
    os._exit(0)  # The servers in this process never end.


if __name__ == "__main__":
    main(Path(sys.argv[1]))
