"""`fit`, `evaluate`, `predict` and the `*_on_batch` methods keep Keras's contract.

What plain Keras returns on one device is the expectation; 3 replicas must return the same.
"""

import functools
import itertools
import random
import time
import warnings

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf
from exactness import models as made
from exactness.runs import difference
from helpers.keras_versions import ON_THE_OLDEST, takes_none_as_input
from helpers.rows_in_python import zeros_after
from keras import layers

import keras_multigpu as kmg

X, Y, _ = made.regression(29)
WEIGHTS = made.weighted(29)[2]
KINDS = made.classes(29)[1]
BATCH = 8
BATCHES = [(X[start : start + BATCH], Y[start : start + BATCH]) for start in range(0, 29, BATCH)]
SIGNATURE = tuple(tf.TensorSpec((None, part.shape[1])) for part in BATCHES[0])


def three_replicas():
    """The strategy of this file."""
    return kmg.strategy("mirrored", devices=3)


def compiled(model=made.mlp, **options):
    """A compiled model, always with the same first weights."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    model = model()
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **options})
    return model


PAIRS = {}
"""The models of `one_and_three`: their steps are compiled once for all tests."""


def one_and_three(model=made.mlp, **options):
    """The same compiled model twice, as new: plain Keras, and on 3 replicas."""
    key = model, repr(options)
    if key not in PAIRS:
        one, other = compiled(model, **options), compiled(model, **options)
        # To make a graph pays off for the model that most tests train.
        one.run_eagerly |= model is not made.mlp
        if not one.built:
            return one, kmg.distribute(other, three_replicas())
        for each in (one, other):
            if each.optimizer is not None:
                each.optimizer.build(each.trainable_variables)
        start = [variable.numpy() for variable in variables_of(one)]
        PAIRS[key] = one, kmg.distribute(other, three_replicas()), start
    *pair, start = PAIRS[key]
    for one in pair:
        for variable, value in zip(variables_of(one), start, strict=True):
            variable.assign(value)
    return pair


def variables_of(model):
    """What training changes in a model and its optimizer."""
    return model.weights + (model.optimizer.variables if model.optimizer else [])


def trained(model, *batch, **options):
    """What `train_on_batch` returns. Keras 3.10 adds it to what its metrics hold already."""
    if ON_THE_OLDEST:
        model.reset_metrics()
    return model.train_on_batch(*batch, **options)


def evaluated(model, *batch, **options):
    """The same for `test_on_batch`."""
    if ON_THE_OLDEST:
        model.reset_metrics()
    return model.test_on_batch(*batch, **options)


def assert_close(expected, found):
    """The same structure with the same numbers."""
    keras.tree.assert_same_structure(expected, found)
    for one, other in zip(keras.tree.flatten(expected), keras.tree.flatten(found), strict=True):
        # Keras 3.10 returns the logs of single batches as arrays.
        assert type(one) is type(other) or ON_THE_OLDEST
        if isinstance(one, str) or one is None:
            assert one == other
        else:
            assert difference(np.asarray(one), np.asarray(other)) < 2e-5


def assert_same_fit(arguments, model=made.mlp, **options):
    """`fit` ends with the same weights and the same history."""
    one, three = one_and_three(model, **options)
    histories = []
    for model in (one, three):
        keras.utils.set_random_seed(2)
        histories.append(model.fit(**{"verbose": 0, "shuffle": False, **arguments()}).history)
    assert_close(*histories)
    assert_close(one.get_weights(), three.get_weights())
    return histories[1]


# Data in every form.


def dataset(*arrays):
    """Batches of 8 as a `tf.data.Dataset`."""
    return tf.data.Dataset.from_tensor_slices(arrays or (X, Y)).batch(BATCH)


class Batched(keras.utils.PyDataset):
    """Batches of 8 as a `PyDataset`, which reverses them after each epoch."""

    def __init__(self, **options):
        super().__init__(**options)
        self.batches = list(BATCHES)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]

    def on_epoch_end(self):
        self.batches.reverse()


def endless(batches=BATCHES):
    """Batches as a Python generator."""
    yield from itertools.cycle(batches)


def two_inputs(structure):
    """A model of two inputs in a dict, a tuple or a nested structure."""
    first, second = keras.Input((5,), name="first"), keras.Input((5,), name="second")
    output = layers.Dense(1)(layers.Concatenate()([first, second]))
    return keras.Model(structure(first, second), output)


def as_tuple(first, second):
    return first, second


def nested(first, second):
    return {"first": first, "rest": [second]}


def with_optional_input():
    """A model of two inputs, of which one may be None."""

    class AddIfGiven(layers.Layer):
        def call(self, x, other=None):
            return x if other is None else x + other

    first, second = keras.Input((5,)), keras.Input((5,), optional=True)
    return keras.Model([first, second], layers.Dense(1)(AddIfGiven()(first, second)))


def without_targets():
    """A model whose only loss is added by a layer."""
    return keras.Sequential([keras.Input((5,)), layers.Dense(2), made.OutputPenalty()])


STRINGS = np.array(["red", "green", "blue", "red green"] * 7 + ["blue"])[:, np.newaxis]


def reads_strings():
    """A model whose first layer takes text."""
    text = layers.TextVectorization(output_mode="multi_hot", vocabulary=["red", "green", "blue"])
    return keras.Sequential([keras.Input((1,), dtype="string"), text, layers.Dense(1)])


RAGGED = tf.RaggedTensor.from_row_lengths(np.arange(87) % 7, [1, 2, 3, 4, 5] * 5 + [3, 3, 3, 3])
SPARSE = tf.sparse.from_dense(np.where(X > 0, X, 0))


class ReadsRagged(keras.Model):
    """A model of the user's own that takes rows of many lengths."""

    def __init__(self):
        super().__init__()
        self.embedding, self.out = layers.Embedding(7, 3), layers.Dense(1)

    def call(self, x):
        return self.out(tf.reduce_mean(self.embedding(x), axis=1))


