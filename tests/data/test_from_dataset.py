"""`from_dataset`: any `tf.data.Dataset`, unbatched and batched again."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.data import from_dataset

Slices = tf.data.Dataset.from_tensor_slices
NUMBERS = np.arange(10)
IMAGES = np.arange(10 * 4 * 4, dtype=np.float32).reshape(10, 4, 4)
ONE_HOT = np.eye(10, dtype=np.float32)


def lists(dataset):
    return [(b[0] if isinstance(b, tuple) else b).numpy().tolist() for b in dataset]


def generated(x, y):
    """A dataset that does not reveal how it was made."""
    signature = tuple(tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in (x, y))
    return tf.data.Dataset.from_generator(lambda: [(x, y)], output_signature=signature)


@pytest.mark.parametrize(
    ("dataset", "size", "count"),
    [
        (Slices((IMAGES, NUMBERS)), 32, 10),
        (Slices((IMAGES, ONE_HOT)), 32, 10),
        (Slices((IMAGES, IMAGES)), 32, 10),
        (Slices((IMAGES, NUMBERS)).map(lambda x, y: (x / 2, y)).prefetch(1), 32, 10),
        (Slices((IMAGES, NUMBERS)).repeat(), 32, None),
        (Slices((IMAGES, NUMBERS)).filter(lambda x, y: y < 5), 32, None),
        (Slices((IMAGES, NUMBERS)).batch(3), 3, 10),
        (Slices((IMAGES, NUMBERS)).batch(3, drop_remainder=True), 3, 9),
        (Slices((IMAGES, NUMBERS)).batch(3).map(lambda x, y: (x / 2, y)).prefetch(1), 3, 10),
        (Slices((IMAGES, NUMBERS)).batch(3).take(2), 3, None),
        (Slices((IMAGES, NUMBERS)).batch(3).repeat(), 3, None),
        (Slices(IMAGES).batch(3), 3, 10),
        (Slices({"a": IMAGES, "b": NUMBERS}), 32, 10),
        # A scalar in each element: it cannot be a batch.
        (
            Slices((IMAGES, NUMBERS)).interleave(lambda *e: tf.data.Dataset.from_tensors(e)),
            32,
            None,
        ),
    ],
)
def test_whether_elements_are_batches_is_inferred(dataset, size, count):
    made = from_dataset(dataset)
    assert (made.global_batch_size, made.num_examples) == (size, count)
    x = keras.tree.flatten(next(iter(made.epoch(0).take(1))))[0]
    expected = {"shape": (4, 4)} if x.shape.rank == 3 else {"shape": ()}
    assert x.shape[1:] == expected["shape"]


@pytest.mark.slow
def test_batched_overrides_the_guess():
    made = from_dataset(generated(NUMBERS, NUMBERS), batched=True, shuffle=False)
    assert lists(made.epoch(0)) == [list(range(10))]
    made = from_dataset(generated(NUMBERS, NUMBERS), batched=False, global_batch_size=2)
    assert lists(made.epoch(0)) == [[list(range(10))]]


@pytest.mark.parametrize("own", [None, 3, 4])
def test_datasets_are_batched_again(own):
    dataset = Slices((NUMBERS, NUMBERS + 5))
    dataset = dataset if own is None else dataset.batch(own)
    made = from_dataset(dataset, global_batch_size=4, shuffle=False)
    assert lists(made.epoch(0)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(made) == 3
    assert made.evaluation().global_batch_size == 4


def test_replica_batch_size_replaces_the_datasets_own():
    made = from_dataset(Slices(NUMBERS).batch(3), replica_batch_size=2)
    assert made.reading().for_replicas(4).global_batch_size == 8


@pytest.mark.parametrize(
    ("element", "expected"),
    [
        (lambda i: i, ([0, 1],)),
        (lambda i: (i,), ([0, 1],)),
        (lambda i: (i, i + 1), ([0, 1], [1, 2])),
        (lambda i: (i, i + 1, i * 2), ([0, 1], [1, 2], [0, 2])),
        (lambda i: {"a": i, "b": i + 1}, ([0, 1], [1, 2])),
        (lambda i: ({"a": i, "b": {"c": i + 1}}, i), ([0, 1], [1, 2], [0, 1])),
        (lambda i: ((i, i + 1),), ([0, 1], [1, 2])),
    ],
)
@pytest.mark.parametrize("batched", [True, False])
def test_structures_of_elements_are_kept(element, expected, batched):
    dataset = tf.data.Dataset.range(2).map(element)
    made = from_dataset(dataset.batch(2) if batched else dataset, shuffle=False)
    (batch,) = made.epoch(0)
    assert [leaf.numpy().tolist() for leaf in keras.tree.flatten(batch)] == list(expected)
    if element(0) == ((0, 1),):
        assert isinstance(batch, tuple) and len(batch) == 1


@pytest.mark.slow
def test_ragged_examples_stay_ragged():
    x = tf.ragged.constant([[1, 2], [3], [], [4, 5, 6], [7]])
    dataset = Slices((x, np.arange(5))).batch(2)
    made = from_dataset(dataset, shuffle=False, global_batch_size=3)
    assert [batch[0].to_list() for batch in made.epoch(0)] == [[[1, 2], [3], []], [[4, 5, 6], [7]]]
    assert [batch[0].to_list() for batch in made.epoch(0, shard=(0, 2))][0] == [[1, 2], [3]]


def test_an_infinite_dataset_has_no_length():
    made = from_dataset(Slices(NUMBERS).repeat().batch(4), shuffle=False)
    assert (made.steps_per_epoch, made.num_examples) == (None, None)
    assert "unknown number" in repr(made)
    assert lists(made.epochs().take(3)) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_a_generator_that_is_used_up_is_named():
    used = iter(range(4))
    dataset = tf.data.Dataset.from_generator(
        lambda: used, output_signature=tf.TensorSpec((), tf.int64)
    )
    batches = iter(from_dataset(dataset, global_batch_size=4, shuffle=False).epochs())
    assert next(batches).numpy().tolist() == [0, 1, 2, 3]
    with pytest.raises(tf.errors.OpError, match="no batch in epoch 2.*a generator may be used up"):
        next(batches)


def test_class_names_of_a_keras_dataset_are_kept(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            keras.utils.save_img(tmp_path / name / f"{number}.png", np.full((5, 5, 3), number))
    dataset = keras.utils.image_dataset_from_directory(
        tmp_path, image_size=(4, 4), batch_size=4, verbose=False
    )
    made = from_dataset(dataset)
    assert repr(made) == "Batches(6 examples from a dataset, 2 classes, 2 x 4)"
    assert made.class_names == ["cat", "dog"]
    labels = [label for _, labels in made.epoch(0) for label in labels.numpy().tolist()]
    assert sorted(labels) == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("dtype", [np.int64, bool])
def test_integer_weights_become_floats(dtype):
    weights = np.array([1, 0, 1]).astype(dtype)
    made = from_dataset(Slices((NUMBERS[:3], NUMBERS[:3], weights)), shuffle=False)
    ((_, _, weight),) = made.epoch(0)
    assert weight.dtype == tf.float32 and weight.numpy().tolist() == [1, 0, 1]


def lengths(*sizes):
    vectors = tf.ragged.range(tf.constant(sizes))
    dataset = Slices((vectors, np.arange(len(sizes))))
    return dataset.map(lambda x, y: (x.to_tensor() if x.shape.rank > 1 else x, y))


def test_examples_of_a_batch_must_have_one_shape():
    """The error of `fit` names the shapes and the remedy."""
    made = from_dataset(lengths(2, 2, 2, 3), shuffle=False, global_batch_size=2)
    with pytest.raises(tf.errors.OpError) as raised:
        list(made.epoch(0))
    failure = made.reading().failure_in(raised.value)
    assert isinstance(failure, ValueError)
    assert re.match(r"The .* a dataset differ in shape: .*\[2\] and .*\[3\]\. .* pad", str(failure))


@pytest.mark.slow
def test_batches_may_differ_in_shape():
    """As those of `padded_batch` do, each padded to its longest example."""
    made = from_dataset(lengths(2, 2, 3, 3, 1), shuffle=False, global_batch_size=2)
    assert lists(made.epoch(0)) == [[[0, 1]] * 2, [[0, 1, 2]] * 2, [[0]]]
    assert lists(made.epoch(0, start=2)) == [[[0, 1, 2]] * 2, [[0]]]
