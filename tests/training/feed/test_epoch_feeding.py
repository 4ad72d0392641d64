"""Positions of `fit`'s epochs in data that know their epochs: by hand, no model."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.data.pipeline.order import Order, Part, Plan
from keras_multigpu.data.reading import Reading
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.epoch_source import EpochSource, refuse_what_batches_bring
from keras_multigpu.training.feed.sources import Anchor
from keras_multigpu.training.shares import join_shares


def data(count=6, size=2, **settings):
    return kmg.data.from_arrays(
        np.arange(float(count)),
        np.arange(count) % 2,
        **{"global_batch_size": size, "shuffle": False, **settings},
    )


def taken(source, count):
    """The first batches of a new iterator, as numbers."""
    iterator = source.iterator()
    found = [shares for shares, _ in zip(iterator, range(count), strict=False)]
    batches = [join_shares(shares.rows, source.spec) for shares in found]
    return [x.numpy().astype(int).tolist() for x, _, _ in batches]


def test_training_reads_one_epoch_after_another():
    source = EpochSource(Cutter(2), data(4).reading())
    assert (source.num_batches, source.batch_size, source.num_examples) == (2, 2, 4)
    assert source.endless and source.is_countable
    assert taken(source, 3) == [[0, 1], [2, 3], [0, 1]]
    source.start(1, 1)
    assert taken(source, 2) == [[2, 3], [0, 1]]
    source.start(0, 2)  # The end of an epoch is the beginning of the next one.
    assert taken(source, 1) == [[0, 1]]


def rows_alike(rows, expected):
    assert (int(rows.examples), int(rows.global_batch_size)) == (
        int(expected.examples),
        int(expected.global_batch_size),
    )
    for leaf, other in zip(*(tf.nest.flatten(r.data) for r in (rows, expected)), strict=True):
        assert (leaf is None) == (other is None)
        if leaf is not None:
            np.testing.assert_array_equal(leaf, other)


@pytest.mark.slow
def test_a_process_reads_the_rows_of_its_replicas_alone():
    here, batches = range(2, 4), data(11, 4, shuffle=True, balance="class_weight")
    for training, steps in [(True, 6), (False, 9)]:
        reading = batches.reading("training" if training else "evaluation")
        whole = EpochSource(Cutter(4), reading)
        own = EpochSource(Cutter(4, None, here), reading)
        assert own.reads_own_rows
        assert own.spec == whole.spec
        assert own.num_batches == whole.num_batches
        pairs = zip(own.iterator(), whole.iterator(), strict=False)
        for shares, expected in itertools.islice(pairs, steps):
            assert [n for n, rows in enumerate(shares.rows) if rows.data] == list(here)
            for number in here:
                rows_alike(shares.rows[number], expected.rows[number])
            for rows, other in zip(shares.rows, expected.rows, strict=True):
                assert int(rows.examples) == int(other.examples)


def test_rows_of_other_processes_are_not_read():
    plan = Plan(Order(5, seed=0, shuffle=False), 5, "keep")
    for part, expected in [
        (Part(0, 1, 2), [0, 1, 2]),
        (Part(1, 2, 2), [3, 4]),
        (Part(7, 8, 8), []),
        (Part(0, 1, 2, in_pairs=True), [0, 1, 2, 3]),
        (Part(1, 2, 2, in_pairs=True), [2, 3, 4]),
        (Part(4, 5, 5, in_pairs=True), [2, 3, 4]),
        (Part(7, 8, 8, in_pairs=True), []),
    ]:
        assert plan.positions(0, part).tolist() == expected
        assert plan.cuts(0, part).tolist() == [[5, (expected or [5])[0]]]


@pytest.mark.slow
def test_neighbours_are_mixed_across_processes():
    here = range(2, 4)
    images = np.random.default_rng(0).random((7, 4, 4, 3), "float32")
    settings = {"global_batch_size": 5, "augment": kmg.augmentation.Mix(num_classes=7), "seed": 3}
    batches = kmg.data.from_arrays(images, np.arange(7), **settings).reading()
    whole = EpochSource(Cutter(4), batches)
    own = EpochSource(Cutter(4, None, here), batches)
    for shares, expected, _ in zip(own.iterator(), whole.iterator(), range(3), strict=False):
        for number in here:
            rows_alike(shares.rows[number], expected.rows[number])


def test_every_process_reads_streams_strings_and_skipping_data_whole():
    stream = kmg.data.from_dataset(tf.data.Dataset.range(6), global_batch_size=2)
    texts = kmg.data.from_arrays(np.array(["a", "b"]), global_batch_size=2)
    for batches in (stream, texts, data(on_error="skip")):
        assert not EpochSource(Cutter(2, None, range(1)), batches.reading()).reads_own_rows


def test_evaluation_reads_one_epoch():
    source = EpochSource(Cutter(2), data().reading("evaluation"))
    assert not source.endless
    source.start(5, 1)
    for _ in range(2):
        assert taken(source, 9) == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize(
    ("epochs", "steps", "expected"),
    [(2, None, 6), (1, None, 3), (2, 2, 6), (3, 2, 6), (4, 2, 9)],
)
@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_read_after_the_last_epoch(epochs, steps, expected, stream):
    """Not even ahead; only the rest of an epoch of the data in which `fit` ends."""
    dataset = tf.data.Dataset.range(6).map(lambda n: (tf.reshape(n, [1]), n))
    as_stream = kmg.data.from_dataset(dataset, global_batch_size=2, shuffle=False)
    reading = (as_stream if stream else data()).reading()
    source = EpochSource(Cutter(2), reading, steps=steps, epochs=epochs)
    assert len(taken(source, 99)) == expected
    source.start(epochs - 1, 1)
    done = (epochs - 1) * (steps or 3) + 1
    assert len(taken(source, 99)) == expected - done


def test_the_dataset_of_a_position_is_made_once():
    made = []

    class Counted(Reading):
        def epochs(self, *position, **end):
            made.append(position)
            return super().epochs(*position, **end)

    reading = data().reading()
    source = EpochSource(Cutter(2), Counted(reading.original, reading.settings))
    for step in (0, 0, 1, 1):
        source.start(0, step)
        taken(source, 1)
    assert made == [(0, 0), (0, 2)]


def test_short_epochs_continue_where_the_last_ended():
    """With two steps of three the second epoch begins with the third batch."""
    source = EpochSource(Cutter(2), data().reading(), steps=2)
    starts = []
    for epoch in range(4):
        source.start(epoch)
        starts += taken(source, 1)
    assert starts == [[0, 1], [4, 5], [2, 3], [0, 1]]


def test_another_batch_size_leaves_out_no_example():
    source = EpochSource(Cutter(2), data(9).reading(), steps=2)
    source.resize(3, epoch=1)
    source.start(1)
    assert source.anchor == Anchor(1, 0, 4) and source.num_batches == 3
    assert taken(source, 3) == [[4, 5, 6], [7, 8], [0, 1, 2]]
    source.start(2)
    assert taken(source, 1) == [[0, 1, 2]]


def test_without_steps_a_new_batch_size_starts_with_an_epoch():
    """The epochs of `fit` are those of the data."""
    source = EpochSource(Cutter(2), data().reading())
    source.resize(4, epoch=1)
    source.start(1)
    assert source.num_batches == 2 and taken(source, 2) == [[0, 1, 2, 3], [4, 5]]
    assert source.anchor == Anchor(0, 0, 0)


def test_first_batches_do_not_move_the_source():
    source = EpochSource(Cutter(2), data().reading())
    source.start(0, 1)
    for size, expected in [(None, [0, 1]), (5, [0, 1, 2, 3, 4])]:
        first = next(source.first_batches(size))
        assert first[0].numpy().astype(int).tolist() == expected
    assert taken(source, 1) == [[2, 3]]


def test_examples_have_names_in_training_only():
    source = EpochSource(Cutter(2), data().reading())
    assert source.example_at(0, 1, 1) == source.example_at(7, 1, 1) is not None
    assert "3" in source.example_at(0, 1, 1)
    assert EpochSource(Cutter(2), data().reading("evaluation")).example_at(0, 1, 1) is None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: refuse_what_batches_bring(data(), y=np.ones(6), batch_size=None),
            "`y` cannot be given with .*Received: y=",
        ),
        (
            lambda: EpochSource(Cutter(2), endless().reading()),
            "is infinite.*Pass `steps_per_epoch`",
        ),
        (
            lambda: EpochSource(
                Cutter(2), data(balance="class_weight").reading(), class_weight={0: 1.0}
            ),
            "`class_weight` was given for batches that already have sample weights",
        ),
        (
            lambda: EpochSource(Cutter(2), endless().reading(), steps=2).resize(4, 1),
            "length of the data is unknown.*Leave out `steps_per_epoch`",
        ),
    ],
)
def test_contradictory_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def endless():
    return kmg.data.from_dataset(
        tf.data.Dataset.range(3).map(lambda n: (tf.reshape(n, [1]), n)).repeat(),
        global_batch_size=2,
    )
