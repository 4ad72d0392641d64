"""The Ray example: real workers, one of which is killed, end where one device does."""

import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
from helpers.all_replicas import ALL_REPLICAS
from helpers.processes_left import ended_process, python_path

from keras_multigpu.cluster import ray

SCRIPT = Path(__file__).parent / "ray_training.py"
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "cluster"

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason='needs `pip install "ray[train]"`'
)


def run_on_ray(folder):
    """What the script prints at its end. Ray listens on this machine only."""
    variables = {
        "PYTHONPATH": python_path(ROOT, EXAMPLES),
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",  # A token would be written to the home folder.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Workers' addresses are 127.0.0.1.
    }
    command = [sys.executable, str(SCRIPT), str(folder)]
    ended = ended_process(command, env={**os.environ, **variables})
    found = re.search(r"^result (.*)$", ended.stdout, re.MULTILINE)
    assert ended.returncode == 0 and found, ended.stdout + ended.stderr
    return json.loads(found[1])


@needs_ray
@pytest.mark.skipif(not ALL_REPLICAS, reason="`make test-all` runs it.")
def test_ray_restarts_a_killed_worker_and_all_end_where_one_device_does(tmp_path, monkeypatch):
    """The saved model loads in plain Keras, and the metrics are the last epoch's logs."""
    metrics, begun = run_on_ray(tmp_path)
    assert begun == [2, 2]
    monkeypatch.syspath_prepend(EXAMPLES)
    expected = importlib.import_module("train_with_ray").fit(2, [])
    for one, other in zip(
        keras.models.load_model(tmp_path / "model.keras").get_weights(),
        expected.get_weights(),
        strict=True,
    ):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
    last = {name: values[-1] for name, values in expected.history.history.items()}
    assert metrics == pytest.approx({**last, "epoch": 1}, rel=2e-5)


def test_a_missing_ray_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r'Ray Train is not .* Run `pip install "ray\[train\]"`'):
        ray.train(print)


def test_ray_needs_at_least_one_worker():
    with pytest.raises(ValueError, match="`num_workers` is not a positive integer"):
        ray.train(print, 0)
