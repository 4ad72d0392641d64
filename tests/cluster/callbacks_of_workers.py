"""Trainings with callbacks on a worker: what they find, and which files they write.

    callbacks_of_workers.py FOLDER

Each worker runs in a subfolder of its own, and saves `INDEX.pickle` in the shared folder.
"""

import http.server
import logging
import os
import pickle
import sys
import threading
import warnings
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.buckets import bucket
from helpers.rows_in_python import let_python_see_rows, zeros_after

import keras_multigpu as kmg
from keras_multigpu.data.sources import file_table
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.replication import replication_of

ROWS = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")


class AtEpochs(keras.callbacks.Callback):
    """A user's callback that has only a hook for epochs."""

    def on_epoch_end(self, epoch, logs=None):
        self.weights = [weight.copy() for weight in self.model.get_weights()]


def trained(x, epochs, callbacks, strategy, first=None):
    keras.utils.set_random_seed(1)
    layers = [*([first] if first else []), keras.layers.Dense(3, "relu"), keras.layers.Dense(1)]
    model = kmg.distribute(keras.Sequential([keras.Input((4,)), *layers]), strategy)
    model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    history = model.fit(
        x, ROWS[: len(x), :1], batch_size=8, epochs=epochs, callbacks=callbacks, shuffle=False
    )
    return model, history.history


def measured(strategy=None):
    """The findings of callbacks that look into steps or try steps."""
    found = {}
    rate = kmg.callbacks.LearningRateFinder(1e-3, high=3.0)
    model, history = trained(ROWS, 2, [rate, AtEpochs()], strategy)
    found["rate"] = {
        "rate": [rate.suggested_rate],
        "loss": history["loss"],
        "kernel": model.get_weights()[0],
    }
    bad = ROWS.copy()
    bad[7, 2] = np.nan
    guard = kmg.callbacks.NaNGuard("skip", every_steps=1)
    model, history = trained(bad, 2, [guard], strategy)
    found["guard"] = {
        "loss": history["loss"],
        "skipped": history["skipped_steps"],
        "place": [(one.replicas, one.position) for one in guard.findings][0][0],
        "kernel": model.get_weights()[0],
    }
    return found, guard.findings[0].devices


class Hungry(keras.layers.Layer):
    """Runs out of memory on more than three rows, if one is from the second half of a batch."""

    def call(self, x):
        def check(rows):
            if len(rows) > 3 and np.any(rows > 99.0):
                raise MemoryError("not enough")

        return x + zeros_after(check, x)


class Corrupt(keras.callbacks.Callback):
    """Changes the second replica's copy of a weight after the last step."""

    def on_train_batch_end(self, batch, logs=None):
        for replica in replication_of(self.model).group.replicas:
            if (replica.id, self.model.training_run.epoch, batch) == (1, 1, 3):
                copies_of(self.model.trainable_weights[0])[replica.place].assign_add(np.eye(4, 3))


def looked_at(strategy=None):
    """The findings of callbacks that watch each replica, or try what fits into its memory."""
    check = kmg.callbacks.ReplicaDriftCheck("warn")
    replicas = kmg.callbacks.ReplicaMetrics(["mae"])
    speed = kmg.callbacks.ThroughputReport(path="speed.json")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, seen = trained(ROWS[:30], 2, [Corrupt(), check, replicas, speed], strategy)
    numbers = ("loss", "mae", "examples", "gradient_norm")
    found = {
        "drift": {"epochs": [one.epoch for one in check.drifts]},
        "replicas": {f"{r} {n}": seen[f"replica_{r}/{n}"] for r in range(2) for n in numbers},
        "speed": {"steps": [speed.report.steps]},
    }
    x = ROWS[:16].copy()
    x[4:8] = 100.0
    finder = kmg.callbacks.BatchSizeFinder()
    with pytest.MonkeyPatch.context() as patch:
        let_python_see_rows(patch)
        _, history = trained(x, 1, [finder], strategy, first=Hungry())
    found["finder"] = {"sizes": [finder.largest_replica_batch_size], "loss": history["loss"]}
    found["finder"]["fits"] = [one.fits for one in finder.tries]
    timed = [
        [seen[f"replica_{r}/{name}"][-1] for r in range(2)]
        for name in ("step_time", "data_wait", "compute_time")
    ]
    drifts = [one for one in map(str, (each.message for each in told)) if "Copies differ" in one]
    return found, {"timed": timed, "devices": check.drifts[0].devices, "warnings": len(drifts)}


