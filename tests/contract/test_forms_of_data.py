"""`fit` takes data in every form that Keras takes, and trains as Keras does."""

import random
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactness import models as made
from helpers.keras_versions import takes_none_as_input
from keras import layers

import keras_multigpu as kmg
from contract.pairs import (
    BATCHES,
    SIGNATURE,
    WEIGHTS,
    Batched,
    X,
    Y,
    assert_close,
    dataset,
    endless,
    reads_sparse,
)


def two_inputs(structure):
    first, second = keras.Input((5,), name="first"), keras.Input((5,), name="second")
    output = layers.Dense(1)(layers.Concatenate()([first, second]))
    return keras.Model(structure(first, second), output)


def nested(first, second):
    return {"first": first, "rest": [second]}


def with_optional_input():
    class AddIfGiven(layers.Layer):
        def call(self, x, other=None):
            return x if other is None else x + other

    first, second = keras.Input((5,)), keras.Input((5,), optional=True)
    return keras.Model([first, second], layers.Dense(1)(AddIfGiven()(first, second)))


def without_targets():
    return keras.Sequential([keras.Input((5,)), layers.Dense(2), made.OutputPenalty()])


SPARSE = tf.sparse.from_dense(np.where(X > 0, X, 0))


# Name, arguments of `fit`, and the model where it is not the usual one.
FORMS = [
    ("shuffled arrays", lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": True}),
    ("dataset with weights", lambda: {"x": dataset(X, Y, WEIGHTS)}),
    ("PyDataset", lambda: {"x": Batched()}),
    ("generator", lambda: {"x": endless(), "steps_per_epoch": 4}),
    ("dataset over several epochs", lambda: {"x": dataset(), "steps_per_epoch": 2}),
]


INPUTS = [
    ("nested", lambda: two_inputs(nested), nested(X, X[::-1])),
    ("None", with_optional_input, [X, None]),
    ("sparse", reads_sparse, SPARSE),
]


@pytest.mark.parametrize("arguments", [pytest.param(form, id=name) for name, form in FORMS])
@pytest.mark.slow
def test_fit_takes_data_in_every_form(pairs, arguments):
    pairs.assert_same_fit(lambda: {"epochs": 2, **arguments()})


@pytest.mark.parametrize(
    ("model", "x"),
    [
        pytest.param(*form, id=name, marks=takes_none_as_input if name == "None" else ())
        for name, *form in INPUTS
    ],
)
@pytest.mark.slow
def test_fit_takes_inputs_of_every_structure(pairs, model, x):
    pairs.assert_same_fit(lambda: {"x": x, "y": Y, "batch_size": 8}, model, optimizer="sgd")
    one, two = pairs(model, optimizer="sgd")
    assert_close(*(model.predict(x, batch_size=8, verbose=0) for model in (one, two)))


@pytest.mark.slow
def test_fit_needs_no_targets_where_a_layer_adds_the_loss(pairs):
    """A model trains without `y`."""
    pairs.assert_same_fit(lambda: {"x": X}, without_targets, loss=None, metrics=None)


@pytest.mark.slow
def test_a_dataset_of_unknown_length_is_one_epoch(pairs):
    """It trains like the same dataset of known length.

    Plain Keras is no help here: at the end of each epoch it counts one step too many.
    """
    one, two = pairs()
    expected = one.fit(dataset(), epochs=2, shuffle=False, verbose=0).history
    unknown = dataset().filter(lambda x, y: True)
    assert_close(expected, two.fit(unknown, epochs=2, verbose=0).history)
    assert_close(one.get_weights(), two.get_weights())


class Slow(keras.utils.PyDataset):
    """Twenty batches, read by threads that are slower than training."""

    num_batches = 20

    def __getitem__(self, index):
        time.sleep(0.02)
        return np.full((4, 2), index, "float32"), np.ones((4, 1), "float32")


def test_batches_of_threads_are_asked_for_only_within_epochs():
    """Keras stops its threads between epochs, and then its iterator raises.

    Which batches an epoch begins with depends on how far its threads had read ahead, in plain
    Keras as well; so the weights stay zero here.
    """
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model = kmg.distribute(model, kmg.strategy(devices=["CPU:0", "CPU:1"]))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    # Time in which whatever reads ahead asks for more.
    pause = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.1))
    data = Slow(workers=2, max_queue_size=4)
    options = {"epochs": 3, "steps_per_epoch": 6, "shuffle": False, "verbose": 0}
    history = model.fit(data, callbacks=[pause], **options).history
    assert history["loss"] == [1.0, 1.0, 1.0]
    assert model.optimizer.iterations == 18