class Squares(keras.Model):
    """A model of the user's own that Keras can build from a batch only."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x):
        return self.out(x)


def reads_sparse():
    """A model whose input is sparse."""
    return keras.Sequential([keras.Input((5,), sparse=True), layers.Dense(1)])


class Triplets(keras.Model):
    """How much nearer an anchor is to one example than to another."""

    def __init__(self):
        super().__init__()
        self.body = layers.Dense(2, use_bias=False)

    def call(self, x):
        anchor, near, far = (self.body(part) for part in x)
        return keras.ops.sum((anchor - near) ** 2 - (anchor - far) ** 2, axis=1, keepdims=True)


# Name, arguments of `fit`, and the model where it is not the usual one.
FORMS = [
    ("arrays", lambda: {"x": X, "y": Y, "batch_size": 8}),
    ("default batch size", lambda: {"x": X, "y": Y}),
    ("shuffled arrays", lambda: {"x": X, "y": Y, "batch_size": 8, "shuffle": True}),
    ("tensors", lambda: {"x": tf.constant(X), "y": tf.constant(Y)}),
    ("float64 arrays", lambda: {"x": X.astype("float64"), "y": Y}),
    ("dataset", lambda: {"x": dataset()}),
    ("dataset of full batches", lambda: {"x": dataset(X[:24], Y[:24])}),
    ("dataset with weights", lambda: {"x": dataset(X, Y, WEIGHTS)}),
    ("endless dataset", lambda: {"x": dataset().repeat(), "steps_per_epoch": 3}),
    ("dataset over several epochs", lambda: {"x": dataset(), "steps_per_epoch": 2}),
    ("PyDataset", lambda: {"x": Batched()}),
    ("PyDataset, workers", lambda: {"x": Batched(workers=2, use_multiprocessing=False)}),
    ("generator", lambda: {"x": endless(), "steps_per_epoch": 4}),
    ("class weights", lambda: {"x": X, "y": KINDS, "class_weight": {0: 1, 1: 3, 2: 0.5}}),
    ("sample weights", lambda: {"x": X, "y": Y, "sample_weight": WEIGHTS}),
    ("initial epoch", lambda: {"x": X, "y": Y, "initial_epoch": 1}),
]  # fmt: skip

INPUTS = [
    ("tuple", lambda: two_inputs(as_tuple), as_tuple(X, X[::-1])),
    ("nested", lambda: two_inputs(nested), nested(X, X[::-1])),
    ("list for a tuple", lambda: two_inputs(as_tuple), list(as_tuple(X, X[::-1]))),
    ("None", with_optional_input, [X, None]),
    ("text", reads_strings, tf.constant(STRINGS)),
    ("ragged", ReadsRagged, RAGGED),
    ("sparse", reads_sparse, SPARSE),
    ("sparse, read by a subclass", Squares, SPARSE),
    ("three in a tuple", Triplets, (X, X[::-1], 2 * X)),
]


@pytest.mark.parametrize("arguments", [pytest.param(form, id=name) for name, form in FORMS])
@pytest.mark.slow
def test_fit_takes_data_in_every_form(arguments):
    """The form of the data does not matter."""
    kinds = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    of_kinds = "class_weight" in arguments()
    model, options = (made.classifier, kinds) if of_kinds else (made.mlp, {})
    assert_same_fit(lambda: {"epochs": 2, **arguments()}, model, **options)


@pytest.mark.parametrize(
    ("model", "x"),
    [
        pytest.param(*form, id=name, marks=takes_none_as_input if name == "None" else ())
        for name, *form in INPUTS
    ],
)
@pytest.mark.slow
def test_fit_takes_inputs_of_every_structure(model, x):
    """Structures, strings and None reach the model as they are; predictions too."""
    assert_same_fit(lambda: {"x": x, "y": Y, "batch_size": 8}, model, optimizer="sgd")
    one, three = one_and_three(model, optimizer="sgd")
    assert_close(*(model.predict(x, batch_size=8, verbose=0) for model in (one, three)))
    assert_close(*(model.evaluate(x, Y, batch_size=8, verbose=0) for model in (one, three)))


@pytest.mark.parametrize(
    "data", [lambda: {"x": X}, lambda: {"x": dataset(X)}], ids=["arrays", "dataset"]
)
@pytest.mark.slow
def test_fit_needs_no_targets_where_a_layer_adds_the_loss(data):
    """A model trains without `y`."""
    assert_same_fit(lambda: {"epochs": 2, **data()}, without_targets, loss=None, metrics=None)


@pytest.mark.slow
def test_strings_looked_up_outside_the_model():
    """A dataset may turn strings into numbers."""
    lookup = layers.StringLookup(vocabulary=["red", "green", "blue"], output_mode="one_hot")
    data = dataset(STRINGS[:, 0], Y).map(lambda x, y: (lookup(x), y))
    assert_same_fit(
        lambda: {"x": data}, lambda: keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    )


@pytest.mark.slow
def test_a_dataset_of_unknown_length_is_one_epoch():
    """It trains like the same dataset of known length.

    Plain Keras is no help here: at the end of each epoch it counts one step too many.
    """
    one, three = one_and_three()
    expected = one.fit(dataset(), epochs=2, shuffle=False, verbose=0).history
    unknown = dataset().filter(lambda x, y: True)
    assert_close(expected, three.fit(unknown, epochs=2, verbose=0).history)
    assert_close(one.get_weights(), three.get_weights())


@pytest.mark.slow
def test_a_distributed_dataset_is_read_whole():
    """A `DistributedDataset` trains like the dataset it was made of, in the parts that it has."""
    one, three = one_and_three()
    data = three_replicas().experimental_distribute_dataset(dataset())
    expected = one.fit(dataset(), epochs=2, shuffle=False, verbose=0).history
    assert_close(expected, three.fit(data, epochs=2, verbose=0).history)
    assert_close(one.get_weights(), three.get_weights())
    expected = one.evaluate(dataset(), verbose=0, return_dict=True)
    assert_close(expected, three.evaluate(data, verbose=0, return_dict=True))


@pytest.mark.slow
def test_a_generator_loses_no_batch():
    """Two epochs of 2 batches take 4, and the 5th is the next."""
    left = iter([(X[i : i + 4], Y[i : i + 4]) for i in range(0, 20, 4)])
    _, model = one_and_three()
    model.fit(left, steps_per_epoch=2, epochs=2, verbose=0)
    np.testing.assert_array_equal(next(left)[0], X[16:20])


@pytest.mark.slow
def test_a_finite_generator_is_one_epoch():
    """Without `steps_per_epoch` an epoch is all that a generator yields."""
    one, three = one_and_three()
    expected = one.fit(dataset(), shuffle=False, verbose=0).history
    assert_close(expected, three.fit((batch for batch in BATCHES), verbose=0).history)
    assert_close(one.get_weights(), three.get_weights())


class WithNone(Squares):
    """A model that has nothing to say for one of its outputs."""

    def call(self, x):
        return {"value": self.out(x), "more": None}


@pytest.mark.slow
def test_an_output_may_be_none():
    """Without a loss it trains, as in Keras, and `predict` leaves it as it is."""
    options = {"loss": {"value": "mse"}, "metrics": None, "optimizer": "sgd"}
    assert_same_fit(lambda: {"x": X, "y": {"value": Y}}, WithNone, **options)
    model = kmg.distribute(compiled(WithNone, **options), three_replicas())
    assert_close(model.predict(X, verbose=0), {"value": model(X)["value"].numpy(), "more": None})


def texts(lengths):
    """Batches of sentences, each of another length and number."""
    for length in lengths:
        yield np.ones((length, length), "int32"), np.ones((length, 1), "float32")


@pytest.mark.slow
def test_batches_of_many_lengths_are_traced_once_or_twice():
    """Python meets `call` as often for 3 lengths as for 12, in `fit` and batch by batch."""
    calls = []

    class Sentences(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = layers.Embedding(2, 3), layers.Dense(1)

        def call(self, x):
            calls.append(x.shape)
            return self.out(keras.ops.mean(self.embedding(x), axis=1))

    model = kmg.distribute(Sentences(), three_replicas())
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


class ReadsNumbers(keras.Model):
    """A model that only runs eagerly, because it looks at the numbers."""

    def __init__(self):
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x):
        return self.out(x * float(x.numpy().shape[1]))


class OnlyTrains(keras.Model):
    """A model that has a `train_step` and cannot be called."""

    def __init__(self):
        super().__init__()
        self.body, self.error = layers.Dense(1), keras.metrics.MeanSquaredError(name="error")

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self.body(x)
            loss = self.compute_loss(x, y, y_pred)
        weights = self.body.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.error.update_state(y, y_pred)
        return {"error": self.error.result()}


class TakesApart(keras.Model):
    """A model whose `train_step` calls it with the halves of `x`, as recipes for metrics do.

    Called with `x`, it would be built for twice as many features.
    """

    def __init__(self):
        super().__init__()
        self.flat, self.out = layers.Flatten(), layers.Dense(3)
        self.apart = keras.metrics.Mean(name="apart")

    def call(self, x):
        return self.out(self.flat(x))

    def train_step(self, data):
        x, _ = data
        with tf.GradientTape() as tape:
            one, other = self(x[:, :2], training=True), self(x[:, 2:4], training=True)
            loss = keras.ops.mean(keras.ops.square(one - other - 1))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.apart.update_state(loss)
        return {"apart": self.apart.result()}


def takes_apart():
    """The same as a functional model, which says what it takes."""
    inputs = keras.Input((2,))
    return FunctionalTakesApart(inputs, layers.Dense(3)(inputs))


class FunctionalTakesApart(keras.Model):
    """See `takes_apart`."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.apart = keras.metrics.Mean(name="apart")

    train_step = TakesApart.train_step


