"""Real worker processes train exactly as one device does: rows of `exactness/cases.py`.

`make test` runs the most telling rows. With the environment variable `KMG_ALL_REPLICAS=1` (`make
test-all`), every row runs on 2 workers with one device and with two, and on 3 workers.
"""

import pickle
from pathlib import Path

import numpy as np
import pytest
from exactness.cases import CASES
from exactness.runs import Outcome, alone, differences, run
from helpers.all_replicas import ALL_REPLICAS
from worker_processes import run_workers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    ),
    pytest.mark.filterwarnings("ignore:Gradients do not exist for variables:UserWarning"),
]

SCRIPT = Path(__file__).with_name("table_of_workers.py")
BY_NAME = {case.name: case for case in CASES}
TELLING = {
    # An uneven batch and an empty worker, both with a loss and metrics of rows; a loss and metrics
    # of the whole batch; sparse gradients; several steps in one graph; calls for XLA;
    # sums that wait for an update. Then
    # an odd number of workers, with statistics. `test_callbacks_of_workers.py` has a custom loss.
    (2, 2, ""): [
        "batch smaller than the replicas",
        "R2Score, root of the mean",
        "embedding",
        "steps_per_execution",
        "jit_compile",
        "gradient accumulation",
        "sharded optimizer, clipped by the norm of all",
    ],
    (2, 2, "weights"): ["masked words, LSTM"],
    (3, 1, ""): ["BatchNorm, empty replicas"],
}
if ALL_REPLICAS:
    # BackupAndRestore fails on purpose and continues in the same process, which no worker can.
    mirrored = [c.name for c in CASES if c.kind == "mirrored" and c.name != "BackupAndRestore"]
    TELLING = dict.fromkeys([(2, 1, ""), (2, 2, ""), (2, 2, "weights"), (3, 1, "")], mirrored)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The outcome of each row on each worker; a group of workers runs once."""
    known = {}

    def of(workers, devices, shard):
        place = workers, devices, shard
        if place not in known:
            folder, names = tmp_path_factory.mktemp("workers"), TELLING[place]
            environment = {"KERAS_MULTIGPU_CPU_DEVICES": str(devices)}
            run_workers(SCRIPT, workers, [folder, shard, *names], environment=environment)
            paths = [folder / f"{index}.pickle" for index in range(workers)]
            known[place] = [pickle.loads(path.read_bytes()) for path in paths]
        return known[place]

    return of


@pytest.mark.parametrize(
    ("workers", "devices", "shard", "name"),
    [(*place, name) for place, names in TELLING.items() for name in names],
)
def test_workers_end_where_one_device_does(found, workers, devices, shard, name):
    first, *others = [of_worker[name] for of_worker in found(workers, devices, shard)]
    assert isinstance(first, dict), first
    for other in others:
        assert_same(first, other)
    expected = run(BY_NAME[name], alone)
    differing = {
        what: difference
        for what, difference in differences(expected, Outcome(first, None)).items()
        if difference > BY_NAME[name].tolerance
    }
    assert not differing


def test_workers_make_weights_in_parts_alike(found):
    first, other = [of_worker["made apart"] for of_worker in found(2, 2, "weights")]
    assert_same(first, other)


def assert_same(first, other):
    assert other.keys() == first.keys()
    assert all(np.array_equal(first[key], other[key], equal_nan=True) for key in first)
