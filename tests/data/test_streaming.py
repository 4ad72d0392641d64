"""Batches of examples that can only be read in order."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.data import Batches
from keras_multigpu.data.pipeline.damage import DamagedExample
from keras_multigpu.data.pipeline.source import Stream
from keras_multigpu.data.streams.stream import buffer_shuffled


class Numbers(Stream):
    """Numbers from zero as inputs and targets; some cannot be read.

    Args:
        count: How many.
        damaged: Which cannot be read.
        weight: Whether they have weights, each ten times the number.
    """

    name = "numbers"

    def __init__(self, count, damaged=(), weight=False):
        self.num_examples = count
        self.names_damage = True
        self.read = []
        self.traced = 0
        self._damaged = damaged
        self._weight = weight

    def examples(self, epoch, shuffle, seed):
        self.traced += 1
        examples = tf.data.Dataset.range(self.num_examples)
        if shuffle:
            examples = buffer_shuffled(examples, epoch, seed, 5)
        return examples.map(lambda i: (i, i + 100, i * 10 if self._weight else None))

    def finish(self, examples, seeds):
        def check(x):
            self.read.extend(x.tolist())
            return np.array(
                [[f"number {i}", "it is odd" if i in self._damaged else ""] for i in x.tolist()],
                object,
            ).reshape(-1, 2)

        damage = tf.numpy_function(check, [examples[0]], tf.string)
        damage.set_shape([None, 2])
        return examples, damage


def batches(count=10, size=4, damaged=(), weight=False, **settings):
    return Batches(Numbers(count, damaged, weight), global_batch_size=size, **settings)


def lists(dataset):
    return [(b[0] if isinstance(b, tuple) else b).numpy().tolist() for b in dataset]


@pytest.mark.parametrize(
    ("remainder", "inputs"),
    [
        ("keep", [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]),
        ("drop", [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_remainder_keeps_or_drops_the_last_batch(remainder, inputs):
    made = batches(shuffle=False, remainder=remainder)
    assert lists(made.epoch(0)) == inputs
    assert len(made) == made.epoch(0).cardinality() == len(inputs)
    assert made.epoch(1, start=5).cardinality() == (1 if remainder == "drop" else 2)
    assert made.epochs().cardinality() == tf.data.INFINITE_CARDINALITY
    for batch in made.epoch(0):
        np.testing.assert_array_equal(batch[1], batch[0] + 100)


def test_a_worker_finishes_only_its_own_share():
    stream = Numbers(10)
    lists(Batches(stream, global_batch_size=4, shuffle=False).epoch(0, shard=(1, 2)))
    assert sorted(stream.read) == [2, 3, 6, 7, 9]


def test_an_epoch_starts_at_any_position():
    made = batches()
    flat = [x for batch in lists(made.epoch(3)) for x in batch]
    stream = Numbers(10)
    later = Batches(stream, global_batch_size=4).epoch(3, start=5)
    assert lists(later) == [flat[5:9], flat[9:]]
    assert sorted(stream.read) == sorted(flat[5:])
    drawn = batches(augment=lambda x, seeds: seeds)
    whole, rest = (sum(lists(drawn.epoch(3, start)), []) for start in (0, 5))
    assert rest == whole[5:] and len({*map(tuple, whole)}) == 10


def test_endless_reading_starts_at_the_end_of_an_epoch():
    """A run that stopped exactly at the end of an epoch continues with the next one."""
    made = batches()
    assert lists(made.epochs(0, 10).take(3)) == lists(made.epoch(1))


@pytest.mark.parametrize("settings", [{"count": 0}, {"count": 3, "remainder": "drop"}])
def test_an_epoch_without_batches_is_an_error(settings):
    made = batches(count=1)
    made = made.with_(remainder=settings.get("remainder", "keep"))
    made.reading().source.num_examples = settings["count"]
    with pytest.raises(tf.errors.OpError, match="numbers ended too soon"):
        next(iter(made.epochs()))


def test_damaged_examples_are_named_or_skipped():
    made = batches(damaged=[5])
    with pytest.raises(tf.errors.OpError, match="number 5 cannot be read: it is odd") as raised:
        lists(made.epoch(0))
    assert isinstance(made.reading().failure_in(raised.value), DamagedExample)
    made = batches(damaged=[1, 5], shuffle=False, on_error="skip")
    with pytest.warns(UserWarning, match=r"Epoch 1 skipped 2 .*number 1 \(it is odd\), num"):
        found = list(made.epoch(0))
    assert lists(found) == [[0, 2, 3], [4, 6, 7], [8, 9]]
    assert sorted(made.quarantine) == [("number 1", "it is odd"), ("number 5", "it is odd")]


@pytest.mark.filterwarnings("ignore:Epoch 1 skipped 1 damaged")
@pytest.mark.parametrize("damaged", [[5], []])
def test_predictions_keep_the_rows_of_damaged_examples(damaged):
    made = batches(damaged=damaged, on_error="skip").reading("prediction")
    rows = [(x.numpy().tolist(), weight.numpy().tolist()) for x, _, weight in made.epoch(0)]
    flags = [float(number not in damaged) for number in range(10)]
    assert rows == [
        ([0, 1, 2, 3], flags[:4]),
        ([4, 5, 6, 7], flags[4:8]),
        ([8, 9], flags[8:]),
    ]
    assert made.marks_missing and not made.may_lose_examples
