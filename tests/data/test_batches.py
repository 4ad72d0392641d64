"""`Batches`: sizes, shares, copies and errors, independent of the source."""

import gc
import itertools
import random
import weakref
from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg


def numbered(size, **batching):
    numbers = np.arange(size)
    return kmg.data.from_arrays(numbers[:, None], numbers % 3, **batching)


def numbers(dataset):
    return [batch[0].numpy().reshape(-1).tolist() for batch in dataset]


@pytest.mark.parametrize("size", [1, 29, 64])
@pytest.mark.parametrize("shards", [2, 3])
def test_every_example_exactly_once_over_all_workers(size, shards):
    """For odd sizes, too; the parts of the workers, joined, are the global batches."""
    batches, epoch = numbered(size, global_batch_size=8, seed=2), 1
    whole = numbers(batches.epoch(epoch))
    parts = [numbers(batches.epoch(epoch, shard=(i, shards))) for i in range(shards)]
    assert sorted(itertools.chain(*whole)) == list(range(size))
    assert [list(itertools.chain(*part)) for part in zip(*parts, strict=True)] == whole
    assert all(max(map(len, part)) - min(map(len, part)) <= 1 for part in zip(*parts, strict=True))


def test_an_epoch_starts_at_any_position():
    batches = numbered(29, global_batch_size=8)
    done = list(itertools.chain(*numbers(batches.epoch(5))[:2]))
    rest = list(itertools.chain(*numbers(batches.with_(global_batch_size=5).epoch(5, start=16))))
    assert sorted(done + rest) == list(range(29))


@pytest.mark.parametrize("start", [1, 4, 8])
def test_an_epoch_of_full_batches_starts_in_the_middle_of_one(start):
    """Its last batch is smaller then, although a whole epoch has only full ones."""
    batches = numbered(8, global_batch_size=4)
    rest = list(itertools.chain(*numbers(batches.epoch(0))))[start:]
    assert list(itertools.chain(*numbers(batches.epoch(0, start=start)))) == rest
    follow = numbers(batches.epochs(0, start).take(4))
    assert list(itertools.chain(*follow))[: len(rest)] == rest


@pytest.mark.parametrize(("remainder", "sizes"), [("keep", [4, 4, 2]), ("drop", [4, 4])])
def test_remainder_keeps_or_drops_the_last_batch(remainder, sizes):
    """Where all batches are equal, their size is static."""
    batches = numbered(10, global_batch_size=4, remainder=remainder)
    assert [len(x) for x, _ in batches.epoch(0)] == sizes
    assert len(batches) == len(sizes)
    assert batches.epoch(0).element_spec[0].shape[0] == (4 if remainder == "drop" else None)


def test_a_replica_batch_size_is_multiplied_by_the_replicas():
    assert numbered(100, replica_batch_size=5).reading().for_replicas(3).global_batch_size == 15
    assert numbered(100, global_batch_size=5).reading().for_replicas(3).global_batch_size == 5
    assert numbered(100).reading().for_replicas(2).global_batch_size == 64
    with kmg.strategy(devices=4).scope():
        assert numbered(100, replica_batch_size=2).global_batch_size == 8
    batches = numbered(100, global_batch_size=5).with_(replica_batch_size=3).with_(shuffle=False)
    assert batches.reading().for_replicas(2).global_batch_size == 6


def test_classes_are_counted_and_weighted():
    batches = numbered(7)
    assert batches.class_counts == {"0": 3, "1": 2, "2": 2}
    assert batches.class_weight == {0: 7 / 9, 1: 7 / 6, 2: 7 / 6}


