"""How Keras reads data, and how TensorFlow describes a dataset."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.keras_internals import dataset_internals
from keras_multigpu.keras_internals.flow_internals import drawn_transform, legacy_images


def test_keras_adapts_splits_and_weighs_arrays():
    adapter = dataset_internals.data_adapter(x=np.zeros((5, 2)), y=np.zeros(5), batch_size=2)
    assert adapter.num_batches == 3
    assert [len(x) for x, _ in adapter.get_tf_dataset()] == [2, 2, 1]
    (x, _, _), (x_val, _, _) = dataset_internals.split_validation((np.arange(4), None, None), 0.25)
    assert x.tolist() == [0, 1, 2] and x_val.tolist() == [3]
    weights = dataset_internals.class_weights_of_labels(np.array([0, 1, 1]), {0: 2.0, 1: 3.0})
    assert weights.tolist() == [2, 3, 3]


def test_arrays_can_be_shuffled_by_another_function():
    """Keras's adapter looks up what shuffles when it makes the dataset."""
    with dataset_internals.shuffled_by(lambda values: tf.reverse(values, [0])):
        adapter = dataset_internals.data_adapter(np.arange(4), batch_size=4, shuffle=True)
        dataset = adapter.get_tf_dataset()
    (batch,) = tf.nest.flatten(next(iter(dataset)))
    assert batch.numpy().tolist() == [3, 2, 1, 0], "Workers would shuffle differently."


@pytest.mark.parametrize(
    ("change", "batched", "size", "count"),
    [
        (lambda d: d, False, None, None),
        (lambda d: d.shuffle(3).cache().take(5), False, None, None),
        (lambda d: d.batch(4), True, 4, 10),
        (lambda d: d.batch(4, num_parallel_calls=2), True, 4, 10),
        (lambda d: d.padded_batch(4), True, 4, 10),
        (lambda d: d.ragged_batch(4), True, 4, 10),
        (lambda d: d.batch(5, drop_remainder=True), True, 5, 10),
        # Two examples are dropped: fewer come out than went in.
        (lambda d: d.batch(4, drop_remainder=True), True, 4, None),
        (lambda d: d.batch(4).map(lambda x: x).prefetch(1), True, 4, 10),
        (lambda d: d.batch(4).map(lambda x: x, num_parallel_calls=2).shuffle(2), True, 4, 10),
        (lambda d: d.batch(4).with_options(tf.data.Options()).cache(), True, 4, 10),
        (lambda d: d.batch(4).apply(tf.data.experimental.assert_cardinality(3)), True, 4, 10),
        (lambda d: d.batch(4).take(1), True, 4, None),
        (lambda d: d.batch(4).skip(1).repeat().shard(2, 0), True, 4, None),
        (lambda d: d.batch(4).filter(lambda x: True).ignore_errors(), True, 4, None),
        (lambda d: d.batch(4).concatenate(d.batch(4)), True, None, None),
        (lambda d: d.rebatch(4), True, None, None),
        (lambda d: d.batch(4).unbatch(), False, None, None),
        (lambda d: tf.data.Dataset.zip(d.batch(4), d.batch(4)), True, None, None),
        (lambda d: tf.data.Dataset.zip(d.batch(4), d), None, None, None),
        (lambda d: d.flat_map(tf.data.Dataset.from_tensors), None, None, None),
    ],
)
def test_batches_and_their_size_are_recognized_in_a_dataset(change, batched, size, count):
    """Each step is still a dataset class of its own, with `_inputs()` and `_batch_size`."""
    dataset = change(tf.data.Dataset.from_tensor_slices(np.zeros((10, 3))))
    assert dataset_internals.gives_batches(dataset) is batched
    assert dataset_internals.batching_of(dataset) == (size, count)


@pytest.mark.parametrize(
    "dataset",
    [
        tf.data.Dataset.range(3),
        tf.data.TFRecordDataset(["file"]),
        tf.data.TextLineDataset(["file"]),
        tf.data.FixedLengthRecordDataset(["file"], 4),
    ],
)
def test_datasets_of_single_examples_are_recognized(dataset):
    """Datasets that read files or count still have these class names."""
    assert dataset_internals.gives_batches(dataset) is False


def test_the_shuffles_of_a_dataset_are_found():
    """TensorFlow still keeps the seeds of a shuffle, and whether it reshuffles."""
    seeded = tf.data.Dataset.range(9).shuffle(9, seed=5).batch(2)
    _, _, (batch, (kind, seeds, size), source) = dataset_internals.recipe(seeded)
    assert (batch, kind, seeds[1], size) == (["_BatchDataset"], "_ShuffleDataset", 5, 9)
    assert source == ["_RangeDataset"]
    tf.random.set_seed(None)
    _, _, (step, _) = dataset_internals.recipe(tf.data.Dataset.range(9).shuffle(9))
    assert step[:2] == dataset_internals.UNSEEDED
    once = tf.data.Dataset.range(9).shuffle(9, reshuffle_each_iteration=False)
    kept = seeded.cache()
    assert [dataset_internals.reshuffles(each) for each in (seeded, once, kept)] == [1, 0, 0]
    assert [dataset_internals.caches(each) for each in (seeded, kept.take(1))] == [0, 1]


def test_the_functions_of_a_dataset_are_found():
    """TensorFlow still keeps the user's functions in `_functions`."""
    double, is_small = (lambda x: 2 * x), (lambda x: x < 9)
    data = tf.data.Dataset.range(9).map(double, num_parallel_calls=2).batch(2).unbatch()
    assert dataset_internals.functions_of(data.filter(is_small).prefetch(1))[::2] == [
        is_small,
        double,
    ]


def test_elements_are_dealt_out_to_devices_in_turn():
    """TensorFlow's multi-device iterator still takes these arguments."""
    devices = ["/device:CPU:1", "/device:CPU:2"]
    data = tf.data.Dataset.range(4)
    found = list(dataset_internals.multi_device_iterator(data, devices, "/device:CPU:0", 2))
    assert [list(map(int, elements)) for elements in found] == [[0, 1], [2, 3]]
    assert [element.device[-5:] for element in found[0]] == ["CPU:1", "CPU:2"]


@pytest.mark.parametrize(("workers", "expected"), [(1, False), (2, True)])
def test_workers_that_read_a_py_dataset_are_found(workers, expected):
    """Keras's adapter still has an `enqueuer` if workers read for it."""

    class Data(keras.utils.PyDataset):
        num_batches = 1

        def __getitem__(self, index):
            return np.ones((2, 1)), np.ones((2, 1))

    adapter = dataset_internals.data_adapter(Data(workers=workers))
    assert dataset_internals.has_workers(adapter) == expected


def test_image_data_generator_draws_from_our_generator():
    """Its module still draws from `np.random`, which `drawn_transform` replaces."""
    generator = legacy_images().ImageDataGenerator(rotation_range=9, zoom_range=0.5)
    first, second = (
        drawn_transform(generator, (8, 8, 3), np.array(seeds, np.int32))
        for seeds in ([1, 2], [1, 3])
    )
    np.random.seed(0)
    state = np.random.get_state()[1].tolist()
    again = drawn_transform(generator, (8, 8, 3), np.array([1, 2], np.int32))
    assert first == again != second
    assert np.random.get_state()[1].tolist() == state, "Keras draws from something else."
