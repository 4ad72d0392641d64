"""What the user's code assigns during a step ends as it does in Keras on one device.

The last batch has fewer examples, and with two replicas their shares are unequal.
"""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from helpers.one_device import assert_as_one_device, assert_close, assert_equal
from keras import ops

import keras_multigpu as kmg
from keras_multigpu.training.variables.model_state import ModelState

DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(5, 3)).astype("float32")
Y = DRAW.normal(size=(5, 1)).astype("float32")


def untracked(variable):
    """A way to the variable that Keras does not find."""
    return lambda: variable


class Assigns(keras.layers.Layer):
    """Changes something in each call.

    Args:
        made: Makes, of the layer, a function that gives what changes.
        change: Changes it, given that and the rows.
    """

    def __init__(self, made, change, **kwargs):
        super().__init__(**kwargs)
        self.made, self.change = made, change

    def build(self, shape):
        self.held = self.made(self)

    def call(self, x):
        self.change(self.held(), x)
        return x

    def number(self):
        held = self.held()
        if isinstance(held, keras.metrics.Mean):
            return held.result().numpy()
        if isinstance(held, keras.random.SeedGenerator):
            held = held.state
        return np.asarray(ops.cast(held, "float32"))


def weight(dtype, **options):
    def made(layer):
        made = layer.add_weight(
            shape=(), dtype=dtype, initializer="zeros", trainable=False, **options
        )
        return lambda: made

    return made


def metric(layer):
    layer.mean = keras.metrics.Mean(name=layer.name)
    return lambda: layer.mean


def one_more(variable, x):
    variable.assign(variable + ops.cast(1, variable.dtype))


def towards_the_mean(variable, x):
    variable.assign(0.75 * variable + ops.mean(x))


ASSIGNED = {
    "int32": (weight("int32"), one_more),
    "uint8": (weight("uint8"), one_more),
    "bfloat16": (weight("bfloat16"), one_more),
    "bool": (weight("bool"), lambda held, x: held.assign(ops.logical_not(held))),
    "rows": (weight("int32", aggregation="sum"), lambda held, x: held.assign_add(ops.shape(x)[0])),
    "mean": (weight("float32"), towards_the_mean),
    "untracked": (lambda layer: untracked(keras.Variable(0.5)), towards_the_mean),
    "metric_of_mean": (metric, lambda held, x: held.update_state(ops.mean(x))),
    "metric_of_rows": (metric, lambda held, x: held.update_state(ops.mean(x * x, axis=-1))),
    "untracked_metric": (
        lambda layer: untracked(keras.metrics.Mean()),
        lambda held, x: held.update_state(ops.sum(x, axis=-1)),
    ),
    "untracked_seed": (
        lambda layer: untracked(keras.random.SeedGenerator(3)),
        lambda held, x: keras.random.normal((), seed=held),
    ),
}
"""What layers change, by their names: what it is, and how."""


class Assigning(keras.Sequential):
    """A layer for each of `ASSIGNED`, and one that learns."""

    def __init__(self):
        self.assigning = [Assigns(*how, name=name) for name, how in ASSIGNED.items()]
        dense = keras.layers.Dense(1, kernel_initializer="ones")
        super().__init__([keras.Input((3,)), *self.assigning, dense])

    def numbers(self):
        return {layer.name: layer.number() for layer in self.assigning}


class LargestSoFar(keras.losses.Loss):
    """Divides by the largest error so far, which it keeps beside a metric."""

    def __init__(self):
        super().__init__()
        self.largest = keras.Variable(0.1)
        self.errors = keras.metrics.Mean()

    def call(self, y_true, y_pred):
        errors = ops.mean(ops.square(y_true - y_pred), axis=-1)
        self.largest.assign(ops.maximum(self.largest, ops.max(errors)))
        self.errors.update_state(errors)
        return errors / self.largest


class OwnLoss(Assigning):
    """Assigns in `compute_loss`, what the model tracks and what it does not."""

    def __init__(self):
        super().__init__()
        self.bias = self.add_weight(shape=(), initializer="zeros", trainable=False)
        self.outside = untracked(keras.Variable(1.0))
        self.relative = LargestSoFar()

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        errors = ops.square(y - y_pred - self.bias) + 0.1 * self.outside()
        self.bias.assign(0.5 * self.bias + 0.1 * ops.max(errors))
        self.outside().assign(self.bias)
        return ops.mean(errors) + 0.1 * self.bias + self.relative(y, y_pred)

    def numbers(self):
        of_loss = [self.bias, self.outside(), self.relative.largest, self.relative.errors.result()]
        return super().numbers() | {"of the loss": np.array([float(each) for each in of_loss])}


def trained(place, **options):
    """All numbers after a fit, an evaluation and a prediction, by their names."""
    model = place(OwnLoss())
    model.compile(keras.optimizers.SGD(0.05), **options)
    size = {"batch_size": 3, "verbose": 0}
    history = model.fit(X, Y, epochs=2, shuffle=False, **size).history
    found = {f"{name} in fit": number for name, number in (history | model.numbers()).items()}
    found |= model.evaluate(X, Y, return_dict=True, **size)
    model.predict(X, **size)
    return found | model.numbers() | {"kernel": model.get_weights()[-2]}


