"""Wrong arguments, and data that do not fit the model, are named before the first step."""

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.fit_arguments import (
    require_batches,
    require_tensors,
    require_units,
)

X, Y = np.zeros((8, 5), "float32"), np.zeros((8, 1), "float32")
EXAMPLES = tf.data.Dataset.from_tensor_slices((X, Y))
TEXT = np.array(["cat", "dog"] * 4)
RAGGED = np.empty(8, object)
RAGGED[:] = [np.ones(length) for length in range(8)]

WRONG = [
    ("batch_size", 8.0, "`batch_size=8`"),
    ("batch_size", "8", "`batch_size=1`"),
    ("epochs", 2.5, "`epochs=2`"),
    ("epochs", None, "0, 1, 2"),
    ("initial_epoch", 1.0, "`initial_epoch=1`"),
    ("steps_per_epoch", 2.0, "`steps_per_epoch=2`"),
    ("validation_steps", 1.5, "`validation_steps=2`"),
    ("validation_batch_size", True, "not a whole number"),
    ("validation_split", 1.5, "from 0 to less than 1"),
    ("class_weight", [1, 2], "not a dict"),
    ("batch_size", 0, "`batch_size=1`"),
    ("epochs", -1, "`epochs=1`"),
    ("steps_per_epoch", 0, "1, 2"),
    ("validation_steps", 0, "above zero"),
    ("validation_batch_size", 0, "above zero"),
]


def compiled(model, **options):
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=2))
    model.compile("sgd", "mse", **options)
    return model


@pytest.fixture(scope="module")
def model():
    """A compiled model, which no test trains."""
    return compiled(keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)]))


def dataset(*arrays):
    return tf.data.Dataset.from_tensor_slices(arrays).batch(4)


@pytest.mark.parametrize(("name", "value", "hint"), WRONG)
def test_fit_names_the_argument(model, name, value, hint):
    with pytest.raises(ValueError, match=rf"`{name}`.*Expected.*Received: {name}=") as error:
        model.fit(X, Y, verbose=0, **{name: value})
    assert hint in str(error.value)


def test_any_kind_of_integer_is_accepted(model):
    options = {"validation_data": (X, Y), "validation_freq": np.int64(2)}
    history = model.fit(
        X, Y, batch_size=np.int64(4), epochs=np.int32(0), initial_epoch=0, **options
    )
    assert history.epoch == []


class Batched(keras.utils.PyDataset):
    """No batches of one kind."""

    def __init__(self, length=0):
        super().__init__()
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return X[:4], Y[:4]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("batch_size", lambda model, data: model.fit(data, epochs=0, batch_size=2)),
        ("batch_size", lambda model, data: model.evaluate(data, batch_size=2, verbose=0)),
        ("batch_size", lambda model, data: model.predict(data, batch_size=2, verbose=0)),
        (
            "validation_batch_size",
            lambda model, data: model.fit(
                X, Y, epochs=0, validation_data=data, validation_batch_size=2
            ),
        ),
    ],
)
@pytest.mark.parametrize("data", [lambda: dataset(X, Y), lambda: Batched(2)])
def test_batch_sizes_beside_batches_are_said_to_be_ignored(model, name, call, data):
    with pytest.warns(UserWarning, match=f"`{name}` is ignored.*has its own batches") as said:
        call(model, data())
    assert [each.filename for each in said] == [__file__]
    # What arrays have is not passed on to a dataset.
    model.fit(X, Y, epochs=0, batch_size=4, validation_data=data())


def test_arguments_without_effect_are_said(model):
    with pytest.warns(UserWarning, match="`initial_epoch=3` is after `epochs=2`") as said:
        assert model.fit(X, Y, verbose=0, initial_epoch=3, epochs=2).epoch == []
    assert [each.filename for each in said] == [__file__]


KINDS = np.array([0, 1, 2, 2] * 2)


