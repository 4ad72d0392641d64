"""Labels that cannot belong to the loss or the units are named before the first step."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.fitting_labels import require_fitting_labels

INT = tf.TensorSpec((None,), tf.int32)
ONE_HOT = tf.TensorSpec((None, 3), tf.float32)
BINARY = tf.TensorSpec((None, 1), tf.float32)


def model(units, loss):
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(units)])
    made.compile("sgd", loss)
    return made


@pytest.mark.parametrize(
    ("units", "loss", "labels", "classes", "message"),
    [
        (3, "categorical_crossentropy", INT, 3, 'Labels of one number.*`label_mode="categorical"'),
        (3, "sparse_categorical_crossentropy", ONE_HOT, 3, 'Labels of 3 numbers.*"int"'),
        (2, "sparse_categorical_crossentropy", INT, 3, "3 classes.*2 units.*Give .* 3 units"),
        (5, keras.losses.CategoricalCrossentropy(), ONE_HOT, 3, "Give the last layer 3 units"),
        (2, "binary_crossentropy", BINARY, 2, "one unit, or use sparse_categorical_crossentropy"),
        (1, keras.losses.sparse_categorical_crossentropy, BINARY, 2, "2 classes.*1 unit\\."),
    ],
)
def test_what_cannot_fit_is_named(units, loss, labels, classes, message):
    """The labels, the loss and the units stand in the message, and a way out."""
    with pytest.raises(ValueError, match=message):
        require_fitting_labels(model(units, loss), labels, classes)


@pytest.mark.parametrize(
    ("units", "loss", "labels", "classes"),
    [
        (3, "sparse_categorical_crossentropy", INT, 3),
        (10, "sparse_categorical_crossentropy", INT, 3),
        (3, keras.losses.SparseCategoricalCrossentropy(ignore_class=7), INT, 8),
        (3, "categorical_crossentropy", ONE_HOT, 3),
        (3, "binary_crossentropy", ONE_HOT, None),
        (1, "binary_crossentropy", INT, 2),
        (1, "binary_crossentropy", BINARY, 2),
        (3, "mse", INT, 3),
        (3, lambda y, y_pred: y_pred[:, 0], INT, 5),
    ],
)
def test_what_may_fit_is_left_alone(units, loss, labels, classes):
    """Labels that fit, and whatever a loss of one's own makes of them."""
    require_fitting_labels(model(units, loss), labels, classes)


def test_fit_and_evaluate_ask_first():
    """Batches know their labels, also those of the validation."""
    wrong = kmg.data.from_arrays(np.ones((6, 4)), np.arange(6) % 3, global_batch_size=2)
    right = kmg.data.from_arrays(np.ones((6, 4)), np.eye(3)[[0, 1, 2] * 2], global_batch_size=2)
    trained = kmg.distribute(model(3, "categorical_crossentropy"))
    for call in (
        lambda: trained.fit(wrong, verbose=0),
        lambda: trained.fit(right, validation_data=wrong, verbose=0),
        lambda: trained.evaluate(wrong, verbose=0),
    ):
        with pytest.raises(ValueError, match="Labels of one number meet"):
            call()
    assert trained.optimizer.iterations == 0
