"""`fit` takes data in every form that Keras takes, and trains as Keras does."""

import random
import time
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactness import models as made
from helpers.cpu_replicas import on_replicas, replicas_of
from helpers.keras_versions import takes_none_as_input
from keras import layers

import keras_multigpu as kmg
from contract.pairs import (
    BATCHES,
    KINDS,
    SIGNATURE,
    WEIGHTS,
    Batched,
    Squares,
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


def as_tuple(first, second):
    return first, second


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


STRINGS = np.array(["red", "green", "blue", "red green"] * 7 + ["blue"])[:, np.newaxis]


def reads_strings():
    text = layers.TextVectorization(output_mode="multi_hot", vocabulary=["red", "green", "blue"])
    return keras.Sequential([keras.Input((1,), dtype="string"), text, layers.Dense(1)])


RAGGED = tf.RaggedTensor.from_row_lengths(np.arange(87) % 7, [1, 2, 3, 4, 5] * 5 + [3, 3, 3, 3])


SPARSE = tf.sparse.from_dense(np.where(X > 0, X, 0))


class ReadsRagged(keras.Model):
    """A custom model that takes ragged rows."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = layers.Embedding(7, 3), layers.Dense(1)

    def call(self, x):
        return self.out(tf.reduce_mean(self.embedding(x), axis=1))


class Triplets(keras.Model):
    """A triplet loss."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(2, use_bias=False)

    def call(self, x):
        anchor, near, far = (self.body(part) for part in x)
        return keras.ops.sum((anchor - near) ** 2 - (anchor - far) ** 2, axis=1, keepdims=True)


# Name, arguments of `fit`, and the model where it is not the usual one.
FORMS = [
    ("arrays", lambda: {"x": X, "y": Y, "batch_size": 8}),
    ("dataset with weights", lambda: {"x": dataset(X, Y, WEIGHTS)}),
    ("PyDataset", lambda: {"x": Batched()}),
    ("generator", lambda: {"x": endless(), "steps_per_epoch": 4}),
    ("dataset over several epochs", lambda: {"x": dataset(), "steps_per_epoch": 2}),
    ("default batch size", lambda: {"x": X, "y": Y}),
    ("shuffled arrays", lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": True}),
    ("tensors", lambda: {"x": tf.constant(X), "y": tf.constant(Y)}),
    ("float64 arrays", lambda: {"x": X.astype("float64"), "y": Y}),
    ("dataset", lambda: {"x": dataset()}),
    ("dataset of full batches", lambda: {"x": dataset(X[:24], Y[:24])}),
    ("endless dataset", lambda: {"x": dataset().repeat(), "steps_per_epoch": 3}),
    ("PyDataset, workers", lambda: {"x": Batched(workers=2, use_multiprocessing=False)}),
    ("class weights", lambda: {"x": X, "y": KINDS, "class_weight": {0: 1, 1: 3, 2: 0.5}}),
    ("sample weights", lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS}),
    ("initial epoch", lambda: {"x": X, "y": Y, "initial_epoch": 1}),
]  # fmt: skip


INPUTS = [
    ("nested", lambda: two_inputs(nested), nested(X, X[::-1])),
    ("None", with_optional_input, [X, None]),
    ("tuple", lambda: two_inputs(as_tuple), as_tuple(X, X[::-1])),
    ("list for a tuple", lambda: two_inputs(as_tuple), list(as_tuple(X, X[::-1]))),
    ("text", reads_strings, tf.constant(STRINGS)),
    ("ragged", ReadsRagged, RAGGED),
    ("sparse", reads_sparse, SPARSE),
    ("sparse, read by a subclass", Squares, SPARSE),
    ("three in a tuple", Triplets, (X, X[::-1], 2 * X)),
]


@pytest.mark.parametrize("arguments", [pytest.param(form, id=name) for name, form in FORMS])
@pytest.mark.in_test_all("Keras's own tests take data in every form", after=5)
@pytest.mark.slow
def test_fit_takes_data_in_every_form(pairs, arguments):
    kinds = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    of_kinds = "class_weight" in arguments()
    model, options = (made.classifier, kinds) if of_kinds else (made.mlp, {})
    pairs.assert_same_fit(lambda: {"epochs": 2, **arguments()}, model, **options)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        pytest.param(*form, id=name, marks=takes_none_as_input if name == "None" else ())
        for name, *form in INPUTS
    ],
)
@pytest.mark.in_test_all("Keras's own tests take structures", after=2)
@pytest.mark.slow
def test_fit_takes_inputs_of_every_structure(pairs, model, x):
    pairs.assert_same_fit(lambda: {"x": x, "y": Y, "batch_size": 8}, model, optimizer="sgd")
    one, two = pairs(model, optimizer="sgd")
    assert_close(*(model.predict(x, batch_size=8, verbose=0) for model in (one, two)))