@pytest.mark.filterwarnings("ignore:Layer 'reads_numbers' looks like it has unbuilt state")
@pytest.mark.parametrize(
    ("model", "options"),
    [
        (ReadsNumbers, {"run_eagerly": True}),
        (OnlyTrains, {"metrics": None}),
        (TakesApart, {"metrics": None}),
        (takes_apart, {"metrics": None}),
    ],
    ids=["eager", "train step", "other inputs", "other inputs, functional"],
)
@pytest.mark.slow
def test_models_that_keras_never_calls_symbolically(model, options):
    """They are built by the first batch that is there, as in Keras."""
    assert_same_fit(lambda: {"x": X, "y": Y, "batch_size": 8, "epochs": 2}, model, **options)
    if model is ReadsNumbers:
        one, three = one_and_three(model, **options)
        assert_close(*(trained(each, X, Y) for each in (one, three)))
        assert_close(*(evaluated(each, X, Y) for each in (one, three)))
        assert_close(*(each.predict(X, verbose=0) for each in (one, three)))


@pytest.mark.slow
def test_a_generator_of_scipy_matrices():
    """Keras makes sparse tensors of them."""
    sparse = scipy.sparse.csr_matrix(np.where(X > 0, X, 0))
    batches = [(sparse[i : i + 8], Y[i : i + 8]) for i in range(0, 29, 8)]
    # Adam squares gradients, so it tells whether the rows of a kernel are added up first.
    assert_same_fit(lambda: {"x": endless(batches), "steps_per_epoch": 4}, reads_sparse)