class OfInputs(keras.Model):
    """Has a loss of its own that needs the whole batch and its inputs."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        return self.dense(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_max(tf.abs(y - y_pred)) + tf.reduce_mean(x) * tf.reduce_mean(y_pred)


def draw_photos(folder):
    for index, pixels in enumerate(np.random.default_rng(1).integers(0, 255, (11, 6, 6, 3))):
        path = folder / "photos" / f"class {index % 3}" / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(pixels.astype("uint8")).numpy())


def read(folder, strategy=None):
    """Results on data of which each process reads its own rows, and the files it has read."""
    decoded, read_file = [], file_table.read_file

    def noted(path):
        decoded.append(Path(path).name)
        return read_file(path)

    augment = [kmg.augmentation.RandomErasing(), keras.layers.RandomFlip()]
    settings = {"global_batch_size": 4, "seed": 1, "augment": augment}
    photos = kmg.data.from_directory(
        folder / "photos", image_size=(6, 6), label_mode="categorical", **settings
    )
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Rescaling(1 / 255), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = kmg.distribute(keras.Sequential([keras.Input((6, 6, 3)), *layers]), strategy)
    model.compile("adam", "mse", metrics=["mae", keras.metrics.R2Score()])
    file_table.read_file = noted
    try:
        found = model.evaluate(photos, verbose=0, return_dict=True)
    finally:
        file_table.read_file = read_file
    predicted = model.predict(photos, verbose=0)
    history = model.fit(photos, epochs=2, verbose=0).history
    of_photos = {"evaluated": list(found.values()), "predicted": predicted, **history}
    model = kmg.distribute(OfInputs(), strategy)
    model.compile("sgd")
    arrays = kmg.data.from_arrays(ROWS[:11], ROWS[:11, :1], global_batch_size=4, seed=2)
    history = model.fit(arrays, epochs=2, verbose=0).history
    return {"photos": of_photos, "arrays": history | {"kernel": model.get_weights()[0]}}, decoded


class Monitor(http.server.HTTPServer):
    """A server for `RemoteMonitor`, which runs until this process ends."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        self.heard = 0
        self.address = f"http://127.0.0.1:{self.server_port}"
        os.environ["NO_PROXY"] = "127.0.0.1"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def finish_request(self, request, client_address):
        """Count it. The answer is an error, which `RemoteMonitor` ignores."""
        self.heard += 1
        super().finish_request(request, client_address)


def shuffled(index):
    """The mean of 16 numbers over each epoch: of all 16 only if each comes exactly once.

    Every worker has its own seed first, and then all have the same.
    """
    return [orders(kmg.distribute, seed) for seed in (index, 5)]


def orders(distribute, seed):
    keras.utils.set_random_seed(seed)
    x = 2.0 ** np.arange(16, dtype="float32")[:, None]
    layers = [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones")]
    model = distribute(keras.Sequential(layers))
    model.compile(keras.optimizers.SGD(0.0), lambda y, predicted: predicted)
    batches = []
    hears = keras.callbacks.LambdaCallback(on_train_batch_end=lambda b, logs: batches.append(logs))
    history = model.fit(x, x, batch_size=4, epochs=2, verbose=0, callbacks=[hears])
    firsts = [batches[0]["loss"], batches[4]["loss"]]
    return {"means": history.history["loss"], "first batches": firsts}


def written(folder):
    """Which files callbacks write, and from which of them workers resume."""
    monitor = Monitor()
    callbacks = [
        keras.callbacks.RemoteMonitor(monitor.address),
        keras.callbacks.ModelCheckpoint("{batch}.weights.h5", save_freq=3, save_weights_only=True),
        keras.callbacks.ModelCheckpoint("best.keras", monitor="loss", save_best_only=True),
        keras.callbacks.CSVLogger("log.csv"),
        keras.callbacks.TensorBoard("board", histogram_freq=1, update_freq=1),
        AtEpochs(),
    ]
    model, _ = trained(ROWS, 2, callbacks, None)
    model.evaluate(ROWS, ROWS[:, :1], callbacks=[keras.callbacks.TensorBoard("evaluated")])
    backup = folder / "backup"
    trained(ROWS, 1, [keras.callbacks.BackupAndRestore(backup, delete_checkpoint=False)], None)
    again = [keras.callbacks.BackupAndRestore(backup, save_freq=2), AtEpochs()]
    resumed, history = trained(ROWS, 2, again, None)
    with bucket(folder / "objects"):
        saves = [kmg.callbacks.ResumableCheckpoint("bucket://run") for _ in range(2)]
        trained(ROWS, 1, saves[:1], None)
        from_bucket, _ = trained(ROWS, 2, saves[1:], None)
    return {
        "found in the bucket": str(saves[1].resumed_from),
        "resumed from the bucket": from_bucket.get_weights(),
        "reported": monitor.heard,
        "epochs resumed": len(history["loss"]),
        "resumed": resumed.get_weights(),
        "expected": model.get_weights(),
        "backup is left": backup.exists(),
    }


def exchanges():
    """The number of exchanges in the graph of a step, and their bytes, for two models."""
    layers = [keras.Input((4,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return [sent_by([layers[0], layers[2]]), sent_by(layers)]


def sent_by(layers):
    model = kmg.distribute(keras.Sequential(layers))
    model.compile("adam", "mse", metrics=["mae"])
    model.train_on_batch(ROWS, ROWS[:, :1])
    (step,) = replication_of(model).step_functions(model, "train")._made.values()
    operations = step.graph.graph.get_operations()
    given = [each.inputs[0] for each in operations if "CollectiveReduce" in each.type]
    return len(given), sum(each.shape.num_elements() * each.dtype.size for each in given)


def main(folder):
    logging.basicConfig(format="%(message)s")
    index = kmg.strategy().cluster_resolver.task_id
    own = folder / str(index)
    own.mkdir()
    os.chdir(own)
    found, devices = measured()
    looked, by_worker = looked_at()
    of_data, decoded = read(folder)
    result = {"found": found | looked | of_data, "devices": devices, "looked": by_worker}
    result["decoded"] = decoded
    result["written"] = written(folder)
    result["exchanges"] = exchanges()
    result["shuffled"] = shuffled(index)
    result["files"] = sorted(str(path.relative_to(own)) for path in own.rglob("*.*"))
    (folder / f"{index}.pickle").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