def three_kinds():
    layers = [keras.Input((5,)), keras.layers.Dense(3, activation="softmax")]
    made = kmg.distribute(keras.Sequential(layers), kmg.strategy(devices=["CPU:0"]))
    made.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    return made


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ({"cat": 1.0, "dog": 2.0}, "class='cat'"),
        ({0.5: 1.0}, "class=0.5"),
        ({0: "2.0"}, "weight='2.0'"),
        ({0: None}, "weight=None"),
        ({0: float("nan")}, "weight=nan"),
    ],
)
def test_class_weights_are_numbers_of_classes_and_finite(wrong, hint):
    made = three_kinds()
    for call in (
        lambda: made.fit(X, KINDS, class_weight=wrong),
        lambda: made.fit(dataset(X, KINDS), class_weight=wrong),
        lambda: made.train_on_batch(X, KINDS, class_weight=wrong),
    ):
        with pytest.raises(ValueError, match=f"`class_weight` holds.*Expected.*{hint}"):
            call()


@pytest.mark.slow
def test_classes_without_a_weight_get_1():
    """Keras does so for arrays, and in datasets only below the last class that has a weight."""
    made, x = three_kinds(), np.ones((8, 5), "float32")
    made.layers[-1].kernel.assign(np.zeros((5, 3)))
    weighted = [
        lambda weights: made.evaluate(x, KINDS, sample_weight=weights[KINDS], verbose=0),
        lambda weights: made.fit(x, KINDS, class_weight=weights, verbose=0).history["loss"][0],
        lambda weights: made.fit(dataset(x, KINDS), class_weight=weights, verbose=0),
        lambda weights: made.train_on_batch(x, KINDS, class_weight=weights),
    ]
    made.optimizer.learning_rate = 0.0
    expected = weighted[0](np.array([2.0, 3.0, 1.0]))
    for given in ({0: 2.0, 1: 3.0}, {0.0: 2, np.int64(1): 3}):
        for call in weighted[1:]:
            found = call(given)
            found = found.history["loss"][0] if hasattr(found, "history") else found
            np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_class_weights_of_several_labels_are_named():
    """Labels of time steps: Keras reads at most one-hot labels of arrays, and more of datasets."""
    sequence = keras.Sequential([keras.Input((4, 5)), keras.layers.Dense(3, activation="softmax")])
    sequence = kmg.distribute(sequence, devices=2)
    x, y, weights = (
        np.zeros((6, 4, 5), "float32"),
        np.zeros((6, 4), "int32"),
        {0: 1.0, 1: 1.0, 2: 3.0},
    )
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(2)
    last_axis = tf.data.Dataset.from_tensor_slices((x, y[..., np.newaxis])).batch(2)
    sequence.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=True)
    for call in (
        lambda: sequence.fit(x, y, class_weight=weights),
        lambda: sequence.fit(x, y[..., np.newaxis], class_weight=weights),
        lambda: sequence.fit(dataset, class_weight=weights),
        lambda: sequence.train_on_batch(x, y, class_weight=weights),
    ):
        with pytest.raises(ValueError, match=r"several labels per.*`sample_weight`.*shape="):
            call()
    assert sequence.fit(last_axis, class_weight=weights, verbose=0).epoch == [0]


def forgetting(part):
    """Batches of which one part has lost its shape in a Python function."""

    def forget(*batch):
        lost = tf.numpy_function(lambda array: array, [batch[part]], tf.float32)
        return *batch[:part], lost, *batch[part + 1 :]

    return EXAMPLES.batch(4).map(forget)


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
        (2, "sparse_categorical_crossentropy", INT, 3, "3 classes.*2 units.*Give .* 3 units"),
        (1, keras.losses.sparse_categorical_crossentropy, BINARY, 2, "2 classes.*1 unit\\."),
        (1, "binary_crossentropy", INT, 3, "3 classes.*1 unit.*Give .* 3 units, and use sparse"),
    ],
)
def test_classes_that_do_not_fit_the_loss_are_named(units, loss, labels, classes, message):
    with pytest.raises(ValueError, match=message):
        require_units(classifier(units, loss), labels, classes)


