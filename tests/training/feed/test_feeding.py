"""Which batches each epoch gets, for every kind of data: by hand, no model."""

import warnings

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

from keras_multigpu.training.feed import feed as feeding
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.shares import normalized


def Feed(data, **options):
    return feeding.Feed(Cutter(2), data, **options)


def numbered(count):
    """Batches that contain their number."""
    return ((np.full((1, 1), number, "float32"),) for number in range(count))


def read(feed, epochs, group_size=1):
    """The numbers of each epoch's batches, and of warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        numbers = [
            [
                int(shares.rows[0].data[0][0, 0])
                for execution in feed.epoch(group_size)
                for shares in execution.batches
            ]
            for _ in range(epochs)
        ]
    assert all("ran out of data" in str(warning.message) for warning in caught)
    return numbers, len(caught)


@pytest.mark.parametrize(
    ("batches", "steps", "expected", "warned"),
    [
        (6, 2, [[0, 1], [2, 3], [4, 5]], 0),
        (5, 2, [[0, 1], [2, 3], [4]], 1),
        (2, 2, [[0, 1], [], []], 2),
        (3, None, [[0, 1, 2], [], []], 2),
    ],
)
@pytest.mark.parametrize("group_size", [1, 4])
def test_a_generator_is_read_from_epoch_to_epoch(batches, steps, expected, warned, group_size):
    feed = Feed(numbered(batches), steps=steps)
    assert read(feed, 3, group_size) == (expected, warned)
    assert feed.has_come


def test_an_empty_generator_is_an_error():
    """One that ends later is not."""
    feed = Feed(iter([]))
    assert read(feed, 1) == ([[]], 0) and not feed.has_come


class Flow:
    """An endless iterator with a length."""

    def __init__(self):
        self.position = -1

    def __len__(self):
        return 3

    def __iter__(self):
        return self

    def __next__(self):
        self.position += 1
        return (np.full((1, 1), self.position, "float32"),)


@pytest.mark.parametrize(
    ("steps", "expected"), [(None, [[0, 1, 2], [3, 4, 5]]), (2, [[0, 1], [2, 3]])]
)
def test_an_iterator_with_a_length_ends_its_epochs(steps, expected):
    """Unless `steps_per_epoch` is given."""
    assert read(Feed(Flow(), steps=steps), 2) == (expected, 0)


class Numbered(keras.utils.PyDataset, Flow):
    """The same as a `PyDataset`, as the flows of Keras's `ImageDataGenerator` are."""

    def __init__(self):
        super().__init__()
        Flow.__init__(self)

    def __getitem__(self, index):
        return (np.full((1, 1), index, "float32"),)


def test_a_py_dataset_is_read_by_index_although_it_is_an_iterator():
    """So each epoch is the same, whatever `__next__` would return."""
    assert read(Feed(Numbered()), 2) == ([[0, 1, 2], [0, 1, 2]], 0)


def test_a_dataset_that_ends_early_starts_again():
    data = tf.data.Dataset.range(3).map(lambda i: (tf.reshape(i, (1, 1)),))
    for known in (data, data.filter(lambda x: True)):
        assert read(Feed(known, steps=2), 3) == ([[0, 1], [2], [0, 1]], 1)


def shuffled():
    """Six batches in a new order for each epoch."""
    return tf.data.Dataset.range(6).shuffle(6, seed=5).map(lambda i: (tf.reshape(i, (1, 1)),))


class Notes(keras.Model):
    """Records the batches of plain Keras."""

    def train_step(self, data):
        self.seen.append(int(data[0][0, 0]))
        return {"loss": 0.0}


@pytest.mark.parametrize(
    "made",
    [
        shuffled,
        lambda: shuffled().filter(lambda x: True),
        lambda: shuffled().cache().shuffle(3, seed=3),
    ],
    ids=["of known length", "of unknown length", "cached between"],
)
def test_a_dataset_that_reshuffles_has_the_same_orders_as_in_keras(made):
    """In a second `fit`, too: Keras makes more iterators than epochs, and each counts."""
    plain, data = Notes(), made()
    plain.seen = []
    plain.compile(run_eagerly=True)
    with warnings.catch_warnings():
        # Keras warns where an epoch of unknown length ends.
        warnings.simplefilter("ignore")
        for epochs in (2, 1):
            plain.fit(data, epochs=epochs, shuffle=False, verbose=0)
    data = made()
    found = [*read(Feed(data, use="training"), 2)[0], *read(Feed(data, use="training"), 1)[0]]
    assert found == np.reshape(plain.seen, (3, 6)).tolist()


@pytest.mark.parametrize("made", [shuffled, lambda: shuffled().cache()], ids=["shuffled", "cached"])
@pytest.mark.slow
def test_a_dataset_resumes_in_the_middle_of_an_epoch(made):
    """In a new dataset, as in another process. Cached data keep the order of the first epoch."""
    whole, _ = read(Feed(made(), use="training"), 3)
    for epoch, step in ((0, 4), (2, 5)):
        feed = Feed(made(), use="training")
        feed.go_to(epoch, step)
        expected = [whole[epoch][step:], *whole[epoch + 1 :]]
        assert read(feed, 3 - epoch)[0] == expected


def test_a_batch_is_inputs_targets_and_weights():
    a, b, c = (np.full((2, 1), value) for value in (1.0, 2.0, 3.0))
    x, y, weight = normalized(((a, b, c),))
    assert [float(leaf[0, 0]) for leaf in x] == [1, 2, 3] and y is None and weight is None
    x, y, weight = normalized((a, b, c))
    assert [float(leaf[0, 0]) for leaf in (x, y, weight)] == [1, 2, 3]
    assert x.dtype == tf.float32


def test_scipy_matrices_become_sparse_tensors():
    matrix = scipy.sparse.csc_matrix([[0.0, 2.0], [1.0, 0.0], [0.0, 3.0]])
    x, _, _ = normalized((matrix, None))
    assert isinstance(x, tf.SparseTensor) and x.dtype == tf.float32
    assert tf.sparse.to_dense(x).numpy().tolist() == [[0, 2], [1, 0], [0, 3]]
