"""After `import keras`, `import keras_multigpu` costs next to nothing."""

import functools
import json
import subprocess
import sys

import pytest
from helpers.processes_left import PATIENCE, as_users_start_it

# They start TensorFlow in another process.
pytestmark = pytest.mark.slow

OPTIONAL = ("PIL", "keras_cv", "matplotlib", "ray", "sklearn", "tensorflow_datasets")
FRESH_PROCESS = """
import json, sys, time
import tensorflow as tf, keras

known = set(sys.modules)
before = time.process_time()
import keras_multigpu
share = (time.process_time() - before) / before
new = sorted(set(sys.modules) - known)

try:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
    )
    started = False
except RuntimeError:
    started = True
tf.constant(0)
try:
    keras_multigpu.strategy(devices=4)
except RuntimeError as error:
    refusal = str(error)
print(json.dumps({"share": share, "new": new, "started": started, "refusal": refusal}))
"""


def import_in_a_fresh_process():
    """The import's share of the start-up time, its modules, and whether TensorFlow started."""
    ended = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS],
        env=as_users_start_it(),
        capture_output=True,
        timeout=PATIENCE,
        check=True,
    )
    return json.loads(ended.stdout)


first_import = functools.cache(import_in_a_fresh_process)


def test_the_import_takes_a_twentieth_of_keras_time():
    """At most, in the best of three tries."""
    share = first_import()["share"]
    for _ in range(2):
        if share < 0.05:
            break
        share = min(share, import_in_a_fresh_process()["share"])
    assert share < 0.05


def test_the_import_starts_no_device():
    """Devices can still be configured afterwards."""
    assert not first_import()["started"]


def test_the_import_loads_no_optional_package():
    """The function that needs one imports it."""
    brought = {module.partition(".")[0] for module in first_import()["new"]}
    assert brought.isdisjoint(OPTIONAL)


def test_logical_cpus_are_made_before_tensorflow_starts():
    assert first_import()["refusal"] == (
        "4 logical CPU devices are needed, but TensorFlow started with 2. Expected to make them "
        "before TensorFlow's first operation. Restart Python (in a notebook: the kernel) and call "
        "`keras_multigpu.strategy(devices=4)` before the first model, tensor or dataset; ask for "
        "the largest number first. In one of several workers leave `devices` out: "
        "`keras-multigpu launch --devices-per-worker` splits the CPU. Received: devices=4"
    )