@pytest.mark.parametrize(
    ("units", "loss", "labels", "classes"),
    [
        (3, "sparse_categorical_crossentropy", INT, 3),
        (10, "sparse_categorical_crossentropy", INT, 3),
        (3, keras.losses.SparseCategoricalCrossentropy(ignore_class=7), INT, 8),
        (3, "categorical_crossentropy", ONE_HOT, 3),
        (3, "binary_crossentropy", ONE_HOT, 0),
        (3, "sparse_categorical_crossentropy", INT, 0),
        (1, "binary_crossentropy", INT, 2),
        (1, "binary_crossentropy", BINARY, 2),
        (3, "mse", INT, 3),
        (3, lambda y, y_pred: y_pred[:, 0], INT, 5),
        (3, None, None, 0),
    ],
)
def test_labels_that_may_fit_are_left_alone(units, loss, labels, classes):
    require_units(classifier(units, loss), labels, classes)


TEXT_IN_Y = r"`y` holds text\. Expected numbers\. Number the classes.*Received: came="
OBJECTS = r"is an array of Python objects\. Expected numbers.*astype\('float32'\).*Received: first="
SINGLE_VALUES = r"`y` holds single Python values\. Expected an array.*np\.array.*Received: first="
UNFIT = {
    "text as objects": (TEXT_IN_Y, X, TEXT.astype(object)),
    "text of pandas": (TEXT_IN_Y, X, pd.Series(TEXT, dtype="string")),
    "text in a dataset": (TEXT_IN_Y, dataset(X, TEXT), None),
    "text of a generator": (TEXT_IN_Y, ((X, TEXT) for _ in range(2)), None),
    "text as input": (r"`x\['a'\]` holds text.*astype\(object\)", {"a": TEXT}, Y),
    "numbers of a list": (SINGLE_VALUES, X, [0, 1] * 4),
    "ragged": (f"`x` {OBJECTS}", RAGGED, Y),
    "None": (f"`y` {OBJECTS}", X, np.array([None] * 8)),
    "table of objects": (f"`x` {OBJECTS}", pd.DataFrame(X).astype(object), Y),
}
"""Values that are no tensors, named with the first such value and a line that fixes it."""


LARGE = np.zeros((8, 10, 12, 3), "float32")


def evaluates(*data, **wrong):
    return lambda model: model.evaluate(*data, verbose=0, **wrong)


def predicts(data, **wrong):
    return lambda model: model.predict(data, verbose=0, **wrong)


def fits(x=X, y=Y, **wrong):
    return lambda model: model.fit(x, y, verbose=0, **wrong)


def validates(data, **more):
    return fits(validation_data=data, **more)


NO_NUMBER = "is not a whole number"
FREQUENCY = "neither an interval nor a list.*Expected.*Received: val"
EMPTY = "`validation_data` is empty.*Received: batches=0"
SINGLE = r"single examples.*dataset.batch\(32\).*shape=\(5,\)"
NO_RANK = "unknown rank.*`tf.ensure_shape.*Received: spec="
NO_LABELS = "batches have no labels"
WHOLE = [{"batch_size": 8.0}, {"steps": 1.5}, {"batch_size": 0}, {"steps": 0}]
MISTAKES = [
    *(
        (NO_NUMBER, call)
        for wrong in WHOLE
        for call in (evaluates(X, Y, **wrong), predicts(X, **wrong))
    ),
    *(
        (FREQUENCY, validates((X, Y), validation_freq=frequency))
        for frequency in (0, -1, "often", None, 1.5, [], [0, 2], ["2"])
    ),
    *(
        (EMPTY, validates(empty, **more))
        for empty in ((X[:0], Y[:0]), EXAMPLES.batch(4).take(0), Batched())
        for more in ({}, {"validation_steps": 2})
    ),
    ("`x` has no examples", evaluates(X[:0], Y[:0], steps=2)),
    *((SINGLE, call) for call in (fits(EXAMPLES, None), evaluates(EXAMPLES), predicts(EXAMPLES))),
    *((NO_RANK, fits(forgetting(part), None)) for part in (0, 1)),
    (NO_RANK, fits(EXAMPLES.batch(4), None, validation_data=forgetting(1))),
    (NO_RANK, evaluates(forgetting(1))),
    (NO_RANK, predicts(forgetting(0))),
    *((message, fits(x, y)) for message, x, y in UNFIT.values()),
    ("holds text", fits(sample_weight=TEXT)),
    ("holds text", fits(y=TEXT, validation_split=0.5)),
    ("holds text", validates((X, TEXT))),
    ("holds text", evaluates(X, TEXT)),
    ("holds text", predicts(TEXT)),
    *(
        (f"{NO_LABELS}.*Received: loss='mse'", fits(x, None))
        for x in (X, dataset(X), ((X,) for _ in range(2)))
    ),
    *(
        (r"of `validation_data` have no.*=\(x, y\)", validates(data))
        for data in (X, (X,), dataset(X))
    ),
    (NO_LABELS, evaluates(X)),
]
"""What is wrong, and a call that says so before it changes anything."""