@pytest.mark.slow
def test_assignments_are_kept():
    assert_as_one_device(trained, atol=1e-6)


@pytest.mark.slow
def test_metrics_that_layers_own_see_micro_batches_as_one():
    model = on_replicas(Assigning(), 2)
    model.compile(keras.optimizers.SGD(0.0), "mse", micro_batches=2)
    logs = model.train_on_batch(X, Y, return_dict=True)
    found = [logs["metric_of_mean"], logs["metric_of_rows"]]
    np.testing.assert_allclose(found, [X.mean(), (X**2).mean()], rtol=1e-5)


class InABranch(keras.layers.Layer):
    """Assigns values of the whole batch, in a branch and in a loop."""

    def build(self, shape):
        self.v = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def compute_output_shape(self, shape):
        """Without a call, in which Keras would hand on what a branch has assigned."""
        return shape

    def call(self, x):
        def yes():
            self.v.assign_add(ops.mean(x))
            return 1.0

        branch = ops.cond(ops.sum(x) > 0, yes, lambda: 0.0)

        def add(n):
            self.v.assign_add(ops.max(x))
            return [n + 1.0]

        (turns,) = tf.while_loop(lambda n: n < 3, add, [tf.constant(0.0)])
        return x + self.v + branch + turns


class SetsTheRate(keras.layers.Layer):
    """Assigns what an optimizer reads in the same step."""

    def call(self, x):
        self.optimizer[0].learning_rate.assign(0.5 * ops.mean(ops.square(x)))
        return x


class LastRows(keras.layers.Layer):
    """Keeps the last rows that it was called with; a graph does not know how many it is given."""

    def build(self, shape):
        self.rows = self.add_weight(shape=(6, shape[-1]), initializer="zeros", trainable=False)

    def call(self, x):
        self.rows.assign(keras.ops.concatenate([x, self.rows])[:6])
        return x + keras.ops.mean(self.rows, axis=0)


class OfTensorFlow(keras.layers.Layer):
    """Counts in a variable of TensorFlow's, and reads others, whole and by their rows."""

    def __init__(self):
        super().__init__()
        self.factor = tf.Variable(2.0, trainable=False)
        self.table = tf.Variable([[0.5], [1.5]], trainable=False)
        self.scaled = tf.function(lambda x: self.factor * x)

    def call(self, x):
        self.factor.assign_add(1.0)
        x = ops.cond(self.factor > 3.5, lambda: x + self.factor, lambda: x - self.factor)
        rows = tf.cast(x[:, 0] > 0, "int32")
        found = tf.nn.embedding_lookup(self.table, rows) + self.table[1]
        return 0.1 * self.scaled(x) + found


@pytest.mark.slow
def test_wherever_something_is_assigned_it_is_kept(caplog):
    def weights(place, **options):
        optimizer, sets, counts = keras.optimizers.SGD(0.1), SetsTheRate(), OfTensorFlow()
        sets.optimizer = [optimizer]
        parts = [LastRows(), counts, keras.layers.Dense(1), InABranch(), sets]
        model = place(keras.Sequential([keras.Input((3,)), *parts]))
        model.compile(optimizer, "mse", **options)
        model.fit(X, Y, batch_size=3, epochs=2, shuffle=False, verbose=0)
        found = [*model.get_weights(), optimizer.learning_rate.numpy(), counts.factor.numpy()]
        for call in (lambda: model.test_on_batch(X, Y), lambda: model.predict_on_batch(X)):
            found += [call(), counts.factor.numpy()]
        return found

    assert_as_one_device(weights, atol=1e-6)
    assert not [r for r in caplog.records if r.name == "keras_multigpu"]


class Fading(keras.Model):
    """Counts its calls in Python, and adds less noise in each."""

    def __init__(self):
        super().__init__()
        self.dense, self.calls = keras.layers.Dense(1), 0

    def call(self, x):
        self.calls += 1
        return self.dense(x + 1.0 / self.calls)


@pytest.mark.slow
def test_without_a_graph_python_runs_once_for_each_batch():
    def numbers(place, **options):
        model = place(Fading())
        model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"], **options)
        fit = {"batch_size": 3, "shuffle": False, "verbose": 0, "validation_data": (X, Y)}
        history = model.fit(X, Y, epochs=2, **fit).history
        return [*history.values(), model.predict(X, verbose=0), model.calls, model.get_weights()]

    assert_as_one_device(numbers, atol=1e-6, run_eagerly=True)


@pytest.mark.slow
def test_the_state_contains_variables_that_the_model_does_not_track():
    model = kmg.distribute(Assigning(), kmg.strategy("mirrored", devices=2))
    model.compile("sgd", "mse")
    model.train_on_batch(X, Y)
    state, before = ModelState.of(model), model.numbers()
    model.train_on_batch(X, Y)
    state.restore(model)
    assert_equal(model.numbers(), before)


