"""Tests run what users run, unless `KMG_QUICK=1` asks for less."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf
from helpers.processes_left import PATIENCE, as_users_start_it, python_path

TESTS = Path(__file__).parent
QUICK = os.environ.get("KMG_QUICK") == "1"


@pytest.mark.skipif(QUICK, reason="It is what `make quick` and `make test` do without.")
def test_tensorflow_is_not_switched_down():
    """It optimizes graphs, tunes datasets and uses oneDNN, here and in processes of tests."""
    assert not tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer")
    assert tf.data.Dataset._apply_debug_options.__module__.startswith("tensorflow.")
    assert os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0"
    switches = ("disable_meta_optimizer", "autotune.enabled", "ENABLE_ONEDNN_OPTS")
    found = {
        path.relative_to(TESTS).as_posix()
        for path in TESTS.rglob("*.py")
        if any(switch in path.read_text(encoding="utf-8") for switch in switches)
    }
    # Keras's own tests are there for what Keras promises, and `processes_left.py` switches it on.
    apart = {"conftest.py", "keras_suite/distributed_keras.py", "helpers/processes_left.py"}
    assert found - apart == {"benchmarks/layer_runs.py", Path(__file__).name}


@pytest.mark.parametrize(
    ("environment", "quick"),
    [(as_users_start_it, "False"), (lambda: {**os.environ, "PYTHONPATH": python_path()}, "True")],
)
def test_a_process_can_start_as_a_users_does(environment, quick):
    """Without the shortcuts that let Keras start faster."""
    command = [sys.executable, "-c", "import sys; print('fast_keras' in sys.modules)"]
    printed = subprocess.check_output(command, env=environment(), text=True, timeout=PATIENCE)
    assert printed == f"{quick}\n"
