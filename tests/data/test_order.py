"""The order of examples: a full shuffle by arithmetic, the same for all workers."""

import itertools
import json
import os
import subprocess
import sys
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from helpers.processes_left import PATIENCE

import keras_multigpu as kmg


def epoch(size, number=0, y=None, **settings):
    """The numbers below `size` as an epoch has them."""
    batches = kmg.data.from_arrays(np.arange(size), y, global_batch_size=300 * size, **settings)
    (batch,) = batches.epoch(number)
    return (batch if y is None else batch[0]).numpy()


@pytest.mark.parametrize("size", [1, 2, 3, 29, 100, 1009, 65536])
def test_every_example_exactly_once(size):
    for number in (0, 17):
        assert sorted(epoch(size, number, seed=3)) == list(range(size))


def test_seed_and_epoch_decide_the_order():
    seeds = (0, 1, -1, 2**40)
    orders = {tuple(epoch(100, number, seed=seed)) for seed in seeds for number in range(5)}
    assert len(orders) == 20
    np.testing.assert_array_equal(epoch(100, 4, seed=1), epoch(100, 4, seed=1))


def test_epochs_are_not_correlated_and_neighbours_do_not_stay_neighbours():
    orders = [epoch(10_000, number, seed=1) for number in range(6)]
    places = [*map(np.argsort, orders), np.arange(10_000)]
    # Four standard deviations of the correlation of 10,000 independent pairs.
    assert np.abs(np.corrcoef(places) - np.eye(7)).max() < 0.04
    # In a fair shuffle, about two of 10,000 pairs of neighbours stay neighbours.
    assert all((np.abs(np.diff(order)) == 1).sum() < 12 for order in orders)


def test_short_lists_take_every_order_about_equally_often():
    """Every permutation occurs, and none three times as often as another."""
    batches = kmg.data.from_arrays(np.arange(3), global_batch_size=3)
    orders = Counter(tuple(batch.numpy()) for batch in batches.epochs().take(300))
    assert len(orders) == 6
    assert max(orders.values()) < 3 * min(orders.values())


def test_a_billion_examples_cost_nothing():
    numbers = kmg.data.from_source(range(10**9), global_batch_size=256)
    tracemalloc.start()
    (last,) = numbers.epoch(5, start=10**9 - 256)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(last.numpy().tolist())) == 256
    assert peak < 10_000_000


CLASSES = np.repeat([4, 0, 9], [5, 70, 25])


@pytest.mark.parametrize("shuffle", [True, False])
def test_oversampling_makes_classes_equal(shuffle):
    """Each class has 70 positions; the counts of its examples differ by at most one."""
    examples = epoch(100, 1, CLASSES, balance="oversample", shuffle=shuffle)
    assert Counter(CLASSES[examples].tolist()) == {4: 70, 0: 70, 9: 70}
    times = np.bincount(examples)
    assert {*times[:5]} == {14} and {*times[5:75]} == {1}
    assert sorted(times[75:]) == [2] * 5 + [3] * 20
    # Also within a class, the order is random.
    assert (np.diff(examples[CLASSES[examples] == 0]) < 0).any() == shuffle
    # Any six positions from the start of a block on hold each of the three classes twice.
    for start in range(0, 204, 3):
        part = CLASSES[examples[start : start + 6]]
        assert Counter(part.tolist()) == {4: 2, 0: 2, 9: 2}


def drawn(number=0, **settings):
    """The examples of an epoch, each with its seeds for random draws."""
    settings = {"global_batch_size": 300, "augment": lambda x, seeds: (x, seeds), **settings}
    (((x, seeds), _),) = kmg.data.from_arrays(np.arange(100), CLASSES, **settings).epoch(number)
    return [(int(example), *map(int, pair)) for example, pair in zip(x, seeds, strict=True)]


def test_draws_depend_on_seed_epoch_example_and_repetition():
    first = drawn()
    assert len({pair[1:] for pair in first}) == 100
    assert sorted(first) == sorted(drawn(shuffle=False))
    for other in (drawn(1), drawn(seed=1)):
        assert not {*first} & {*other}
    # With oversampling an example that comes again has other draws.
    assert len({*drawn(balance="oversample")}) == 210


WORKER = """
import json, sys
sys.modules["cv2"] = None
import numpy as np
import keras_multigpu as kmg
import keras_multigpu.data.decoding.decoder

worker, workers = int(sys.argv[1]), int(sys.argv[2])
numbers = np.arange(29)
batches = kmg.data.from_arrays(numbers, numbers % 3, global_batch_size=8, seed=5)
part = batches.epoch(3, shard=(worker, workers))
print(json.dumps([batch.numpy().tolist() for batch, _ in part]))
"""


@pytest.mark.slow
def test_workers_agree_on_the_batches_without_talking():
    """Another process, with other hashes and without OpenCV, reads the third part of three."""
    command = [sys.executable, "-P", "-c", WORKER, "2", "3"]
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    ended = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, timeout=PATIENCE, check=True
    )
    numbers = np.arange(29)
    batches = kmg.data.from_arrays(numbers, numbers % 3, global_batch_size=8, seed=5)
    shares = [batches.epoch(3, shard=(worker, 3)) for worker in range(2)]
    parts = [[batch.numpy().tolist() for batch, _ in share] for share in shares]
    parts.append(json.loads(ended.stdout))
    whole = [batch.numpy().tolist() for batch, _ in batches.epoch(3)]
    assert [list(itertools.chain(*part)) for part in zip(*parts, strict=True)] == whole
    assert sorted(itertools.chain(*whole)) == list(range(29))