@pytest.mark.slow
def test_a_loss_may_be_a_python_number():
    """There must be nothing to train, as in Keras."""

    class Constant(keras.Sequential):
        def compute_loss(self, *args, **kwargs):
            return 3

    def made():
        model = Constant([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd")
        return model

    model = kmg.distribute(made(), kmg.strategy("mirrored", devices=2))
    assert model.evaluate(X, Y, verbose=0) == 3
    with pytest.raises(Exception, match=".") as in_keras:
        made().train_on_batch(X, Y)
    with pytest.raises(in_keras.type, match=re.escape(str(in_keras.value)[:40])):
        model.train_on_batch(X, Y)
    model.trainable = False
    model.compile("sgd")
    with pytest.warns(UserWarning, match="does not have any trainable weights"):
        assert model.fit(X, Y, batch_size=3, verbose=0).history["loss"] == [3]


@pytest.mark.slow
def test_metrics_made_inside_a_scope_count_as_on_one_device():
    def history(strategy):
        def made():
            dense = keras.layers.Dense(2, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((3,)), dense])
            metrics = [keras.metrics.MeanIoU(2, sparse_y_pred=False, name="iou"), "accuracy"]
            eager = strategy is None  # To make a graph takes longer than all the steps.
            model.compile(keras.optimizers.SGD(0.5), "mse", metrics=metrics, run_eagerly=eager)
            return model

        labels = (Y > 0).astype("int32")
        if strategy is None:
            model = made()
        else:
            with strategy.scope():
                model = kmg.distribute(made())
        both = {"validation_data": (X[:4], labels[:4]), "validation_batch_size": 3}
        logs = model.fit(X, labels, 3, epochs=3, shuffle=False, verbose=0, **both).history
        return [*sorted(logs.items()), model.evaluate(X, labels, verbose=0)]

    assert_close(history(kmg.strategy("mirrored", devices=2)), history(None), atol=1e-6)


@pytest.mark.slow
def test_a_stateful_network_keeps_its_states(caplog):
    def outputs(place, **options):
        lstm = keras.layers.LSTM(2, stateful=True)
        model = place(keras.Sequential([keras.Input(batch_shape=(2, 3, 1)), lstm]))
        model.compile("sgd", "mse", **options)
        x, y = X[:4].reshape(4, 3, 1), np.zeros((4, 2))
        model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
        states = [state.numpy() for state in lstm.states]
        first = model.predict(x[:2], batch_size=2, verbose=0)
        lstm.reset_states()
        return [*states, first, model.predict(x[:2], batch_size=2, verbose=0)]

    assert_as_one_device(outputs, atol=1e-6)
    assert not [r for r in caplog.records if r.name == "keras_multigpu"]


@pytest.mark.slow
def test_an_input_of_one_row_is_shared_by_all_replicas():
    class Shifted(keras.Model):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            return self.dense(inputs[0] + inputs[1])

    def history(place, **options):
        model = place(Shifted())
        model.compile(keras.optimizers.SGD(0.05), "mse", **options)

        single = [
            # Keras 3.10 leaves that to the caller.
            model.reset_metrics() or model.train_on_batch((X[first:last], X[:1]), Y[first:last])
            for first, last in ((0, 3), (3, 5), (4, 5))
        ]
        data = tf.data.Dataset.from_tensor_slices((X[:4], Y[:4])).batch(2)
        data = data.map(lambda x, y: ((x, tf.constant(X[1:2])), y))
        return [
            single,
            model.fit(data, shuffle=False, verbose=0).history["loss"],
            model.predict((X[:2], X[:2]), verbose=0),
        ]

    assert_as_one_device(history, atol=1e-6)


class Centered(keras.layers.Layer):
    """Moves a weight, which the optimizer updates as well, towards the mean of the rows."""

    def build(self, shape):
        self.center = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x, training=False):
        if training:
            self.center.assign(0.75 * self.center + 0.25 * ops.mean(x, axis=0))
        return x - self.center


class LossOfAll(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return super().compute_loss(x, y, y_pred, sample_weight) + ops.max(y_pred)


@pytest.mark.parametrize(
    ("layer", "cls"),
    [
        (lambda: keras.layers.SpectralNormalization(keras.layers.Dense(4)), keras.Model),
        (Centered, LossOfAll),
    ],
)
@pytest.mark.slow
def test_weights_that_a_layer_assigns_end_as_on_one_device(layer, cls):
    def numbers(place, **options):
        inputs = keras.Input((3,))
        model = place(cls(inputs, keras.layers.Dense(1)(layer()(inputs))))
        optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
        model.compile(optimizer, "mse", metrics=["mae"], **options)
        # The last batch has two examples, so one of three replicas has none.
        given = {"batch_size": 3, "shuffle": False, "verbose": 0}
        return model.fit(X, Y, epochs=2, **given).history, model.get_weights()

    assert_as_one_device(numbers, replicas=3)
