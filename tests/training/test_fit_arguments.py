"""Wrong arguments, and labels that cannot fit, are named before anything is read or trained."""

import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.fit_arguments import require_fitting_labels

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
    with pytest.raises(ValueError, match=rf"`{name}`.*Expected.*Received: {name}=") as error:
        model.fit(X, Y, verbose=0, **{name: value})
    assert hint in str(error.value)


def test_evaluate_and_predict_name_the_argument(model):
    for call in (lambda **wrong: model.evaluate(X, Y, **wrong), lambda **w: model.predict(X, **w)):
        for wrong in ({"batch_size": 8.0}, {"steps": 1.5}):
            with pytest.raises(ValueError, match="is not a whole number"):
                call(verbose=0, **wrong)


def test_whole_numbers_of_any_kind_are_taken(model):
    history = model.fit(X, Y, batch_size=np.int64(4), epochs=np.int32(0), initial_epoch=0)
    assert history.epoch == []


@pytest.mark.slow
def test_class_weights_of_several_labels_are_named():
    """Classes in time: of arrays Keras reads one-hot labels at most, of datasets more."""
    sequence = keras.Sequential([keras.Input((4, 5)), keras.layers.Dense(3, activation="softmax")])
    sequence = kmg.distribute(sequence, devices=2)
    x, y, weights = np.zeros((6, 4, 5), "float32"), np.zeros((6, 4), "int32"), {0: 1.0, 2: 3.0}
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    last_axis = tf.data.Dataset.from_tensor_slices((x, y[..., np.newaxis])).batch(2)
    sequence.compile("sgd", "sparse_categorical_crossentropy")
    for call in (
        lambda: sequence.fit(x, y, class_weight=weights),
        lambda: sequence.fit(x, y[..., np.newaxis], class_weight=weights),
        lambda: sequence.fit(dataset, class_weight=weights),
        lambda: sequence.train_on_batch(x, y, class_weight=weights),
    ):
        with pytest.raises(ValueError, match=r"several labels per.*`sample_weight`.*shape="):
            call()
    assert sequence.fit(last_axis, class_weight=weights, verbose=0).epoch == [0]


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_datasets_of_single_examples_are_named(model, method):
    with pytest.raises(ValueError, match=r"single examples.*dataset.batch\(32\).*shape=\(5,\)"):
        getattr(model, method)(SINGLE, verbose=0)


def forgetting(part):
    """Batches of which one part has lost its shape, in a function of Python."""

    def forget(*batch):
        lost = tf.numpy_function(lambda array: array, [batch[part]], tf.float32)
        return *batch[:part], lost, *batch[part + 1 :]

    return SINGLE.batch(4).map(forget)


@pytest.mark.parametrize(
    ("part", "call"),
    [
        (0, lambda model, data: model.fit(data, verbose=0)),
        (1, lambda model, data: model.fit(data, verbose=0)),
        (1, lambda model, data: model.fit(SINGLE.batch(4), validation_data=data, verbose=0)),
        (1, lambda model, data: model.evaluate(data, verbose=0)),
        (0, lambda model, data: model.predict(data, verbose=0)),
    ],
)
def test_datasets_of_unknown_axes_are_named(model, part, call):
    """Inputs, labels, and those that `fit` validates with."""
    with pytest.raises(ValueError, match="unknown rank.*`tf.ensure_shape.*Received: spec="):
        call(model, forgetting(part))


def test_a_missing_last_axis_is_left_to_keras():
    model = kmg.distribute(keras.Sequential([keras.Input((1,)), keras.layers.Rescaling(2.0)]))
    data = tf.data.Dataset.from_tensor_slices(np.arange(4.0)).batch(2)
    np.testing.assert_array_equal(model.predict(data, verbose=0)[:, 0], [0, 2, 4, 6])


INT = tf.TensorSpec((None,), tf.int32)
ONE_HOT = tf.TensorSpec((None, 3), tf.float32)
BINARY = tf.TensorSpec((None, 1), tf.float32)


def classifier(units, loss):
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
        (1, "binary_crossentropy", INT, 3, "3 classes.*1 unit.*Give .* 3 units, and use sparse"),
    ],
)
def test_what_cannot_fit_is_named(units, loss, labels, classes, message):
    with pytest.raises(ValueError, match=message):
        require_fitting_labels(classifier(units, loss), labels, classes)


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
        (3, None, None, None),
    ],
)
def test_what_may_fit_is_left_alone(units, loss, labels, classes):
    require_fitting_labels(classifier(units, loss), labels, classes)


def test_fit_and_evaluate_ask_first():
    wrong = kmg.data.from_arrays(np.ones((6, 4)), np.arange(6) % 3, global_batch_size=2)
    right = kmg.data.from_arrays(np.ones((6, 4)), np.eye(3)[[0, 1, 2] * 2], global_batch_size=2)
    trained = kmg.distribute(classifier(3, "categorical_crossentropy"))
    for call in (
        lambda: trained.fit(wrong, verbose=0),
        lambda: trained.fit(right, validation_data=wrong, verbose=0),
        lambda: trained.evaluate(wrong, verbose=0),
    ):
        with pytest.raises(ValueError, match="Labels of one number do not fit"):
            call()
    assert trained.optimizer.iterations == 0


def test_a_callback_whose_package_is_missing_is_named(model, tmp_path, monkeypatch):
    """Before the first step: TensorFlow would say so when the first epoch is over."""
    board = keras.callbacks.TensorBoard(tmp_path)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    before = int(model.optimizer.iterations)
    with pytest.raises(ImportError, match="needs the package tensorboard.*pip install tensorboard"):
        model.fit(X, Y, verbose=0, callbacks=[board])
    assert int(model.optimizer.iterations) == before