@pytest.mark.slow
def test_a_generator_that_ends_early_ends_training():
    """With Keras's warning, and with the history of the epochs that had data."""
    one, three = one_and_three()
    expected = one.fit(dataset(), shuffle=False, verbose=0).history
    with pytest.warns(UserWarning, match="ran out of data"):
        history = three.fit((batch for batch in BATCHES), steps_per_epoch=4, epochs=3, verbose=0)
    assert history.epoch == [0]
    assert_close(expected, history.history)
    validation = (batch for batch in BATCHES)
    with pytest.warns(UserWarning, match="ran out of data"):
        history = three.fit(
            X, Y, epochs=3, validation_data=validation, validation_steps=3, verbose=0
        )
    assert [len(history.history[name]) for name in ("loss", "val_loss")] == [3, 2]


@pytest.mark.slow
def test_a_flow_of_images_ends_its_epochs():
    """`ImageDataGenerator` makes iterators without an end that are `PyDataset`s."""
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
        assert_same_fit(lambda: {"x": flow(), "epochs": 2, "validation_data": flow()}, flat)


class Noisy(layers.Layer):
    """Draws from Keras's global random state."""

    def call(self, x):
        return x + keras.random.normal(keras.ops.shape(x))


@pytest.mark.parametrize("first", [[], [Noisy()]], ids=["nothing", "global state"])
@pytest.mark.slow
def test_what_is_random_after_fit_is_as_in_keras(first):
    """A second model starts with the same weights, and Python's and NumPy's numbers go on."""
    found = []
    for change in (lambda model: model, lambda model: kmg.distribute(model, three_replicas())):
        # Keras 3.10 keeps its global generator when it is given another seed.
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(7)
        model = change(keras.Sequential([keras.Input((5,)), *first, layers.Dense(1)]))
        # Plain Keras draws the same without a graph, which takes longer to make.
        eager = not isinstance(model, kmg.DistributedModel)
        model.compile("sgd", "mse", metrics=["mae"], run_eagerly=eager)
        model.fit(X, Y, batch_size=8, validation_split=0.2, verbose=0)
        model.predict(X, verbose=0)
        second = layers.Dense(2)
        second.build((None, 5))
        found.append([random.random(), np.random.rand(), second.kernel.numpy()])
    np.testing.assert_array_equal(found[0][2], found[1][2])
    assert found[0][:2] == found[1][:2]