def test_class_weights_become_sample_weights():
    y = np.array([0, 0, 0, 1])
    weights = np.array([1.0, 1.0, 2.0, 1.0])
    batches = kmg.data.from_arrays(
        np.zeros((4, 1)), y, weights, shuffle=False, balance="class_weight", global_batch_size=4
    )
    (batch,) = list(batches.epoch(0))
    np.testing.assert_allclose(batch[2], [4 / 6, 4 / 6, 8 / 6, 2], rtol=1e-6)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_oversampling_balances_every_replicas_share(replicas):
    y = np.repeat([0, 1, 2], [4, 40, 16])
    batches = kmg.data.from_arrays(
        np.arange(60), y, balance="oversample", global_batch_size=6 * replicas, remainder="drop"
    )
    assert len(batches) == 120 // (6 * replicas)
    for replica in range(replicas):
        for _, labels in batches.epoch(0, shard=(replica, replicas)):
            assert Counter(labels.numpy().tolist()) == {0: 2, 1: 2, 2: 2}


def test_evaluation_reads_every_example_once_in_order():
    """Whatever the settings for training: no shuffle, no balance, nothing dropped."""
    batches = numbered(10, global_batch_size=4, balance="oversample", remainder="drop").evaluation()
    assert numbers(batches.epoch(0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    weighted = numbered(10, balance="class_weight").evaluation()
    assert len(weighted.epoch(0).element_spec) == 2


def test_take_always_gives_the_same_examples():
    """Independent of the order of any epoch; the first ones without `shuffle`."""
    assert numbers(numbered(20, shuffle=False).take(3).epoch(0)) == [[0, 1, 2]]
    random = [sorted(numbers(numbered(20).take(5).epoch(e))[0]) for e in range(3)]
    assert random[0] == random[1] == random[2] != [0, 1, 2, 3, 4]
    assert random[0] != sorted(numbers(numbered(20).epoch(0))[0][:5])
    assert numbered(20).take(50).num_examples == 20


def test_split_is_stratified_disjoint_and_independent_of_the_batch_size():
    y = np.repeat([0, 1, 2], [60, 30, 10])
    batches = kmg.data.from_arrays(np.arange(100), y)
    train, validation = batches.split(0.2)
    assert list(train.class_counts.values()) == [48, 24, 8]
    assert list(validation.class_counts.values()) == [12, 6, 2]
    both = [set(itertools.chain(*numbers(part.epoch(0)))) for part in (train, validation)]
    assert both[0] | both[1] == set(range(100))
    assert not both[0] & both[1]
    _, again = batches.with_(replica_batch_size=7).split(0.2)
    assert set(itertools.chain(*numbers(again.epoch(0)))) == both[1]
    _, other = batches.with_(seed=1).split(0.2)
    assert set(itertools.chain(*numbers(other.epoch(0)))) != both[1]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("fraction", [0.1, 0.5])
def test_split_of_tiny_classes_is_exact_overall(size, fraction):
    batches = kmg.data.from_arrays(np.arange(100 * size), np.repeat(np.arange(100), size))
    _, part = batches.split(fraction)
    assert part.num_examples == pytest.approx(100 * size * fraction)
    counts = np.array(list(part.class_counts.values()))
    assert np.abs(counts - size * fraction).max() < 1


def test_parts_can_be_taken_of_parts():
    batches = numbered(50)
    for count in range(49, 2, -1):
        batches = batches.take(count)
    first, second = batches.split(0.5)
    both = sorted(itertools.chain(*numbers(first.epoch(0)), *numbers(second.epoch(0))))
    assert len(set(both)) == 3
    assert "a part of arrays" in repr(first)


def test_numpy_integers_are_accepted():
    batches = numbered(10, global_batch_size=np.int64(4), seed=np.int32(3))
    assert repr(batches.take(np.int64(5)).split(np.float32(0.4))[0]) == (
        "Batches(3 examples from a part of arrays, 1 x 4, seed=3)"
    )


def test_batches_are_always_true():
    """Their truth does not ask for their length, which may be unknown."""
    assert kmg.data.from_dataset(tf.data.Dataset.range(5).filter(lambda _: True), batched=False)


def test_deleted_datasets_free_their_memory():
    array = np.zeros((10, 1))
    kept = weakref.ref(array)
    batches = kmg.data.from_arrays(array, cache="memory", global_batch_size=2)
    iterator = iter(batches.epoch(0))
    endless = iter(batches.epochs())
    del batches, array
    gc.collect()
    assert len(list(iterator)) == 5
    for _ in range(12):
        next(endless)
    del iterator, endless
    gc.collect()
    assert kept() is None


def test_repr_is_a_summary():
    assert repr(numbered(1234, global_batch_size=100, seed=3)) == (
        "Batches(1,234 examples from arrays, 13 x 100, seed=3)"
    )
    assert repr(numbered(3)) == "Batches(3 examples from arrays, 32 a replica)"


def flipped(x):
    return x[:, :, ::-1]


def noisy(x, seeds):
    return x + tf.cast(seeds[:, 0], tf.float32)[:, None, None, None] / 2.0**31


def test_functions_augment_the_batch():
    x = np.arange(8, dtype="float32").reshape(2, 1, 4, 1)
    batches = kmg.data.from_arrays(x, shuffle=False, augment=[flipped, lambda x: x + 1.0])
    (batch,) = list(batches.epoch(0))
    np.testing.assert_array_equal(batch, x[:, :, ::-1] + 1)


@pytest.mark.slow
def test_draws_depend_on_seed_epoch_and_example_alone():
    """Batch size and shares do not matter; epoch and seed do, for functions and layers."""
    images = np.random.default_rng(0).uniform(90, 165, (9, 6, 6, 3)).astype("float32")
    layers = [keras.layers.RandomContrast(0.5), noisy, kmg.augmentation.RandomColor(brightness=0.1)]
    batches = kmg.data.from_arrays(images, np.arange(9), global_batch_size=4, augment=layers)

    def drawn(batches, epoch, shards=1):
        parts = [list(batches.epoch(epoch, shard=(i, shards))) for i in range(shards)]
        pairs = [pair for part in parts for x, y in part for pair in zip(y.numpy(), x, strict=True)]
        return np.stack([image for _, image in sorted(pairs, key=lambda pair: pair[0])])

    first = drawn(batches, 0)
    np.testing.assert_allclose(first, drawn(batches, 0, shards=3), rtol=1e-5)
    np.testing.assert_allclose(first, drawn(batches.with_(global_batch_size=9), 0), rtol=1e-5)
    same = kmg.data.from_arrays(images[[0] * 9], np.arange(9), augment=layers)
    assert len({image.tobytes() for image in drawn(same, 0)}) == 9
    assert np.abs(first - drawn(batches, 1)).max() > 0.01
    assert np.abs(first - drawn(batches.with_(seed=1), 0)).max() > 0.01


@pytest.mark.slow
def test_a_list_draws_as_a_sequence_does():
    augment = [keras.layers.RandomContrast(0.5), kmg.augmentation.RandomColor(contrast=0.5)]
    images = np.random.default_rng(0).uniform(0, 255, (5, 4, 4, 3)).astype("float32")
    sequence = kmg.augmentation.Sequence(augment)
    one, other = (
        next(iter(kmg.data.from_arrays(images, augment=each).epoch(1))).numpy()
        for each in (augment, sequence)
    )
    np.testing.assert_allclose(one, other, rtol=1e-5)
    assert np.abs(one - images[:5]).max() > 0.01


class Doubled(keras.Sequential):
    """Doubles what its layers return."""

    def call(self, inputs, training=None, mask=None):
        return 2 * super().call(inputs, training=training, mask=mask)


@pytest.mark.parametrize(
    "outer", [lambda layer: layer, lambda layer: kmg.augmentation.Sequence([layer])]
)
def test_a_sequential_subclass_keeps_its_own_call(outer):
    images = np.ones((2, 4, 4, 3), "float32")
    augment = outer(Doubled([keras.layers.Rescaling(3.0)]))
    batch = next(iter(kmg.data.from_arrays(images, augment=augment).epoch(0)))
    np.testing.assert_allclose(batch, images * 6)


def test_functions_with_seeds_do_not_draw_in_evaluation():
    images = np.ones((4, 2, 2, 1), "float32")

    def scaled(x, seeds, training):
        return x * 3 if not training else x + tf.cast(seeds[:, :1, None, None], tf.float32)

    for augment, factor in ((noisy, 1), (scaled, 3)):
        batches = kmg.data.from_arrays(images, augment=augment)
        assert np.abs(next(iter(batches.epoch(0))) - images).max() > 0
        np.testing.assert_array_equal(next(iter(batches.evaluation().epoch(0))), images * factor)


def test_unbuilt_layers_work_in_every_epoch():
    """They are built outside the pipeline's graph, since each epoch has its own."""
    normalize = keras.Sequential([keras.layers.Normalization(mean=3.0, variance=4.0)])
    batches = kmg.data.from_arrays(np.ones((2, 2, 2, 1), "float32"), augment=normalize)
    for epoch in range(2):
        np.testing.assert_allclose(next(iter(batches.epoch(epoch))), -np.ones((2, 2, 2, 1)))


@pytest.mark.parametrize(
    "augment", [keras.layers.RandomFlip(), [keras.Sequential([keras.layers.RandomFlip()])]]
)
def test_masks_follow_a_layer_of_keras_by_itself(augment):
    images = np.arange(128, dtype="float32").reshape(2, 8, 8, 1)
    (batch,) = kmg.data.from_arrays(images, images.astype("uint8"), augment=augment).epoch(0)
    np.testing.assert_array_equal(*batch)
    assert (batch[0] != images).numpy().any()


def test_layers_of_keras_change_inputs_that_are_no_images():
    """Each example has its own draws, whatever the batch; evaluation has none."""
    noise = keras.layers.GaussianNoise(1.0)
    batches = kmg.data.from_arrays(np.zeros((6, 3), "float32"), shuffle=False, augment=noise)
    together = next(iter(batches.epoch(0))).numpy()
    alone = [x.numpy() for x in batches.with_(global_batch_size=2).epoch(0)]
    np.testing.assert_array_equal(np.concatenate(alone), together)
    assert len(np.unique(together)) == 18
    assert not next(iter(batches.evaluation().epoch(0))).numpy().any()


def test_augmentation_keeps_the_number_of_examples():
    batches = kmg.data.from_arrays(np.ones((4, 1)), np.ones(4), augment=lambda x: x[:3])
    with pytest.raises(tf.errors.InvalidArgumentError, match="`augment` changed the number"):
        list(batches.epoch(0))


def test_layers_do_not_draw_in_evaluation():
    images = np.random.default_rng(0).uniform(0, 255, (4, 6, 6, 3)).astype("float32")
    augment = [keras.layers.RandomRotation(0.5), keras.layers.Rescaling(2.0)]
    batches = kmg.data.from_arrays(images, augment=augment).evaluation()
    np.testing.assert_allclose(next(iter(batches.epoch(0))), images * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("remainder", "position", "count", "expected"),
    [
        ("keep", (0, 0), 0, (0, 0)),
        ("keep", (0, 0), 2, (0, 8)),
        ("keep", (0, 0), 3, (1, 0)),
        ("keep", (2, 8), 5, (4, 4)),
        ("keep", (0, 9), 2, (1, 4)),
        ("drop", (0, 0), 2, (1, 0)),
    ],
)
def test_the_position_after_some_batches_is_counted_across_epochs(
    remainder, position, count, expected
):
    """Ten examples in batches of four: two full batches and a remainder in each epoch."""
    batches = kmg.data.from_arrays(np.zeros((10, 1)), global_batch_size=4, remainder=remainder)
    assert batches.reading().position_after(position, count) == expected


def test_reading_augmented_batches_leaves_the_random_numbers_of_the_script_alone():
    """Or workers, which read at other times, would begin with other weights."""
    data = kmg.data.from_arrays(
        np.zeros((4, 6, 6, 3), np.uint8), augment=[keras.layers.RandomFlip()], global_batch_size=2
    )
    state = random.getstate()
    list(data.epoch(0))
    assert random.getstate() == state
