"""How datasets, arrays and iterators are read: sizes and batches by hand, no model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of

from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.feed.sources import DatasetSource, PythonSource, whole
from keras_multigpu.training.shares import as_tensor, join_shares, normalized

SEVEN = np.arange(7.0)
ARGUMENTS = {
    "y": None,
    "sample_weight": None,
    "batch_size": None,
    "steps_per_epoch": None,
    "shuffle": False,
    "class_weight": None,
}


def source_of(x, **arguments):
    return DatasetSource(Cutter(2), **{**ARGUMENTS, "x": x, **arguments})


def numbers(source):
    return [
        batch_of(shares, source.spec)[0].numpy().ravel().tolist() for shares in source.iterator()
    ]


def batch_of(shares, spec=None):
    return join_shares(shares.rows, spec or shares.spec)


def dataset(size=3, drop_remainder=False):
    return tf.data.Dataset.from_tensor_slices(SEVEN).batch(size, drop_remainder=drop_remainder)


@pytest.mark.parametrize(
    ("make", "size", "batches", "examples"),
    [
        (lambda: source_of(SEVEN, batch_size=3), 3, 3, 7),
        (lambda: source_of(SEVEN), 32, 1, 7),
        (lambda: source_of(dataset()), 3, 3, 7),
        (lambda: source_of(dataset(drop_remainder=True)), 3, 2, None),
        (lambda: source_of(dataset().filter(lambda x: True)), 3, None, None),
    ],
)
def test_a_source_knows_the_size_of_its_data(make, size, batches, examples):
    source = make()
    assert (source.batch_size, source.num_batches) == (size, batches)
    if examples is not None:
        assert source.num_examples == examples
    assert source.is_countable == (batches is not None)


@pytest.mark.parametrize(
    ("x", "expected", "batches"),
    [
        (SEVEN, [[0, 1, 2, 3], [4, 5, 6]], 2),
        (dataset(), [[0, 1, 2, 3], [4, 5, 6]], 2),
        # How many examples it has dropped nobody knows.
        (dataset(drop_remainder=True), [[0, 1, 2, 3]], None),
    ],
    ids=["arrays", "dataset", "dropping"],
)
def test_batches_are_resized(x, expected, batches):
    """Those of arrays and of datasets. `first_batches` does not change the source."""
    source = source_of(x, **({"batch_size": 3} if x is SEVEN else {}))
    before = numbers(source)
    first = [batch[0].numpy().ravel().tolist() for batch in source.first_batches(4)]
    assert first == expected and numbers(source) == before
    source.resize(4, epoch=0)
    assert numbers(source) == expected
    assert source.batch_size == 4 and source.num_batches == batches


class Pairs(keras.utils.PyDataset):
    """Batches of a fixed size."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return (np.full((2, 1), index),)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: source_of(Pairs()), "data='Pairs', steps_per_epoch=None"),
        (lambda: source_of(SEVEN, batch_size=3, steps_per_epoch=2), "steps_per_epoch=2"),
        (lambda: PythonSource(Cutter(2), lambda: iter([]), None), "data='a generator'"),
    ],
)
def test_batches_that_others_made_cannot_be_resized(make, message):
    """A `PyDataset`, a number of steps per epoch, a generator."""
    source = make()
    with pytest.raises(ValueError, match=f"already batched.*Received: .*{message}"):
        source.resize(4, 0)


def test_a_python_iterator_is_read_lazily():
    taken = []

    def batches():
        for number in range(3):
            taken.append(number)
            yield (np.full((1, 1), number),)

    made = batches()
    source = PythonSource(Cutter(2), lambda: made, None)
    x, y, weight = batch_of(next(source.iterator()))
    assert int(x[0, 0]) == 0 and y is None and weight is None and taken == [0]
    assert numbers(source) == [[1], [2]]
    with pytest.raises(ValueError, match="already batched"):
        source.first_batches(None)


def test_class_weights_become_sample_weights():
    weights = {0: 0.5, 1: 4.0}
    labels = np.array([1, 0, 1])
    for y in (labels, labels[:, None], np.eye(2)[labels]):
        batches = [(np.ones((3, 1)), y)]
        source = PythonSource(Cutter(2), lambda batches=batches: iter(batches), weights)
        assert batch_of(next(source.iterator()))[2].numpy().tolist() == [4, 0.5, 4]


@pytest.mark.parametrize(
    ("leaf", "dtype"),
    [
        (np.ones(2, "float64"), "float32"),
        (np.ones(2, "float16"), "float16"),
        ([1.5, 2.5], "float32"),
        ([1, 2], "int64"),
        (np.ones(2, "uint8"), "uint8"),
        (np.array([True, False]), "bool"),
        (np.array(["a", "b"]), "string"),
        (2.5, "float32"),
    ],
)
def test_arrays_become_tensors(leaf, dtype):
    assert as_tensor(leaf).dtype == dtype


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_distributed_dataset_is_put_together(replicas):
    """And cut again, for replicas that need not be those of its strategy."""
    data = replicas_of(replicas).experimental_distribute_dataset(dataset())
    read = [execution.batches for execution in Feed(Cutter(2), data).epoch(1)]
    found = [shares for batches in read for shares in batches]
    assert [[rows.data[0].numpy().tolist() for rows in shares.rows] for shares in found] == [
        [[0, 1], [2]],
        [[3, 4], [5]],
        [[6], []],
    ]
    assert {int(rows.global_batch_size) for rows in found[0].rows} == {3}


def test_parts_of_a_strategy_are_put_together_where_their_lengths_differ():
    """A leaf of one row belongs to the examples of all parts."""

    def part(labelled, unlabelled):
        x = {"labelled": np.full((labelled, 3), labelled), "unlabelled": np.ones((unlabelled, 3))}
        return normalized((x, np.ones((labelled, 1)), np.ones(1, "float32")))

    spread = replicas_of(2).experimental_distribute_values_from_function

    def of_each(*leaves):
        return spread(lambda context: leaves[context.replica_id_in_sync_group])

    together = whole(keras.tree.map_structure(of_each, part(2, 0), part(3, 4)))
    assert [len(leaf) for leaf in keras.tree.flatten(together)] == [5, 4, 5, 1]
    assert together[0]["labelled"][:, 0].numpy().tolist() == [2, 2, 3, 3, 3]