# Validation.

VALIDATION = [
    ("split", lambda: {"validation_split": 0.3}),
    ("pair", lambda: {"validation_data": (X[:13], Y[:13])}),
    ("triple", lambda: {"validation_data": (X[:13], Y[:13], WEIGHTS[:13])}),
    ("dataset", lambda: {"validation_data": dataset(X[:13], Y[:13])}),
    ("steps", lambda: {"validation_data": dataset().repeat(), "validation_steps": 2}),
    ("generator", lambda: {"validation_data": endless(BATCHES[:1]), "validation_steps": 2}),
    ("PyDataset", lambda: {"validation_data": Batched()}),
    ("every second epoch", lambda: {"validation_data": (X, Y), "validation_freq": 2}),
    ("listed epochs", lambda: {"validation_data": (X, Y), "validation_freq": [1, 3]}),
    ("batch size", lambda: {"validation_data": (X, Y), "validation_batch_size": 5}),
]


@pytest.mark.parametrize("arguments", [pytest.param(form, id=name) for name, form in VALIDATION])
@pytest.mark.slow
def test_fit_validates_with_data_in_every_form(arguments):
    """The logs of validation are those of plain Keras, after the same epochs."""
    history = assert_same_fit(lambda: {"x": X, "y": Y, "batch_size": 8, "epochs": 3, **arguments()})
    assert {"val_loss", "val_mae"} < history.keys()


# Callbacks.

HOOKS = [
    f"on_{mode}{part}_{edge}"
    for mode, part, edge in itertools.product(
        ("train", "test", "predict"), ("", "_batch"), ("begin", "end")
    )
] + ["on_epoch_begin", "on_epoch_end"]


