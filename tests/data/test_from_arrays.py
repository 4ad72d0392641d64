"""Arrays as `Batches`: structures, types and memory."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg


def only(batches):
    (batch,) = list(batches.with_(shuffle=False, global_batch_size=100).epoch(0))
    return batch


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ((np.arange(4).reshape(2, 2),), [[0, 1], [2, 3]]),
        ((tf.constant([[1.0], [2.0]]), tf.constant([1, 0])), ([[1.0], [2.0]], [1, 0])),
        ((np.ones((2, 1)), None, np.array([1.0, 2.0])), ([[1.0], [1.0]], None, [1.0, 2.0])),
    ],
    ids=["inputs", "tensors", "weights without targets"],
)
def test_batches_are_inputs_targets_and_weights(arrays, expected):
    batch = only(kmg.data.from_arrays(*arrays))
    assert (
        keras.tree.map_structure(
            lambda part: part if part is None else part.numpy().tolist(), batch
        )
        == expected
    )


def test_nested_structures_are_kept():
    batches = kmg.data.from_arrays(
        {"b": np.zeros((3, 2)), "a": np.array([1.0, 2.0, 3.0])},
        [np.array([0, 1, 2]), np.array([b"x", b"y", b"z"])],
        np.array([1.0, 0.5, 0.25]),
    )
    x, y, weight = only(batches)
    assert x["a"].numpy().tolist() == [1.0, 2.0, 3.0]
    assert x["b"].shape == (3, 2)
    assert x["b"].dtype == tf.float32
    assert [part.numpy().tolist() for part in y] == [[0, 1, 2], [b"x", b"y", b"z"]]
    assert weight.numpy().tolist() == [1.0, 0.5, 0.25]


def test_memory_mapped_arrays_are_not_read_whole(tmp_path):
    """Reading one batch of a sparse file of 400 MB does not read the rest."""
    path = tmp_path / "x.npy"
    array = np.lib.format.open_memmap(path, "w+", np.float32, (100_000, 1000))
    array[::1000, 0] = np.arange(100)
    array.flush()
    mapped = np.load(path, mmap_mode="r")
    batches = kmg.data.from_arrays(mapped, shuffle=False, global_batch_size=1)
    before = resident()
    for step, x in enumerate(batches.epoch(0, start=99_000).take(1)):
        assert x[0, 0].numpy() == 99 + step
    assert resident() - before < 100 * 2**20


def resident() -> int:
    import psutil

    return psutil.Process().memory_info().rss


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (np.array([0, 2, 2]), [0, 2, 2]),
        (np.array([[0], [1], [1]]), [0, 1, 1]),
        (np.eye(3)[[1, 1, 0]], [1, 1, 0]),
        (np.array([0.5, 1.5, 2.5]), None),
        (np.array([[1, 1], [0, 1], [0, 0]]), None),
        (np.array([-1, 0, 1]), None),
        (np.array([10**9, 0, 1]), None),
        (None, None),
    ],
)
def test_classes_are_found_in_targets(y, expected):
    """Integers and one-hot rows are classes; regression targets and multiple labels are not."""
    counts = kmg.data.from_arrays(np.zeros((3, 1)), y).class_counts
    if expected is None:
        assert counts is None
    else:
        assert list(counts.values()) == np.bincount(expected).tolist()


@pytest.mark.parametrize("dtype", [np.int64, np.uint8, bool, np.float16, np.float64, "bfloat16"])
def test_weights_are_floats(dtype):
    weights = tf.constant([1, 0, 1, 1]).numpy().astype(tf.as_dtype(dtype).as_numpy_dtype)
    batches = kmg.data.from_arrays(np.zeros((4, 1)), np.arange(4), weights, shuffle=False)
    ((_, _, weight),) = batches.epoch(0)
    assert weight.dtype == tf.float32
    assert weight.numpy().tolist() == [1, 0, 1, 1]


def test_integer_weights_are_balanced():
    """The class of one example weighs 2, the one of three 2/3, each times the sample weight."""
    batches = kmg.data.from_arrays(
        np.zeros((4, 1)), np.array([0, 1, 1, 1]), np.array([2, 2, 0, 2]), balance="class_weight"
    )
    _, _, weight = only(batches)
    np.testing.assert_allclose(weight, [4, 4 / 3, 0, 4 / 3], rtol=1e-6)


def test_bfloat16_is_cached_in_a_folder(tmp_path):
    """The key of the cache is a hash of the values, for which NumPy has no buffer."""
    x = tf.constant([[1.5], [2.5]], tf.bfloat16)
    for _ in range(2):
        batch = only(kmg.data.from_arrays(x, cache=tmp_path))
        assert batch.dtype == tf.bfloat16 and batch.numpy().tolist() == [[1.5], [2.5]]
    other = only(kmg.data.from_arrays(2 * x, cache=tmp_path))
    assert other.numpy().tolist() == [[3], [5]]
