"""Callbacks on several workers: all find the same and act alike; one writes."""

import pickle
import re
from pathlib import Path

import callbacks_of_workers
import numpy as np
import pytest
from worker_processes import run_workers

import keras_multigpu as kmg

pytestmark = pytest.mark.slow

SCRIPT = Path(callbacks_of_workers.__file__)


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("workers")
    callbacks_of_workers.draw_photos(folder)
    folder.joinpath("objects", "run").mkdir(parents=True)
    outputs = run_workers(SCRIPT, 2, [folder])
    paths = [folder / f"{index}.pickle" for index in range(2)]
    return [pickle.loads(path.read_bytes()) for path in paths], outputs, folder


def test_all_workers_find_what_one_process_finds(workers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="not finite"):
        expected, _ = callbacks_of_workers.measured(kmg.strategy(devices=2))
    looked, _ = callbacks_of_workers.looked_at(kmg.strategy(devices=2))
    of_data, _ = callbacks_of_workers.read(workers[2], kmg.strategy(devices=2))
    expected |= looked | of_data
    for found in workers[0]:
        for name, values in expected.items():
            for what, value in values.items():
                got = found["found"][name][what]
                np.testing.assert_allclose(got, value, 2e-5, 1e-7, err_msg=f"{name}: {what}")
        assert found["devices"] == ("CPU:0 of worker 1",)
        assert found["looked"]["devices"] == ["CPU:0 of worker 1"]
        assert found["found"]["finder"]["sizes"] == [3]


def test_each_image_is_decoded_by_one_worker(workers):
    """By the one whose replica uses it: of batches of 4, 4 and 3, one has 2, 2 and 2.

    The other has 2, 2 and 1, and decodes 2 more: in an odd batch, an augmentation may mix the
    last image with the pair before it.
    """
    decoded = [found["decoded"] for found in workers[0]]
    assert list(map(len, decoded)) == [6, 7]
    assert len({*decoded[0], *decoded[1]}) == 11


def test_times_of_all_replicas_are_known_to_all_workers(workers):
    """To the last digit, although each worker measures its own."""
    (chief, other), *_ = workers
    assert chief["looked"]["timed"] == other["looked"]["timed"]
    step, wait, compute = chief["looked"]["timed"]
    assert min(step) > 0 and min(compute) > 0 and len(set(wait)) == 2


def test_only_the_chief_writes(workers):
    (chief, other), (printed, of_other), _ = workers
    names = {re.sub(r"events.*", "events", name) for name in chief["files"]}
    assert names >= {
        "3.weights.h5",
        "best.keras",
        "log.csv",
        "speed.json",
        "board/train/events",
        "evaluated/validation/events",
    }
    assert other["files"] == []
    assert [one["written"]["reported"] for one in (chief, other)] == [2, 0]
    for line in (
        "LearningRateFinder:",
        "BatchSizeFinder:",
        "Throughput of",
        "Epoch 2/2",
        "not finite",
    ):
        assert line in printed
        assert line not in of_other
    assert [one["looked"]["warnings"] for one in (chief, other)] == [1, 0]


def test_all_workers_resume_from_a_backup_and_from_a_bucket(workers):
    for found in workers[0]:
        written = found["written"]
        assert written["epochs resumed"] == 1
        assert written["found in the bucket"] == "bucket://run/checkpoint-000001.kmg"
        for name in ("resumed", "resumed from the bucket"):
            for resumed, expected in zip(written[name], written["expected"], strict=True):
                np.testing.assert_array_equal(resumed, expected)
    names = sorted(path.name for path in (workers[2] / "objects" / "run").iterdir())
    assert names == ["checkpoint-000001.kmg", "checkpoint-000002.kmg", "lock"]
    assert not workers[0][0]["written"]["backup is left"]


def test_a_step_takes_few_exchanges(workers):
    """A single one carries the sums, and checks that all have read the same batch."""
    (plain, normalized), of_other = (found["exchanges"] for found in workers[0])
    assert [plain, normalized] == of_other
    # Five gradients, the sums of the loss and of the metric, and three numbers of the batch.
    assert plain == (1, 4 * (5 + 2 + 3))
    # Eight more gradients, and earlier the sums of four statistics of each feature.
    assert normalized == (2, 4 * (13 + 2 + 3 + 4 * 4))


def test_all_workers_shuffle_arrays_in_the_same_order(workers):
    """Each of 1, 2, 4, ... comes once in an epoch, although workers have different seeds."""
    found, other = (found["shuffled"][0] for found in workers[0])
    assert found == other
    assert found["means"] == [(2**16 - 1) / 16] * 2
    assert len({15 / 4, *found["first batches"]}) == 3


def test_with_the_same_seed_workers_shuffle_arrays_as_one_process(workers):
    expected = callbacks_of_workers.orders(lambda model: model, 5)
    assert [found["shuffled"][1] for found in workers[0]] == [expected] * 2