class Recording(keras.callbacks.Callback):
    """Writes down every call of a hook with its arguments."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def set_params(self, params):
        super().set_params(params)
        self.calls.append(("params", dict(params)))


def recording(hook):
    """A hook that is written down."""

    def method(self, *args, **kwargs):
        *index, logs = [*args, *kwargs.values()] or [None]
        outputs = {} if logs is None else {k: np.array(v) for k, v in logs.items()}
        self.calls.append((hook, index, outputs))

    return method


for hook in HOOKS:
    setattr(Recording, hook, recording(hook))


@pytest.mark.slow
def test_limits_for_trying_things_out_are_said():
    """Those of `keras.config`, with Keras's warnings: nothing is left out in silence."""
    _, model = one_and_three()
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


@pytest.mark.slow
def test_an_evaluate_of_the_users_own_validates():
    """`fit` calls it as Keras does: with the data and what it says of them, once an epoch."""

    class Evaluates(keras.Model):
        def evaluate(self, x=None, y=None, verbose="auto", **options):
            given = sorted(name for name, value in options.items() if value is not None)
            logs = super().evaluate(x, y, verbose=verbose, **options)
            return {**logs, "given": " ".join(given), "rows": len(x)}

    def model():
        inputs = keras.Input((5,))
        return Evaluates(inputs, layers.Dense(1)(inputs))

    validation = {"validation_data": (X[:9], Y[:9]), "validation_batch_size": 4}
    assert_same_fit(lambda: {"x": X, "y": Y, "epochs": 2, **validation}, model)


@pytest.mark.slow
def test_callbacks_are_called_in_the_same_order_with_the_same_arguments():
    """Every hook, its indices and its logs, in `fit` with validation, `evaluate`, `predict`."""
    calls = []
    for model in one_and_three():
        callback = Recording()
        options = {"batch_size": 8, "verbose": 0, "callbacks": [callback]}
        model.fit(X, Y, epochs=2, shuffle=False, validation_data=(X[:9], Y[:9]), **options)
        model.evaluate(X, Y, **options)
        model.predict(X, **options)
        calls.append(callback.calls)
    expected, found = calls
    assert [call[:2] for call in found] == [call[:2] for call in expected]
    for one, three in zip(expected, found, strict=True):
        assert_close(one[2:], three[2:])


class EvaluatesInBetween(keras.callbacks.Callback):
    """Evaluates and predicts in the middle of an epoch."""

    def __init__(self):
        super().__init__()
        self.results = []

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self.results.append(self.model.evaluate(X[:9], Y[:9], verbose=0))
            self.results.append(self.model.predict(X[:9], verbose=0))


@pytest.mark.slow
def test_a_callback_may_evaluate_and_predict():
    """Training goes on with the next batch; the logs are Keras's, too."""
    results = []

    def arguments():
        callback = EvaluatesInBetween()
        results.append(callback.results)
        return {"x": X, "y": Y, "batch_size": 8, "epochs": 2, "callbacks": [callback]}

    assert_same_fit(arguments)
    assert_close(*results)


