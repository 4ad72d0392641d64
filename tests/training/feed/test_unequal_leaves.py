"""Batches whose leaves have different lengths: refused with the names of both, or left to Keras.

The model takes labelled and unlabelled rows, as semi-supervised ones do, and Keras trains it.
"""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from cpu_replicas import replicas_of

import keras_multigpu as kmg
from keras_multigpu.training.feed import cutter
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.shares import joined_shares, normalized

LABELLED, UNLABELLED = 5, 14
NAMED = r"`x\['labelled'\]` has 5 rows.*`x\['unlabelled'\]` has 14.*Expected.*one for each example"


class Both(keras.Model):
    """A prediction for each labelled row, moved by the mean of the unlabelled ones."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x):
        """The predictions."""
        moved = keras.ops.mean(self.dense(x["unlabelled"]), axis=0)
        return self.dense(x["labelled"]) + moved


def rows_of(count):
    """Rows of different numbers."""
    return np.arange(3.0 * count, dtype="float32").reshape(count, 3) / 64


def batch(labelled=LABELLED, unlabelled=UNLABELLED):
    """One batch of arrays."""
    x = {"labelled": rows_of(labelled), "unlabelled": rows_of(unlabelled)}
    return x, np.ones((labelled, 1), "float32")


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return batch()


def zipped(drop_remainder):
    """Batches of both kinds of rows side by side, whose sizes are known or not."""

    def of(rows, size):
        one = tf.data.Dataset.from_tensor_slices(rows_of(rows))
        return one.batch(size, drop_remainder=drop_remainder)

    both = tf.data.Dataset.zip(of(4 * LABELLED, LABELLED), of(4 * UNLABELLED, UNLABELLED))
    return both.map(
        lambda one, other: ({"labelled": one, "unlabelled": other}, tf.ones_like(one)[:, :1])
    )


DATA = {
    "sizes unknown": lambda: zipped(False),
    "sizes known": lambda: zipped(True),
    "endless": lambda: zipped(False).repeat(),
    "generator": lambda: (batch() for _ in itertools.count()),
    "PyDataset": Sequence,
}


def compiled(replicas):
    """The model, not built yet."""
    model = kmg.distribute(Both(), replicas_of(replicas))
    model.compile("sgd", "mse", steps_per_execution=2)
    return model


@pytest.fixture(scope="module")
def model():
    """One on two replicas, for calls that change nothing."""
    return compiled(2)


@pytest.mark.parametrize("made", DATA.values(), ids=DATA)
def test_both_leaves_are_named(model, made):
    """In `fit`, as what validates, in `evaluate` and `predict`."""
    equal = zipped(False).map(lambda x, y: (dict.fromkeys(x, x["labelled"]), y))
    for call in (
        lambda: model.fit(made(), steps_per_epoch=2, verbose=0),
        lambda: model.fit(equal, validation_data=made(), validation_steps=2, verbose=0),
        lambda: model.evaluate(made(), steps=2, verbose=0),
        lambda: model.predict(made(), steps=2, verbose=0),
    ):
        with pytest.raises(ValueError, match=NAMED):
            call()


def test_single_batches_are_named(model):
    """And those that a strategy has dealt out."""
    for call in (model.train_on_batch, model.test_on_batch, lambda x, y: model.predict_on_batch(x)):
        with pytest.raises(ValueError, match=NAMED):
            call(*batch())
    with pytest.raises(ValueError, match=NAMED):
        joined_shares([normalized(batch(2, 2)), normalized(batch())])


def test_arrays_of_different_lengths_are_named_by_keras(model):
    """Whatever the number of replicas."""
    for each in (model, compiled(1)):
        with pytest.raises(ValueError, match="sizes: 5, 14"):
            each.fit(*batch(), verbose=0)


@pytest.mark.parametrize("copied", [False, True])
def test_the_first_batch_with_other_lengths_is_named(copied, monkeypatch):
    """Also where devices have memory of their own, and after batches that were in order."""
    monkeypatch.setattr(cutter, "has_own_memory", lambda device: copied)
    rows = [(4, 4), (3, 3), (3, 2)]
    data = tf.data.Dataset.from_generator(
        lambda: ((np.ones((x, 1)), np.ones((y, 2))) for x, y in rows),
        output_signature=(tf.TensorSpec((None, 1)), tf.TensorSpec((None, 2))),
    )
    feed = Feed(Cutter(2), data)
    read = []
    with pytest.raises(ValueError, match=r"`x` has 3 rows.*`y` has 2\."), feed.reading():
        for _, group in feed.epoch(1):
            read += [int(shares.rows[0].global_batch_size) for shares in group.shares]
    assert read == [4, 3]


@pytest.mark.parametrize(
    ("name", "eager"), [*((name, False) for name in DATA), ("sizes unknown", True)]
)
def test_one_replica_does_as_keras(name, eager):
    """The same logs and predictions."""
    made = DATA[name]
    results = []
    for distribute in (False, True):
        keras.utils.set_random_seed(1)
        model = compiled(1) if distribute else Both()
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=eager)
        history = model.fit(made(), steps_per_epoch=2, shuffle=False, verbose=0).history
        scores = model.evaluate(made(), steps=2, verbose=0)
        results.append((history, scores, model.predict(made(), steps=2, verbose=0)))
    for ours, theirs in zip(*map(keras.tree.flatten, results), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("name", ["sizes unknown", "sizes known", "generator"])
def test_micro_batches_of_one_replica_name_both(name, jit):
    """They cut as replicas do."""
    model = compiled(1)
    model.compile("sgd", "mse", micro_batches=2, jit_compile=jit)
    with pytest.raises(ValueError, match=NAMED):
        model.fit(DATA[name](), steps_per_epoch=2, verbose=0)


def test_a_batch_that_memory_would_have_cut_is_named():
    """With `micro_batches="auto"` it is whole at first."""

    class Hungry(Both):
        def call(self, x, training=False):
            if training:
                raise tf.errors.ResourceExhaustedError(None, None, "no memory")
            return super().call(x)

    model = kmg.distribute(Hungry(), replicas_of(1))
    model.compile("sgd", "mse", micro_batches="auto")
    with pytest.raises(ValueError, match=NAMED):
        model.fit(zipped(False), verbose=0)


def test_what_replicas_do_not_share_may_have_any_length():
    """Scalars, a single row and what is missing; weights may have another rank."""
    x = {"a": np.ones((6, 2), "float32"), "one": np.ones((1, 3), "float32"), "scalar": 2.0}
    spec = (
        {"a": tf.TensorSpec((None, 2)), "one": tf.TensorSpec((1, 3)), "scalar": tf.TensorSpec(())},
        tf.RaggedTensorSpec((None, None), tf.float32),
        tf.TensorSpec((None,)),
    )
    whole = (x, tf.ragged.constant([[1.0]] * 6), np.ones(6, "float32"))
    data = tf.data.Dataset.from_generator(lambda: iter([whole]), output_signature=spec)
    (waiting,) = Cutter(4).ahead(data)
    for shares in (waiting, Cutter(4)(normalized(whole))):
        lengths = [(len(rows.x["a"]), len(rows.x["one"])) for rows in shares.rows]
        assert lengths == [(2, 1), (2, 1), (1, 1), (1, 1)]
