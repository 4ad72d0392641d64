"""Start TensorFlow once for all tests: eight logical CPU devices and no GPU."""

import gc
import os
import sys
from pathlib import Path

# For this process and the processes that tests start.
sys.path.append(str(Path(__file__).parent / "helpers" / "quick_start"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [sys.path[-1], *filter(None, [os.environ.get("PYTHONPATH")])]
)
import fast_keras  # noqa: F401

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# `make quick` and `make test` switch off what costs a tenth of the time or more and hardly ever
# finds a bug. `make test-all`, and any other way to run the tests, runs what users run.
QUICK = os.environ.get("KMG_QUICK") == "1"
if QUICK:
    # Looking for operations that oneDNN can replace takes a twentieth of the time. The Makefile
    # leaves it on where trainings are compared, in tests/exactness/ and tests/contract/.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Without GPUs the tests are the same on every machine; set the variable to use them.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import pytest
import tensorflow as tf
from helpers.cpu_replicas import summed_as_on_gpus
from helpers.one_device import optimize

from keras_multigpu import replicas

# GPUs sum by TensorFlow's collectives, and so do logical CPU devices in tests, except that users'
# CPUs sum on one of them, which takes less processor time. KMG_SUMS=one_device tests that.
SUMS = os.environ.get("KMG_SUMS", "collectives")
cross_device_ops = replicas._cross_device_ops

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)

# Objects that live now, or after a module of tests, are not worth another look.
gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def garbage():
    """Collect the garbage of a module's graphs once, after its last test."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=SUMS == "collectives", scope="session")
def collectives_on_cpus():
    """Let replicas sum on CPUs as on GPUs, see `SUMS`."""
    with summed_as_on_gpus():
        yield


@pytest.fixture
def sums_on_one_device(monkeypatch):
    """Let replicas sum on CPUs as they do for users."""
    monkeypatch.setattr(replicas, "_strategies", {})
    monkeypatch.setattr(replicas, "_cross_device_ops", cross_device_ops)


@pytest.fixture(autouse=True)
def no_strategy_asked_for(monkeypatch):
    """The strategy that one test asks for is not the default of the next."""
    monkeypatch.setattr(replicas, "_last_asked_for", None)


@pytest.fixture(autouse=QUICK, scope="session")
def untuned_datasets():
    """Switch off TensorFlow's autotuner: an iterator waits for it before it ends.

    The tuner may sleep as long as the iterator has lived. A module of tests that left many
    iterators half read waited for up to 40 seconds.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    with pytest.MonkeyPatch.context() as patch:
        # TensorFlow adds its own options here, before it makes an iterator.
        patch.setattr(
            tf.data.Dataset, "_apply_debug_options", lambda data: data.with_options(options)
        )
        yield


@pytest.fixture(autouse=QUICK, scope="session")
def unoptimized_graphs():
    """Leave graphs unoptimized: most run a few times, and optimizing them doubles the time."""
    optimize(False)


@pytest.fixture
def python_sees_rows(monkeypatch):
    """Let Python code in a model see each replica's rows; see `rows_in_python`."""
    from helpers.rows_in_python import let_python_see_rows

    let_python_see_rows(monkeypatch)


@pytest.fixture
def optimized_graphs():
    """Optimize graphs as a user's program does, also in `make quick` and `make test`."""
    optimize(True)
    yield
    optimize(not QUICK)


@pytest.fixture
def graphs_that_run_twice():
    """Leave graphs unoptimized in a test of every layer or operation, also in `make test-all`."""
    optimize(False)
    yield
    optimize(not QUICK)