class OldNames(keras.callbacks.Callback):
    """A callback that knows Keras's old names of hooks only, and stops training with one."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def on_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch))

    def on_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch, sorted(logs)))
        self.model.stop_training = batch == 2


@pytest.mark.parametrize("verbose", [0, 1, 2])
@pytest.mark.slow
def test_hooks_are_called_by_their_old_names_too(verbose):
    """`on_batch_begin` and `on_batch_end`, in training only, whatever `fit` prints."""
    calls = []
    for model in one_and_three():
        callback = OldNames()
        options = {"batch_size": 8, "verbose": verbose, "callbacks": [callback]}
        model.fit(X, Y, shuffle=False, **options)
        model.evaluate(X, Y, **options)
        calls.append(callback.calls)
    assert calls[0] == calls[1] and len(calls[1]) == 6


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_epoch_end"])
@pytest.mark.slow
def test_training_stops_when_a_callback_says_so(hook):
    """`stop_training` ends the epoch after the batch, or training after the epoch."""

    def arguments():
        stop = keras.callbacks.Callback()

        def stop_at_one(index, logs=None):
            stop.model.stop_training = index == 1

        setattr(stop, hook, stop_at_one)
        return {"x": X, "y": Y, "batch_size": 8, "epochs": 4, "callbacks": [stop]}

    assert_same_fit(arguments)


@pytest.mark.parametrize("mode", ["evaluate", "predict"])
@pytest.mark.slow
def test_evaluation_and_prediction_stop_when_a_callback_says_so(mode):
    """`stop_evaluating` and `stop_predicting` end the loop after the batch."""
    hook = {"evaluate": "on_test_batch_end", "predict": "on_predict_batch_end"}[mode]
    flag = {"evaluate": "stop_evaluating", "predict": "stop_predicting"}[mode]
    results = []
    for model in one_and_three():
        stop = keras.callbacks.Callback()
        setattr(stop, hook, lambda index, logs=None, m=model: setattr(m, flag, index == 1))
        data = (X, Y) if mode == "evaluate" else (X,)
        results.append(getattr(model, mode)(*data, batch_size=8, verbose=0, callbacks=[stop]))
    assert_close(*results)


# Prediction.


def doubles():
    """A model without weights."""
    return keras.Sequential([keras.Input((1,)), layers.Rescaling(2.0)])


@pytest.mark.parametrize("examples", [1, 2, 4, 5, 6, 7, 8, 11])
def test_predictions_come_in_order_and_number(examples):
    """One prediction for each input, whatever is left for the last batch."""
    _, model = one_and_three(doubles, optimizer=None, loss=None, metrics=None)
    x = np.arange(examples, dtype="float32")[:, np.newaxis]
    np.testing.assert_array_equal(model.predict(x, batch_size=4, verbose=0), 2 * x)
    np.testing.assert_array_equal(model.predict_on_batch(x), 2 * x)


PREDICTED = [
    ("arrays", lambda: {"x": X, "batch_size": 8}),
    ("dataset", lambda: {"x": dataset(X)}),
    ("dataset with targets", lambda: {"x": dataset()}),
    ("steps", lambda: {"x": dataset(X).repeat(), "steps": 6}),
    ("PyDataset", lambda: {"x": Batched()}),
    ("generator", lambda: {"x": endless(), "steps": 3}),
]


HEADS = {output: functools.partial(made.two_heads, output) for output in ("dict", "list")}


@pytest.mark.parametrize("arguments", [pytest.param(form, id=name) for name, form in PREDICTED])
@pytest.mark.parametrize("output", ["dict", "list"])
@pytest.mark.slow
def test_predict_keeps_the_structure_of_outputs(output, arguments):
    """Dicts and lists of outputs, for inputs in every form."""
    heads = HEADS[output]
    one, three = one_and_three(heads, loss=None, metrics=None, optimizer=None)
    assert_close(*(model.predict(verbose=0, **arguments()) for model in (one, three)))
    assert_close(*(model.predict_on_batch(X) for model in (one, three)))


# Single batches.


@pytest.mark.parametrize("return_dict", [False, True])
@pytest.mark.parametrize("metrics", [None, ["mae"]])
@pytest.mark.slow
def test_single_batches_give_what_keras_gives(metrics, return_dict):
    """Numbers, lists and dicts, as Keras returns them, for batches of several sizes."""
    results = []
    for model in one_and_three(metrics=metrics):
        form = {"return_dict": return_dict}
        results.append(
            [
                trained(model, X[:8], Y[:8], **form),
                trained(model, X[8:10], Y[8:10], **form),
                trained(model, X[:7], Y[:7], sample_weight=WEIGHTS[:7], **form),
                evaluated(model, X[:7], Y[:7], **form),
                evaluated(model, X[:7], Y[:7], sample_weight=WEIGHTS[:7], **form),
                model.evaluate(X, Y, batch_size=8, verbose=0, **form),
                model.evaluate(dataset(), steps=2, verbose=0, **form),
                model.get_weights(),
            ]
        )
    assert_close(*results)


def test_only_steps_that_were_taken_count():
    """Also where the end of an epoch is found by reading, of which Keras counts each as a step."""
    data = tf.data.Dataset.from_generator(lambda: iter(BATCHES), output_signature=SIGNATURE)
    one, three = one_and_three()
    quiet = {"verbose": 0, "shuffle": False}
    one.fit(data.apply(tf.data.experimental.assert_cardinality(4)), epochs=2, **quiet)
    three.fit(data, epochs=2, **quiet)
    assert three.optimizer.iterations == 8
    assert_close(one.get_weights(), three.get_weights())


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize` method")
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
def test_a_quantized_model_predicts_with_its_new_weights():
    """The steps that were compiled before are made anew."""
    one, three = compiled(), kmg.distribute(compiled(), three_replicas())
    for model in (one, three):
        model.predict(X, verbose=0)
        model.quantize("int8")
    assert_close(one.predict(X, verbose=0), three.predict(X, verbose=0))


def test_only_training_builds_the_optimizer():
    """So layers that are unfrozen between `evaluate` and `fit` are trained."""
    model = kmg.distribute(compiled(), three_replicas())
    model.layers[0].trainable = False
    model.evaluate(X, Y, verbose=0)
    model.predict(X[:3], verbose=0)
    model.test_on_batch(X, Y)
    assert not model.optimizer.built
    model.layers[0].trainable = True
    before = model.layers[0].get_weights()[0]
    model.train_on_batch(X, Y)
    assert np.abs(model.layers[0].get_weights()[0] - before).max() > 0


@pytest.mark.slow
def test_train_on_batch_takes_class_weights():
    """Class weights of a single batch."""
    options = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    one, three = one_and_three(made.classifier, **options)
    weights = {0: 1.0, 1: 3.0, 2: 0.5}
    assert_close(*(trained(model, X, KINDS, class_weight=weights) for model in (one, three)))
    assert_close(one.get_weights(), three.get_weights())


@pytest.mark.usefixtures("python_sees_rows")
def test_train_on_batch_splits_the_batch():
    """The replicas share the rows; they do not all take the whole batch."""
    sizes = []

    class Size(layers.Layer):
        def call(self, x):
            return x + zeros_after(lambda rows: sizes.append(len(rows)), x)

    model = kmg.distribute(made.mlp_with(Size()), three_replicas())
    model.compile("sgd", "mse")
    model.train_on_batch(X[:8], Y[:8])
    assert sorted(sizes) == [2, 3, 3]


# Bad input.

MISTAKES = [
    ("not compiled", lambda model: kmg.distribute(made.mlp(), three_replicas()).fit(X, Y)),
    ("unequal lengths", lambda model: model.fit(X, Y[:-1])),
    ("no data", lambda model: model.fit()),
    ("empty dataset", lambda model: model.fit(dataset().take(0))),
    ("empty generator", lambda model: model.fit(iter([]))),
    ("nothing to evaluate", lambda model: model.evaluate(dataset().take(0))),
    ("nothing to predict", lambda model: model.predict(dataset().take(0))),
    ("targets beside a dataset", lambda model: model.fit(dataset(), Y)),
    ("targets beside a generator", lambda model: model.fit(endless(), Y)),
    ("split of a dataset", lambda model: model.fit(dataset(), validation_split=0.2)),
    ("odd frequency", lambda model: model.fit(X, Y, validation_data=(X, Y), validation_freq="x")),
    ("unknown argument", lambda model: model.evaluate(X, Y, unknown=1)),
    (
        "two kinds of weights",
        lambda model: model.train_on_batch(X, KINDS, WEIGHTS, class_weight={0: 1, 1: 1, 2: 1}),
    ),
    (
        "no micro-batches",
        lambda model: kmg.distribute(made.mlp()).compile("sgd", "mse", micro_batches=0),
    ),
    ("no model", lambda model: kmg.distribute("mlp")),
    ("no strategy", lambda model: kmg.distribute(made.mlp(), "two GPUs")),
]


@pytest.mark.parametrize("mistake", [pytest.param(call, id=name) for name, call in MISTAKES])
@pytest.mark.slow
def test_mistakes_are_value_errors(mistake):
    """Bad input is refused by name, before anything is trained."""
    _, model = one_and_three()
    before = model.get_weights()
    with pytest.raises(ValueError, match=r"\S+"):
        mistake(model)
    assert_close(before, model.get_weights())


class Slow(keras.utils.PyDataset):
    """Twenty batches that threads read, never ahead of training."""

    num_batches = 20

    def __getitem__(self, index):
        time.sleep(0.02)
        return np.full((4, 2), index, "float32"), np.ones((4, 1), "float32")


def test_what_workers_read_is_asked_for_within_epochs_only():
    """Keras stops them between epochs, here of a part of the data, and goes on after it."""
    losses = []
    for distributed in (False, True):
        dense = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((2,)), dense])
        if distributed:
            model = kmg.distribute(model, kmg.strategy(devices=["CPU:0", "CPU:1"]))
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        # Time in which whatever reads ahead asks for more.
        pause = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: time.sleep(0.1))
        data = Slow(workers=2, max_queue_size=4)
        options = {"epochs": 3, "shuffle": False, "verbose": 0, "callbacks": [pause]}
        losses.append(model.fit(data, steps_per_epoch=6, **options).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=2e-5)
