"""Tests run TensorFlow as users do, unless `KMG_QUICK=1` takes shortcuts."""

import os
import subprocess
import sys

import pytest
import tensorflow as tf
from helpers.processes_left import PATIENCE, as_users_start_it, python_path

QUICK = os.environ.get("KMG_QUICK") == "1"


@pytest.mark.skipif(QUICK, reason="`make quick` and `make test` change these options.")
def test_tensorflow_runs_with_its_default_options():
    """It optimizes graphs, tunes datasets and uses oneDNN."""
    assert not tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer")
    assert tf.data.Dataset._apply_debug_options.__module__.startswith("tensorflow.")
    assert os.environ.get("TF_ENABLE_ONEDNN_OPTS") != "0"


@pytest.mark.parametrize(
    ("environment", "quick"),
    [(as_users_start_it, "False"), (lambda: {**os.environ, "PYTHONPATH": python_path()}, "True")],
)
def test_only_processes_of_tests_start_keras_by_shortcuts(environment, quick):
    """`as_users_start_it` leaves out what makes Keras start faster."""
    command = [sys.executable, "-c", "import sys; print('fast_keras' in sys.modules)"]
    printed = subprocess.check_output(command, env=environment(), text=True, timeout=PATIENCE)
    assert printed == f"{quick}\n"