def test_logs_count_only_the_steps_taken(pairs):
    data = tf.data.Dataset.from_generator(lambda: iter(BATCHES), output_signature=SIGNATURE)
    one, two = pairs()
    quiet = {"verbose": 0, "shuffle": False}
    one.fit(data.apply(tf.data.experimental.assert_cardinality(4)), epochs=2, **quiet)
    two.fit(data, epochs=2, **quiet)
    assert two.optimizer.iterations == 8
    assert_close(one.get_weights(), two.get_weights())


class Drawn(keras.utils.PyDataset):
    """Batches from the generators of the whole process."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        x = np.random.random((6, 5)).astype("float32") + np.float32(random.random())  # noqa: NPY002
        return x, x[:, :1]


@pytest.mark.parametrize("of_training", [False, True], ids=["validation", "training too"])
@pytest.mark.slow
def test_batches_that_draw_from_the_process_are_those_of_keras(pairs, of_training):
    """Nothing looks ahead: each draw comes when plain Keras makes it, and no other."""
    after = []

    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            after.append((random.getstate(), np.random.get_state()[1:3]))  # noqa: NPY002

    data = (lambda: {"x": Drawn(), "shuffle": True}) if of_training else lambda: {"x": X, "y": Y}
    given = {"epochs": 3, "validation_freq": 2, "callbacks": [Ends()]}
    pairs.assert_same_fit(lambda: {**data(), **given, "validation_data": Drawn()})
    assert repr(after[:3]) == repr(after[3:])


@pytest.mark.slow
def test_looking_at_batches_draws_nothing_from_the_process(pairs):
    """`memory` reads a batch."""
    model = pairs()[1]
    states = []

    class Begins(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            states.append(repr((random.getstate(), np.random.get_state())))  # noqa: NPY002

    for looked in (False, True):
        keras.utils.set_random_seed(2)
        if looked:
            kmg.memory(model, Drawn())
        model.fit(Drawn(), verbose=0, shuffle=False, callbacks=[Begins()])
    assert states[0] == states[1]


@pytest.mark.slow
def test_a_generator_loses_no_batch(pairs):
    """After two epochs of two batches the fifth is next."""
    left = iter([(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)])
    _, model = pairs()
    model.fit(left, steps_per_epoch=2, epochs=2, verbose=0)
    np.testing.assert_array_equal(next(left)[0], X[16:20])


@pytest.mark.slow
def test_a_finite_generator_is_one_epoch(pairs):
    """Without `steps_per_epoch` it is read to its end."""
    one, two = pairs()
    expected = one.fit(dataset(), shuffle=False, verbose=0).history
    assert_close(expected, two.fit((batch for batch in BATCHES), verbose=0).history)
    assert_close(one.get_weights(), two.get_weights())


@pytest.mark.slow
def test_a_generator_that_ends_early_ends_training(pairs):
    one, two = pairs()
    expected = one.fit(dataset(), shuffle=False, verbose=0).history
    with pytest.warns(UserWarning, match="ran out of data"):
        history = two.fit((batch for batch in BATCHES), steps_per_epoch=4, epochs=3, verbose=0)
    assert history.epoch == [0]
    assert_close(expected, history.history)
    validation = (batch for batch in BATCHES)
    with pytest.warns(UserWarning, match="ran out of data"):
        history = two.fit(X, Y, epochs=3, validation_data=validation, validation_steps=3, verbose=0)
    assert [len(history.history[name]) for name in ("loss", "val_loss")] == [3, 2]


MISTAKES = [
    ("unequal lengths", lambda model: model.fit(X, Y[:-1])),
    ("no data", lambda model: model.fit()),
    ("empty dataset", lambda model: model.fit(dataset().take(0))),
    ("empty generator", lambda model: model.fit(iter([]))),
    ("nothing to evaluate", lambda model: model.evaluate(dataset().take(0))),
    ("nothing to predict", lambda model: model.predict(dataset().take(0))),
]


@pytest.mark.parametrize("mistake", [pytest.param(call, id=name) for name, call in MISTAKES])
@pytest.mark.slow
def test_mistakes_are_value_errors(pairs, mistake):
    _, model = pairs()
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"\S+"):
        mistake(model)
    assert_close(before, model.get_weights())


@pytest.mark.slow
def test_limits_in_keras_config_are_applied_with_a_warning(pairs):
    """`max_epochs` and `max_steps_per_epoch`, with Keras's own warnings."""
    _, model = pairs()
    keras.config.set_max_epochs(1)
    keras.config.set_max_steps_per_epoch(2)
    try:
        with pytest.warns() as said:
            model.fit(X, Y, batch_size=8, epochs=2, verbose=0)
            model.fit(X, Y, steps_per_epoch=2, verbose=0)
    finally:
        keras.config.set_max_epochs(None)
        keras.config.set_max_steps_per_epoch(None)
    limits = ["Limiting steps_per_epoch to 2", "Limiting epochs to 1"]
    assert [(str(each.message), each.filename) for each in said] == [
        (limit, __file__) for limit in limits
    ]
    assert model.optimizer.iterations == 4
