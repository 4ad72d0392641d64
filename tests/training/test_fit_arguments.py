"""Wrong arguments are named before anything is read or trained."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg

X, Y = np.zeros((8, 5), "float32"), np.zeros((8, 1), "float32")
SINGLE = tf.data.Dataset.from_tensor_slices((X, Y))

WRONG = [
    ("batch_size", 8.0, "`batch_size=8`"),
    ("batch_size", -1, "`batch_size=1`"),
    ("batch_size", "8", "`batch_size=1`"),
    ("epochs", 2.5, "`epochs=2`"),
    ("epochs", None, "0, 1, 2"),
    ("initial_epoch", 1.0, "`initial_epoch=1`"),
    ("steps_per_epoch", 2.0, "`steps_per_epoch=2`"),
    ("validation_steps", 1.5, "`validation_steps=2`"),
    ("validation_batch_size", True, "not a whole number"),
    ("validation_split", "x", "from 0 to less than 1"),
    ("validation_split", 1.5, "from 0 to less than 1"),
    ("class_weight", [1, 2], "not a dict"),
]


@pytest.fixture(scope="module")
def model():
    """A compiled model, which no test trains."""
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=2))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize(("name", "value", "hint"), WRONG)
def test_fit_names_the_argument(model, name, value, hint):
    """Each with what was expected, how to write it, and what came."""
    with pytest.raises(ValueError, match=rf"`{name}`.*Expected.*Received: {name}=") as error:
        model.fit(X, Y, verbose=0, **{name: value})
    assert hint in str(error.value)


def test_evaluate_and_predict_name_the_argument(model):
    """With the same words."""
    for call in (lambda **wrong: model.evaluate(X, Y, **wrong), lambda **w: model.predict(X, **w)):
        for wrong in ({"batch_size": 8.0}, {"steps": 1.5}):
            with pytest.raises(ValueError, match="is not a whole number"):
                call(verbose=0, **wrong)


def test_whole_numbers_of_any_kind_are_taken(model):
    """NumPy's too; no epoch is no mistake."""
    history = model.fit(X, Y, batch_size=np.int64(4), epochs=np.int32(0), initial_epoch=0)
    assert history.epoch == []


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_datasets_of_single_examples_are_named(model, method):
    """Before the first step, in words that do not ask for knowledge of layers."""
    with pytest.raises(ValueError, match=r"single examples.*dataset.batch\(32\).*shape=\(5,\)"):
        getattr(model, method)(SINGLE, verbose=0)


def test_a_missing_last_axis_is_left_to_keras():
    """A model of one number an example takes batches of plain numbers, as Keras lets it."""
    model = kmg.distribute(keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)]))
    data = tf.data.Dataset.from_tensor_slices(np.arange(4.0)).batch(2)
    np.testing.assert_array_equal(model.predict(data, verbose=0)[:, 0], [0, 2, 4, 6])
