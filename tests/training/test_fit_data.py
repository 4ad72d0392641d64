"""Data that cannot belong to a model are named before the first step, and all others are taken."""

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.fit_data import require_batches, require_tensors

X, Y = np.zeros((8, 5), "float32"), np.zeros((8, 1), "float32")
TEXT = np.array(["cat", "dog"] * 4)
RAGGED = np.empty(8, object)
RAGGED[:] = [np.ones(length) for length in range(8)]


def compiled(model):
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=2))
    model.compile("sgd", "mse")
    return model


@pytest.fixture(scope="module")
def model():
    """One of five numbers, which no test trains."""
    return compiled(keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]))


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


TEXT_IN_Y = r"`y` holds text\. Expected numbers\. Number the classes.*Received: came="
OBJECTS = r"is an array of Python objects\. Expected numbers.*astype\('float32'\).*Received: first="
SINGLE = r"`y` holds single Python values\. Expected an array.*np\.array.*Received: first="
WRONG = {
    "text": (TEXT_IN_Y, X, TEXT),
    "text as objects": (TEXT_IN_Y, X, TEXT.astype(object)),
    "text of pandas": (TEXT_IN_Y, X, pd.Series(TEXT, dtype="string")),
    "text in a dataset": (TEXT_IN_Y, dataset(X, TEXT), None),
    "text of a generator": (TEXT_IN_Y, ((X, TEXT) for _ in range(2)), None),
    "text as input": (r"`x\['a'\]` holds text.*astype\(object\)", {"a": TEXT}, Y),
    "text of a list": (SINGLE, X, list(TEXT)),
    "numbers of a list": (SINGLE, X, [0, 1] * 4),
    "ragged": (f"`x` {OBJECTS}", RAGGED, Y),
    "None": (f"`y` {OBJECTS}", X, np.array([None] * 8)),
    "numbers as objects": (f"`y` {OBJECTS}", X, Y.astype(object)),
    "table of objects": (f"`x` {OBJECTS}", pd.DataFrame(X).astype(object), Y),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_becomes_no_tensor_is_named(model, name):
    """In `fit`, with the first of it and a line that mends it."""
    message, x, y = WRONG[name]
    with pytest.raises(ValueError, match=message):
        model.fit(x, y, verbose=0)
    assert int(model.optimizer.iterations) == 0


def test_others_name_it_as_well(model):
    """Weights, what is split off or validates, `evaluate` and `predict`."""
    for call in (
        lambda: model.fit(X, Y, sample_weight=TEXT, verbose=0),
        lambda: model.fit(X, TEXT, validation_split=0.5, verbose=0),
        lambda: model.fit(X, Y, validation_data=(X, TEXT), verbose=0),
        lambda: model.evaluate(X, TEXT, verbose=0),
        lambda: model.predict(TEXT, verbose=0),
    ):
        with pytest.raises(ValueError, match="holds text"):
            call()


def test_labels_that_are_missing_are_named(model):
    for x in (X, dataset(X), ((X,) for _ in range(2))):
        with pytest.raises(ValueError, match=r"batches have no labels.*Received: loss='mse'"):
            model.fit(x, verbose=0)
    for validation in (X, (X,), dataset(X)):
        with pytest.raises(ValueError, match=r"of `validation_data` have no.*=\(x, y\)"):
            model.fit(X, Y, validation_data=validation, verbose=0)
    with pytest.raises(ValueError, match="batches have no labels"):
        model.evaluate(X, verbose=0)
    assert int(model.optimizer.iterations) == 0


LARGE = np.zeros((8, 10, 12, 3), "float32")


@pytest.mark.parametrize("functional", [False, True])
def test_images_of_another_size_are_named(functional):
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model = compiled(keras.Model(model.inputs, model.outputs) if functional else model)
    for call in (
        lambda: model.fit(LARGE, Y, verbose=0),
        lambda: model.fit(dataset(LARGE, Y), verbose=0),
        lambda: model.fit(((LARGE, Y) for _ in range(2)), verbose=0),
        lambda: model.fit(LARGE[:, :8, :8], Y, validation_data=(LARGE, Y), verbose=0),
        lambda: model.evaluate(LARGE, Y, verbose=0),
        lambda: model.predict(LARGE, verbose=0),
    ):
        with pytest.raises(ValueError, match=r"shape \(8, 8, 3\), and the data has \(10, 12, 3\)"):
            call()
    assert int(model.optimizer.iterations) == 0


@pytest.mark.slow
def test_what_keras_trains_is_taken():
    class OwnStep(keras.Model):
        def train_step(self, data):
            return {"classes": tf.size(tf.unique(data[1])[0])}

    pool = [keras.layers.Conv2D(2, 3), keras.layers.GlobalMaxPooling2D(), keras.layers.Dense(1)]
    compiled(keras.Sequential([keras.Input((8, 8, 3)), *pool])).fit(LARGE, Y, verbose=0)
    # In these tests Keras started without pandas, which is needed to train on such a table.
    require_tensors(pd.DataFrame({"a": np.ones(8), "b": [True, False] * 4}), pd.Series([1.0] * 8))
    inputs = keras.Input((5,))
    own = OwnStep(inputs, keras.layers.Dense(1)(inputs))
    assert compiled(own).fit(X, TEXT.astype(object), verbose=0).history == {"classes": [2]}


def test_inputs_are_compared_by_name():
    inputs = [keras.Input((6, 6, 3), name="image"), keras.Input((6, 6), name="depth")]
    model = keras.Model(inputs, [keras.layers.Flatten()(each) for each in inputs])
    image, depth = tf.TensorSpec((None, 6, 6, 3)), tf.TensorSpec((None, 6, 6))
    require_batches(model, ({"image": image, "depth": depth}, None, None))
    require_batches(model, ((image, depth), None, None))
    with pytest.raises(ValueError, match="single examples"):
        require_batches(model, ({"image": depth, "depth": depth}, None, None))
