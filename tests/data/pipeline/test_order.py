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
from keras_multigpu.data.pipeline.order import Order, draw_seeds


def epoch(order: Order, number: int) -> list[int]:
    return order.examples(number, np.arange(order.length))[0].tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 29, 100, 1009, 65536])
def test_every_example_exactly_once(size):
    for number in (0, 17):
        assert sorted(epoch(Order(size, seed=3), number)) == list(range(size))


def test_without_shuffling_examples_keep_the_sources_order():
    assert epoch(Order(5, seed=1, shuffle=False), 3) == [0, 1, 2, 3, 4]


def test_any_position_of_an_epoch_can_be_computed_alone():
    order = Order(1000, seed=1)
    whole = epoch(order, 2)
    assert order.examples(2, np.array([999, 3, 500]))[0].tolist() == [
        whole[999],
        whole[3],
        whole[500],
    ]


def test_seed_and_epoch_decide_the_order():
    assert epoch(Order(100, seed=1), 4) == epoch(Order(100, seed=1), 4)
    orders = {tuple(epoch(Order(100, seed=s), e)) for s in (0, 1, -1, 2**40) for e in range(5)}
    assert len(orders) == 20


def test_consecutive_epochs_are_not_correlated():
    order = Order(10_000, seed=1)
    places = [np.argsort(epoch(order, number)) for number in range(6)] + [np.arange(10_000)]
    for first in range(7):
        for second in range(first):
            # Four standard deviations of the correlation of 10,000 independent pairs.
            assert abs(np.corrcoef(places[first], places[second])[0, 1]) < 0.04


def test_neighbours_do_not_stay_neighbours():
    """In a fair shuffle, about two of 10,000 pairs of neighbors stay neighbors."""
    order = epoch(Order(10_000, seed=5), 0)
    assert sum(abs(a - b) == 1 for a, b in zip(order, order[1:], strict=False)) < 12


def test_short_lists_take_every_order_about_equally_often():
    """Every permutation occurs, and none three times as often as another."""
    orders = Counter(tuple(epoch(Order(3, seed=seed), 0)) for seed in range(300))
    assert len(orders) == 6
    assert max(orders.values()) < 3 * min(orders.values())


def test_a_billion_examples_cost_nothing():
    Order(10**6, seed=0).examples(0, np.arange(256))
    tracemalloc.start()
    order = Order(10**9, seed=0)
    examples = order.examples(5, np.arange(10**9 - 256, 10**9))[0]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(examples.tolist())) == 256
    assert peak < 1_000_000


CLASSES = np.repeat([4, 0, 9], [5, 70, 25])


@pytest.mark.parametrize("shuffle", [True, False])
def test_oversampling_makes_classes_equal(shuffle):
    """Each class has 70 positions; the counts of its examples differ by at most one."""
    order = Order(100, seed=0, shuffle=shuffle, classes=CLASSES)
    examples = np.array(epoch(order, 1))
    assert order.length == 210
    assert Counter(CLASSES[examples].tolist()) == {4: 70, 0: 70, 9: 70}
    times = Counter(examples.tolist())
    assert {times[i] for i in range(5)} == {14}
    assert {times[i] for i in range(5, 75)} == {1}
    assert sorted(times[i] for i in range(75, 100)) == [2] * 5 + [3] * 20


def test_oversampling_balances_every_part():
    """Six positions from the start of a block hold each of the three classes twice."""
    order = Order(100, seed=0, classes=CLASSES)
    for start in range(0, 204, 3):
        examples, _ = order.examples(0, np.arange(start, start + 6))
        assert Counter(CLASSES[examples].tolist()) == {4: 2, 0: 2, 9: 2}


def test_oversampling_counts_repetitions():
    order = Order(100, seed=0, classes=CLASSES)
    examples, repeats = order.examples(0, np.arange(210))
    seen: Counter[int] = Counter()
    for example, repeat in zip(examples.tolist(), repeats.tolist(), strict=True):
        assert seen[example] == repeat
        seen[example] += 1


def test_draws_depend_on_seed_epoch_example_and_repetition():
    one, none = np.array([7]), np.array([0])
    base = draw_seeds(0, 0, one, none).tolist()
    assert draw_seeds(0, 0, np.array([3, 7]), np.array([0, 0]))[1:].tolist() == base
    others = [
        draw_seeds(1, 0, one, none),
        draw_seeds(0, 1, one, none),
        draw_seeds(0, 0, one + 1, none),
        draw_seeds(0, 0, one, none + 1),
    ]
    assert all(other.tolist() != base for other in others)
    assert draw_seeds(0, 0, one, none).dtype == np.int32
    assert (draw_seeds(0, 0, np.arange(1000), np.zeros(1000, int)) >= 0).all()


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
