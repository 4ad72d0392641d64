"""Steps that cannot be split run whole on one replica, with the numbers of one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.one_device import assert_as_one_device
from keras import layers

import keras_multigpu as kmg

X = np.random.default_rng(0).normal(size=(14, 5)).astype("float32")
Y = X[:, :3]


class Plain(keras.Sequential):
    """A model whose step can be split, until a subclass adds something."""

    def __init__(self):
        super().__init__([keras.Input((5,)), layers.Dense(3)])


class CountsLetters(Plain):
    """Makes a text of all rows, which replicas cannot exchange."""

    def train_step(self, data):
        x, y = data
        letters = tf.strings.length(tf.strings.reduce_join(tf.strings.as_string(x[:, 0])))
        return super().train_step((x * tf.cast(letters, x.dtype) / 100.0, y))


class Remembers(Plain):
    """Writes rows into its own variable, and reads them back."""

    def __init__(self):
        super().__init__()
        self.queue = tf.Variable(tf.ones((4, 5)), trainable=False)

    def train_step(self, data):
        x, y = data
        self.queue.scatter_div(tf.IndexedSlices(x[:2], [0, 2]))
        return super().train_step((x + tf.reduce_mean(self.queue), y))


class CallsPython(Plain):
    """Calls Python, which runs once for all replicas, inside a loop and a condition."""

    def train_step(self, data):
        x, y = data

        def half(number, factor):
            halved = tf.numpy_function(lambda x: x / 2, [factor], tf.float32)
            return number + 1, tf.reshape(halved, ())

        _, factor = tf.while_loop(lambda number, _: number < 2, half, (0, tf.constant(4.0)))
        factor = tf.cond(x[0, 0] > 0.0, lambda: half(0, factor)[1], lambda: factor)
        return super().train_step((x * factor, y))


def training(make, models):
    """Weights, losses and predictions; batches of 4, 4, 4 and 2."""

    def numbers(place, **options):
        models.append(model := place(make()))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
        history = model.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history
        return model.get_weights(), history, model.predict(X, verbose=0)

    return numbers


def said(caplog):
    return [text for text in caplog.messages if text.startswith("One replica computes")]


PIECES = ", and not in 3 micro-batches"
LETTERS = "rows of the type string cannot be gathered: ReduceJoin (test_split_alone.py:"
WRITES = "it uses a variable in a way that is not supported: "
PYTHON = "replicas cannot exchange values inside a loop or a condition"
ENDING = ". The results are those of one device, and the step is no faster."


@pytest.mark.parametrize(
    ("make", "replicas", "pieces", "reason"),
    [
        (CountsLetters, 2, 3, PIECES + ": " + LETTERS),
        (Remembers, 3, 1, ": " + WRITES + "ResourceScatterDiv (test_split_alone.py:"),
        (CallsPython, 2, 1, ": " + PYTHON),
    ],
)
@pytest.mark.slow
def test_what_cannot_be_split_is_whole_on_one_replica(make, replicas, pieces, reason, caplog):
    options, models = {"jit_compile": False, "micro_batches": pieces}, []
    assert_as_one_device(training(make, models), replicas, atol=1e-6, **options)
    (text,) = said(caplog)
    assert text.startswith("One replica computes the whole of train_step" + reason)
    assert text.endswith(ENDING)
    assert ("; move it into `dataset.map`." in text) == (LETTERS in reason)
    for variable in models[0].variables:
        strategy = models[0].distribute_strategy
        first, *others = strategy.experimental_local_results(variable.value)
        assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(("replicas", "pieces"), [(2, 3), (2, 1)])
def test_without_a_graph_one_warning_says_that_one_replica_computes(replicas, pieces, caplog):
    options = {"run_eagerly": True, "micro_batches": pieces}
    assert_as_one_device(training(Plain, []), replicas, atol=1e-6, **options)
    (first, *others) = said(caplog)
    assert first == (
        f"One replica computes the whole of each step{PIECES if pieces > 1 else ''}: "
        f"`run_eagerly=True` leaves no graph to split{ENDING}"
    )
    # Prediction knows no pieces.
    assert len(others) == (replicas > 1 and pieces > 1)


def test_a_callback_cannot_look_into_an_unsplit_step():
    class Divides(layers.Layer):
        seen = tf.Variable(tf.ones((2, 5)), trainable=False)

        def call(self, x):
            self.seen.scatter_div(tf.IndexedSlices(x[:1], [0]))
            return x + self.seen[0]

    model = keras.Sequential([keras.Input((5,)), Divides(), layers.Dense(3)])
    model = kmg.distribute(model, devices=2)
    model.compile("sgd", "mse", jit_compile=False)
    before = model.get_weights()
    with pytest.raises(ValueError, match="(?s)runs unsplit.*known operations.*ScatterDiv"):
        model.fit(X, Y, verbose=0, callbacks=[kmg.callbacks.ReplicaMetrics()])
    np.testing.assert_array_equal(before[0], model.get_weights()[0])


def test_auto_micro_batches_give_up_where_the_step_cannot_be_split():
    runs = []

    class Hungry(CountsLetters):
        def train_step(self, data):
            def fail(rows):
                runs.append(len(rows))
                raise MemoryError("not enough")

            x, y = data
            failed = tf.ensure_shape(tf.numpy_function(fail, [x], tf.float32), [])
            return super().train_step((x + failed, y))

    model = kmg.distribute(Hungry(), devices=2)
    model.compile("sgd", "mse", jit_compile=False, micro_batches="auto")
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.train_on_batch(X, Y)
    assert runs == [14]


def test_what_xla_cannot_compile_fails_as_in_keras():
    for replicas in (0, 2):
        model = CountsLetters()
        if replicas:
            model = kmg.distribute(model, devices=replicas)
        model.compile("sgd", "mse", jit_compile=True)
        before = model.get_weights()
        with pytest.raises(tf.errors.InvalidArgumentError, match="unsupported.*AsString"):
            model.fit(X, Y, verbose=0)
        np.testing.assert_array_equal(before[0], model.get_weights()[0])