@pytest.mark.parametrize(("message", "call"), MISTAKES)
def test_what_does_not_fit_is_named_before_the_first_step(model, message, call):
    with pytest.raises(ValueError, match=message):
        call(model)
    assert not model.optimizer.built or int(model.optimizer.iterations) == 0


def test_classes_are_counted_before_the_first_step():
    wrong, right = (
        kmg.data.from_arrays(np.ones((6, 4)), np.arange(6) % classes, global_batch_size=2)
        for classes in (3, 2)
    )
    model = kmg.distribute(classifier(2, "sparse_categorical_crossentropy"))
    for call in (fits(wrong, None), fits(right, None, validation_data=wrong), evaluates(wrong)):
        with pytest.raises(ValueError, match="3 classes do not fit"):
            call(model)
    assert model.optimizer.iterations == 0


def test_images_of_another_size_are_named():
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = compiled(keras.Sequential(layers))
    for call in (
        *(fits(LARGE), fits(dataset(LARGE, Y), None), fits(((LARGE, Y) for _ in range(2)), None)),
        *(fits(LARGE[:, :8, :8], validation_data=(LARGE, Y)), evaluates(LARGE, Y)),
        predicts(LARGE),
    ):
        with pytest.raises(ValueError, match=r"(?s)incompatible with the.*\(None, 10, 12, 3\)"):
            call(model)
    assert int(model.optimizer.iterations) == 0


@pytest.mark.slow
def test_data_that_keras_accepts_are_accepted():
    class OwnStep(keras.Model):
        def train_step(self, data):
            return {"classes": tf.size(tf.unique(data[1])[0])}

    pool = [keras.layers.Conv2D(2, 3), keras.layers.GlobalMaxPooling2D(), keras.layers.Dense(1)]
    layers = [keras.Input((8, 8, 3)), *pool]
    compiled(keras.Sequential(layers), run_eagerly=True).fit(LARGE, Y, verbose=0)
    # In these tests Keras started without pandas, which is needed to train on such a table.
    require_tensors(pd.DataFrame({"a": np.ones(8), "b": [True, False] * 4}), pd.Series([1.0] * 8))
    inputs = keras.Input((5,))
    own = OwnStep(inputs, keras.layers.Dense(1)(inputs))
    trained = compiled(own, run_eagerly=True).fit(X, TEXT.astype(object), verbose=0)
    assert trained.history == {"classes": [2]}


def test_inputs_of_several_ranks_are_compared_one_by_one():
    inputs = [keras.Input((6, 6, 3), name="image"), keras.Input((6, 6), name="depth")]
    model = keras.Model(inputs, [keras.layers.Flatten()(each) for each in inputs])
    image, depth = tf.TensorSpec((None, 6, 6, 3)), tf.TensorSpec((None, 6, 6))
    require_batches(model, ({"image": image, "depth": depth}, None, None))
    require_batches(model, ((image, depth), None, None))
    with pytest.raises(ValueError, match="single examples"):
        require_batches(model, ((depth, depth), None, None))
