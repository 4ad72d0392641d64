"""What logs a run: one process does, the numbers of each replica arrive, and a resumed run goes on.

W&B and MLflow take part where they are installed: they bring a hundred packages.
"""

import contextlib
import csv
import re
import sqlite3
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from helpers.all_replicas import first_rows
from helpers.processes_left import as_users_start_it, ended_process

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", params=first_rows(["workers", "replicas"], 1))
def folder(request, tmp_path_factory):
    """The example on two replicas or workers, twice: two epochs, and then two more."""
    folder = tmp_path_factory.mktemp(request.param)
    for epochs in ("2", "4"):
        words = [str(EXAMPLES / "trackers.py"), "--epochs", epochs]
        if request.param == "replicas":
            words += ["--replicas", "2"]
        else:
            words = ["-m", "keras_multigpu", "launch", "--workers", "2", *words]
        more = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
        ended = ended_process([sys.executable, *words], cwd=folder, env=as_users_start_it(**more))
        assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "trackers_run"


def events(folder):
    """The steps of each summary, by its name, in all files of a folder."""
    found = {}
    for path in sorted(folder.glob("events.*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                found.setdefault(value.tag, []).append(event.step)
    return found


@pytest.mark.slow
def test_the_log_has_each_epoch_once(folder):
    rows = list(csv.DictReader((folder / "log.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["0", "1", "2", "3"]
    assert {"loss", "val_accuracy", "replica_0/loss", "replica_1/loss"} <= {*rows[0]}


@pytest.mark.slow
def test_tensorboard_has_each_epoch_once_and_a_profile(folder):
    found = events(folder / "board" / "train")
    for name in ("epoch_loss", "epoch_replica_0/loss", "epoch_replica_1/loss"):
        assert found[name] == [0, 1, 2, 3]
    assert events(folder / "board" / "validation")["epoch_loss"] == [0, 1, 2, 3]
    assert list((folder / "board" / "train").glob("plugins/profile/*/*.xplane.pb"))


@pytest.mark.slow
def test_wandb_has_one_run(folder):
    """Offline, a part of it for each start, which `wandb sync` joins by their name."""
    pytest.importorskip("wandb")
    parts = sorted((folder / "wandb").glob("offline-run-*/run-digits.wandb"))
    assert len(parts) == 2
    written = b"".join(part.read_bytes() for part in parts)
    # A name, the tag of its value, its length, and the value: in the history and in the summary.
    assert b"".join(re.findall(rb"epoch/epoch\x82\x01.(\d)", written)) == b"00112233"
    assert len(re.findall(rb"epoch/replica_1/loss\x82\x01", written)) == 8


@pytest.mark.slow
def test_mlflow_has_one_run(folder):
    pytest.importorskip("mlflow")
    with contextlib.closing(sqlite3.connect(folder / "mlflow.db")) as database:
        assert len(database.execute("select * from runs").fetchall()) == 1
        for name in ("loss", "val_accuracy", "replica_0/loss", "replica_1/loss"):
            query = "select step from metrics where key = ? order by step"
            assert database.execute(query, [name]).fetchall() == [(0,), (1,), (2,), (3,)]


SEARCHES = """
import keras
import keras_tuner
import numpy as np
import keras_multigpu as kmg

x = np.arange(40, dtype="float32").reshape(20, 2) / 40


def build(hp):
    model = kmg.distribute(keras.Sequential([keras.layers.Dense(hp.Int("width", 1, 9))]))
    model.compile(keras.optimizers.SGD(hp.Float("rate", 1e-4, 1e-1)), "mse")
    return model


worker = kmg.strategy().cluster_resolver.task_id
keras.utils.set_random_seed(1)
tuner = keras_tuner.BayesianOptimization(
    build, "val_loss", max_trials=4, seed=1, directory=f"worker_{worker}"
)
tuner.search(x, x[:, :1], batch_size=5, validation_split=0.2, verbose=0)
trials = tuner.oracle.get_best_trials(4)
print("found", [(trial.hyperparameters.values, float(trial.score)) for trial in trials])
"""


@pytest.mark.slow
def test_a_tuner_on_each_worker_finds_the_same(tmp_path):
    pytest.importorskip("keras_tuner")
    (tmp_path / "search.py").write_text(SEARCHES)
    words = ["-m", "keras_multigpu", "launch", "--workers", "2", "search.py"]
    ended = ended_process([sys.executable, *words], cwd=tmp_path, env=as_users_start_it())
    assert ended.returncode == 0, ended.stdout + ended.stderr
    one, other = re.findall(r"^\[worker \d\] found (.*)$", ended.stdout, re.M)
    assert one == other and one.count("width") == 4
