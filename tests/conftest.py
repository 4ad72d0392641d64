"""TensorFlow starts here once, with eight logical CPU devices for all tests and no GPU."""

import collections
import gc
import os
import sys
from pathlib import Path

# For this process, and those that tests start.
sys.path.append(str(Path(__file__).parent / "helpers" / "quick_start"))
os.environ["PYTHONPATH"] = os.pathsep.join(
    [sys.path[-1], *filter(None, [os.environ.get("PYTHONPATH")])]
)
import fast_keras  # noqa: F401

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
# `make quick` and `make test` do without what costs a tenth of the time or more and hardly ever
# finds a mistake; `make test-all` has it.
# Whatever else runs tests runs what users run.
QUICK = os.environ.get("KMG_QUICK") == "1"
if QUICK:
    # To look for operations that oneDNN has as well takes a twentieth.
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# The same tests on every machine; set the variable to see the GPUs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")

import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS

from keras_multigpu import replicas

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 8
)

# What is alive now, or after a module of tests, is no garbage.
gc.freeze()


def pytest_collection_modifyitems(config, items):
    """Leave what is marked for `make test-all` to it, and to whoever names the test."""
    if ALL_REPLICAS or any("::" in argument for argument in config.args):
        return
    rows, kept, left = collections.Counter(), [], []
    for item in items:
        mark = item.get_closest_marker("in_test_all")
        rows[item.function] += 1
        is_left = mark and rows[item.function] > mark.kwargs.get("after", 0)
        (left if is_left else kept).append(item)
    config.hook.pytest_deselected(items=left)
    items[:] = kept


@pytest.fixture(autouse=True, scope="module")
def garbage():
    """Let the garbage of a module's graphs be found once, when it is through."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_strategy_asked_for(monkeypatch):
    """What a test asks for is not the default of the next one."""
    monkeypatch.setattr(replicas, "_last_asked_for", None)


@pytest.fixture(autouse=QUICK, scope="session")
def untuned_datasets():
    """The end of an iterator waits for TensorFlow's tuner, which may sleep as long as it has lived.

    A module of tests that left many half read waited for up to 40 seconds.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    with pytest.MonkeyPatch.context() as patch:
        # Where TensorFlow itself adds options, to a dataset of which an iterator is made.
        patch.setattr(
            tf.data.Dataset, "_apply_debug_options", lambda data: data.with_options(options)
        )
        yield


@pytest.fixture(autouse=QUICK, scope="session")
def unoptimized_graphs():
    """Graphs that run a few times only: to optimise them takes as long as all the rest."""
    optimize(False)


@pytest.fixture
def python_sees_rows(monkeypatch):
    """Python in a model sees the rows of each replica, see `rows_in_python`."""
    from helpers.rows_in_python import let_python_see_rows

    let_python_see_rows(monkeypatch)


@pytest.fixture
def optimized_graphs():
    """Graphs as a user's program has them, by `make quick` and `make test` as well."""
    optimize(True)
    yield
    optimize(not QUICK)


@pytest.fixture
def graphs_that_run_twice():
    """Of every layer, or operation: to optimise them takes as long as all the rest."""
    optimize(False)
    yield
    optimize(not QUICK)


def optimize(graphs):
    """Let TensorFlow optimise graphs or not."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not graphs})
