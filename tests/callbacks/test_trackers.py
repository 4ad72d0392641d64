"""What logs a run: one process does, the numbers of each replica arrive, and a resumed run goes on.

W&B and MLflow take part where they are installed: they bring a hundred packages.
"""

import csv
import itertools
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from helpers.processes_left import as_users_start_it, ended_process

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module", params=["replicas", "workers"])
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
    from wandb.proto import wandb_internal_pb2
    from wandb.sdk.internal.datastore import DataStore

    parts = sorted((folder / "wandb").glob("offline-run-*/run-digits.wandb"))
    assert len(parts) == 2
    epochs, names = [], set()
    for part in parts:
        store = DataStore()
        store.open_for_scan(str(part))
        for data in itertools.takewhile(bool, (store.scan_data() for _ in itertools.count())):
            record = wandb_internal_pb2.Record.FromString(data)
            for item in record.history.item:
                name = item.key or ".".join(item.nested_key)
                names.add(name)
                if name == "epoch/epoch":
                    epochs.append(int(item.value_json))
    assert epochs == [0, 1, 2, 3]
    assert {"epoch/loss", "epoch/replica_1/loss"} <= names


@pytest.mark.slow
def test_mlflow_has_one_run(folder):
    pytest.importorskip("mlflow")
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (experiment,) = client.search_experiments()
    (run,) = client.search_runs([experiment.experiment_id])
    for name in ("loss", "val_accuracy", "replica_0/loss", "replica_1/loss"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [each.step for each in history] == [0, 1, 2, 3]