@pytest.mark.parametrize(
    "data", [lambda: {"x": X}, lambda: {"x": dataset(X)}], ids=["arrays", "dataset"]
)
@pytest.mark.in_test_all("one form of data shows it", after=1)
@pytest.mark.slow
def test_fit_needs_no_targets_where_a_layer_adds_the_loss(pairs, data):
    """A model trains without `y`."""
    pairs.assert_same_fit(lambda: {"epochs": 2, **data()}, without_targets, loss=None, metrics=None)


@pytest.mark.in_test_all("the model sees numbers")
def test_strings_may_be_looked_up_outside_the_model(pairs):
    lookup = layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
    data = dataset(STRINGS[:, 0], Y).map(lambda x, y: (lookup(x), y))
    pairs.assert_same_fit(
        lambda: {"x": data}, lambda: keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    )


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


@pytest.mark.in_test_all("such data are dealt out in test_unequal_leaves.py")
def test_a_distributed_dataset_is_read_whole(pairs):
    """A `DistributedDataset` trains like the dataset it was made from."""
    one, two = pairs()
    data = replicas_of(2).experimental_distribute_dataset(dataset())
    expected = one.fit(dataset(), epochs=2, shuffle=False, verbose=0).history
    assert_close(expected, two.fit(data, epochs=2, verbose=0).history)
    assert_close(one.get_weights(), two.get_weights())
    expected = one.evaluate(dataset(), verbose=0, return_dict=True)
    assert_close(expected, two.evaluate(data, verbose=0, return_dict=True))


def texts(lengths):
    """Batches of sentences, with other lengths and sizes."""
    for length in lengths:
        yield np.ones((length, length), "int32"), np.ones((length, 1), "float32")


@pytest.mark.in_test_all("steps of each size are counted in test_static_batch.py")
def test_batches_of_many_lengths_are_traced_once_or_twice():
    """`call` runs as often for 3 lengths as for 12, in `fit` and in single batches."""
    calls = []

    class Sentences(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = layers.Embedding(2, 3), layers.Dense(1)

        def call(self, x):
            calls.append(x.shape)
            return self.out(keras.ops.mean(self.embedding(x), axis=1))

    model = on_replicas(Sentences(), 2)
    model.compile("sgd", "mse")
    model.fit(texts(range(1, 4)), steps_per_epoch=3, verbose=0)
    for x, y in texts((1, 2)):
        model.test_on_batch(x, y)
        model.predict_on_batch(x)
    before = len(calls)
    model.fit(texts(range(1, 13)), steps_per_epoch=12, verbose=0)
    for x, y in texts(range(1, 13)):
        model.train_on_batch(x, y)
        model.test_on_batch(x, y)
        model.predict_on_batch(x)
    assert len(calls) == before


@pytest.mark.in_test_all("test_from_flow.py reads flows")
def test_a_flow_of_images_ends_its_epochs(pairs):
    """`ImageDataGenerator` makes endless iterators that are also `PyDataset`s."""
    images, kinds, _ = made.images(10)
    shape = images.shape[1:]

    def flat():
        return keras.Sequential([keras.Input(shape), layers.Flatten(), layers.Dense(1)])

    def flow():
        # Keras 3 offers it under TensorFlow's name only.
        generator = tf.keras.preprocessing.image.ImageDataGenerator()  # noqa: TID251
        return generator.flow(images, kinds, batch_size=4, shuffle=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # About images of two channels.
        pairs.assert_same_fit(lambda: {"x": flow(), "epochs": 2, "validation_data": flow()}, flat)


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


@pytest.mark.parametrize("looks", ["memory", "finder"])
@pytest.mark.in_test_all("both keep the state in one way", after=1)
@pytest.mark.slow
def test_looking_at_batches_draws_nothing_from_the_process(pairs, looks):
    """`memory`, which reads a batch, and a finder, which reads one for each trial."""
    model = pairs()[1]
    states = []

    class Begins(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            states.append(repr((random.getstate(), np.random.get_state())))  # noqa: NPY002

    for looked in (False, True):
        callbacks = [Begins()]
        keras.utils.set_random_seed(2)
        if looked and looks == "memory":
            kmg.memory(model, Drawn())
        elif looked:
            finder = kmg.callbacks.LearningRateFinder(steps=10, apply=None, verbose=0)
            callbacks.insert(0, finder)
        model.fit(Drawn(), verbose=0, shuffle=False, callbacks=callbacks)
    assert states[0] == states[1]
