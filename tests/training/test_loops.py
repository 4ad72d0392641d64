"""The parts of the loops of `fit`, `evaluate` and `predict`: answers by hand, no model."""

import math
import sys
import types

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training import loops


@pytest.mark.parametrize(
    ("frequency", "due"), [(1, [0, 1, 2, 3]), (2, [1, 3]), ([1, 4], [0, 3]), ((2,), [1])]
)
def test_validation_frequency_selects_epochs(frequency, due):
    validation = loops.Validation(frequency, x=None)
    assert [epoch for epoch in range(4) if validation.is_due(epoch)] == due


CHIEF = types.SimpleNamespace(is_chief=True)


def heard(*callbacks, verbose=0):
    """In which modes a list of callbacks listens to single batches."""
    made = loops.callback_list(keras.Sequential(), CHIEF, list(callbacks), verbose, 1, 1)
    return [mode for mode in ("train", "test") if loops.listens(made, mode)]


def callback(**methods):
    return type("Own", (keras.callbacks.Callback,), methods)()


def test_callbacks_with_batch_hooks_listen_to_batches():
    hook = lambda self, batch, logs=None: None  # noqa: E731
    assert heard() == []
    assert heard(callback(on_epoch_end=hook, on_predict_batch_end=hook)) == []
    assert heard(callback(on_train_batch_begin=hook)) == ["train"]
    assert heard(callback(on_test_batch_end=hook)) == ["test"]
    assert heard(callback(on_batch_end=hook)) == ["train"]
    assert heard(callback(), callback(on_train_batch_end=hook), callback()) == ["train"]
    assert heard(keras.callbacks.TerminateOnNaN()) == ["train"]


@pytest.mark.parametrize(("verbose", "modes"), [(0, []), (1, ["train", "test"]), (2, [])])
def test_the_progress_bar_listens_where_it_shows_batches(verbose, modes):
    assert heard(verbose=verbose) == modes


def test_predictions_of_several_lengths_become_ragged():
    short, long = tf.constant([[1], [2]]), tf.constant([[3, 4]])
    assert loops.concatenated([short, long]).to_list() == [[1], [2], [3, 4]]
    images = loops.concatenated([tf.zeros((1, 2, 1, 3)), tf.ones((1, 1, 2, 3))])
    assert images.to_list() == [[[[0, 0, 0]], [[0, 0, 0]]], [[[1, 1, 1], [1, 1, 1]]]]
    ragged = tf.ragged.constant([[5, 6, 7], [8]])
    assert loops.concatenated([ragged, long]).to_list() == [[5, 6, 7], [8], [3, 4]]
    sparse = loops.concatenated([tf.sparse.from_dense([[0, 1]]), tf.sparse.from_dense([[2, 0]])])
    assert tf.sparse.to_dense(sparse).numpy().tolist() == [[0, 1], [2, 0]]
    assert loops.as_array(sparse) is sparse and loops.as_array(ragged) is ragged
    assert isinstance(loops.as_array(long), np.ndarray)


def test_rows_of_missing_examples_are_nan():
    outputs = {"a": tf.constant([1.0, 2.0]), "b": tf.ones((2, 1, 2), tf.float16)}
    assert loops.with_gaps(outputs, tf.constant([1.0, 2.0])) is outputs
    holed = loops.with_gaps(outputs, tf.constant([1.0, 0.0]))
    assert holed["b"].dtype == tf.float16
    a, b = holed["a"].numpy().tolist(), holed["b"].numpy().tolist()
    assert a[0] == 1 and math.isnan(a[1])
    assert b[0] == [[1, 1]] and all(map(math.isnan, b[1][0]))


@pytest.mark.parametrize("output", [tf.constant([1, 2]), tf.constant(1.0)], ids=["int", "scalar"])
def test_predictions_that_cannot_have_gaps_are_named(output):
    with pytest.raises(ValueError, match="cannot be NaN.*on_error=.raise"):
        loops.with_gaps(output, tf.constant([1.0, 0.0]))


def test_empty_data_are_named():
    with pytest.raises(ValueError, match=r"`evaluate\(\)` received no data.*Check"):
        loops.raise_no_data("evaluate")


def test_python_between_two_steps_does_not_grow_with_the_optimizer():
    """Of a layer more it may know its metrics, as Keras's own loop does, but not its slots."""
    x, calls = np.zeros((4, 2), "float32"), []
    for layers in (1, 9):
        dense = [keras.layers.Dense(2) for _ in range(layers)]
        model = kmg.distribute(keras.Sequential([keras.Input((2,)), *dense]), self_check=False)
        model.compile("adam", "mse", jit_compile=False)
        for _ in range(2):
            model.train_on_batch(x, x)
        # Calls of Python's functions, of which each takes about as long.
        found = []
        sys.setprofile(lambda frame, event, _, found=found: found.append(event))
        model.train_on_batch(x, x)
        sys.setprofile(None)
        calls.append(found.count("call"))
    assert calls[1] - calls[0] <= 5 * 8
