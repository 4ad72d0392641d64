"""What replicas' outputs become: rows by hand, and shapes that tell how many there are."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replica_pass.output_rows import (
    joined,
    may_be_odd,
    rows_for_each,
    rows_per_example,
)

X = np.arange(30.0, dtype="float32").reshape(6, 5)
SPEC = tf.TensorSpec([None, 5])


class Outputs(keras.Model):
    """A model of no weights but a table, whose output is a function of its input and that."""

    def __init__(self, function):
        super().__init__()
        self.table = self.add_weight(shape=(4, 3), initializer="ones", name="table")
        self.function = function

    def call(self, x):
        return self.function(x, self.table)


# Each with the number of rows for an example.
WHOLE = {
    "a row": (lambda x, table: 2 * x, 1),
    "three rows": (lambda x, table: tf.reshape(tf.tile(x, [1, 3]), (-1, 5)), 3),
    "two views": (lambda x, table: tf.concat([x, -x], axis=0), 2),
    "numbers": (lambda x, table: x[:, 0], 1),
    "a table": (lambda x, table: table * 2.0, 0),
    "a scalar": (lambda x, table: tf.reduce_sum(table), 0),
}

COMPUTED = {
    "sum": lambda x, table: tf.reduce_sum(x),
    "mean": lambda x, table: tf.reduce_mean(x, axis=0, keepdims=True),
    "transposed": lambda x, table: tf.transpose(x),
    "all pairs": lambda x, table: x @ tf.transpose(x),
}


def on_two(function):
    return kmg.distribute(Outputs(function), kmg.strategy("mirrored", devices=2))


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.slow
def test_outputs_come_back_whole(name):
    """As one device gives them, whatever their first axis is; an odd batch at the end too."""
    function, count = WHOLE[name]
    one, two = Outputs(function), on_two(function)
    one.run_eagerly = True  # To make a graph takes longer.
    assert rows_per_example(two, SPEC) == [count]
    for batch_size in (2, 4, 5):
        predicted = [model.predict(X, batch_size=batch_size, verbose=0) for model in (one, two)]
        np.testing.assert_array_equal(*predicted)
    np.testing.assert_array_equal(two.predict_on_batch(X[:1]), one.predict_on_batch(X[:1]))


@pytest.mark.parametrize("name", COMPUTED)
def test_what_replicas_cannot_compute_is_refused(name):
    """On several replicas only."""
    one = kmg.distribute(Outputs(COMPUTED[name]), kmg.strategy("one_device", devices=["CPU:0"]))
    np.testing.assert_array_equal(
        one.predict_on_batch(X), Outputs(COMPUTED[name]).predict_on_batch(X)
    )
    with pytest.raises(ValueError, match="from the batch as a whole.*Received: shape="):
        on_two(COMPUTED[name]).predict_on_batch(X)


class Steps(Outputs):
    """The same function as a `predict_step`."""

    def call(self, x):
        return x

    def predict_step(self, data):
        return self.function(data[0] if isinstance(data, tuple) else data, self.table)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.slow
def test_predictions_of_an_own_step_come_back_whole(eager):
    """As those of a model do; numbers of the whole batch may be taken by `ops.mean`."""
    means = [lambda x, table: keras.ops.mean(x)]
    refused = [lambda x, table: tf.reduce_max(x), lambda x, table: tf.shape(x)[0]]
    # Without a graph no axis of unknown length tells which one is the batch's.
    (refused if eager else means).append(COMPUTED["mean"])
    for function in (*(function for function, _ in WHOLE.values()), *means):
        one = Steps(function)
        two = kmg.distribute(Steps(function), kmg.strategy("mirrored", devices=2))
        two.run_eagerly = eager
        np.testing.assert_allclose(
            *(model.predict(X[:5], batch_size=5, verbose=0) for model in (one, two)), rtol=1e-6
        )
    for function in refused:
        two = kmg.distribute(Steps(function), kmg.strategy("mirrored", devices=2))
        two.run_eagerly = eager
        with pytest.raises(ValueError, match="from the batch as a whole"):
            two.predict_on_batch(X[:5])


class NumbersOfRows(keras.metrics.Metric):
    """The sum of all outputs, each times the number of its row."""

    def __init__(self):
        super().__init__(name="numbers")
        self.total = self.add_weight(shape=(), initializer="zeros", name="total")

    def update_state(self, y_true, y_pred, sample_weight=None):
        rows = tf.cast(tf.range(tf.shape(y_pred)[0])[:, None], tf.float32)
        self.total.assign(tf.reduce_sum(rows * y_pred))

    def result(self):
        return self.total


class LossOfOutputs(keras.losses.Loss):
    """A number for each example, whatever the outputs' rows."""

    def call(self, y_true, y_pred):
        return tf.reduce_sum(y_true, axis=-1) + 0.0 * tf.reduce_sum(y_pred)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.slow
def test_micro_batches_rows_follow_one_another(eager, replicas):
    """Whatever their number for an example; a batch of 3 leaves a piece of one replica empty."""

    def numbers(place, function, **options):
        model = place(Outputs(lambda x, table: function(x, table) + 0.0 * table[0, 0]))
        options |= {"metrics": [NumbersOfRows()], "run_eagerly": eager}
        model.compile(keras.optimizers.SGD(0.0), LossOfOutputs(), **options)
        logs = (model.train_on_batch(X[:n], X[:n], return_dict=True) for n in (5, 3))
        return [float(log["numbers"]) for log in logs]

    def placed(model):
        return kmg.distribute(model, kmg.strategy("mirrored", devices=replicas))

    for name in ("three rows", "a table"):
        function, _ = WHOLE[name]
        expected = numbers(lambda model: model, function)
        np.testing.assert_allclose(numbers(placed, function, micro_batches=2), expected)
    for name in ("sum", "mean"):
        with pytest.raises(ValueError, match="from the batch as a whole"):
            numbers(placed, COMPUTED[name], micro_batches=2)


def test_eager_models_show_their_outputs():
    """Without a graph the numbers themselves tell."""
    for function, _ in WHOLE.values():
        two = on_two(function)
        two.run_eagerly = True
        np.testing.assert_array_equal(
            two.predict_on_batch(X[:5]), Outputs(function).predict_on_batch(X[:5])
        )
    two = on_two(COMPUTED["mean"])
    two.run_eagerly = True
    with pytest.raises(ValueError, match="from the batch as a whole"):
        two.predict_on_batch(X)


def test_a_loss_of_the_whole_batch_needs_one_row_for_each_example():
    """`fit` refuses what it cannot hand to such a loss."""
    two = on_two(WHOLE["three rows"][0])
    two.compile("sgd", lambda y, y_pred: tf.reduce_mean(y_pred))
    with pytest.raises(ValueError, match="Return one output for each of them"):
        two.fit(X, X, verbose=0)


def test_replicas_rows_follow_one_another():
    """Those of a replica without examples are left out; of tables the first one is all."""
    rows, table = [tf.ones((2, 1)), 2 * tf.ones((4, 1)), tf.zeros((1, 1))], tf.eye(2)
    group = ReplicaGroup(kmg.strategy("mirrored", devices=3))
    parts = [[part, table, None] for part in rows]
    whole, same, nothing = joined(parts, [1, 2, 0], [2, 0, 0], group)
    assert whole.numpy()[:, 0].tolist() == [1, 1, 2, 2, 2, 2]
    assert same is table and nothing is None


def test_shapes_that_need_a_closer_look():
    """Most models have one row for each example, and show it."""
    assert not may_be_odd({"a": tf.ones((4, 3)), "b": None}, 4)
    assert not may_be_odd(SPEC, None)
    assert may_be_odd(tf.ones((4, 4)), 4) and may_be_odd(tf.TensorSpec([None, None]), None)
    assert may_be_odd(tf.ones((3, 2)), None) and may_be_odd(tf.constant(1.0), 4)
    assert may_be_odd(tf.ones((1, 2)), 1)
    assert [rows_for_each(tf.ones(shape), 4) for shape in [(4,), (12, 1), (3, 4), ()]] == [
        1,
        3,
        0,
        0,
    ]


def test_an_order_that_cannot_be_told_is_refused():
    """A tiled batch and a part of another are neither rows of examples nor whole batches."""
    function = lambda x, table: tf.tile(tf.concat([x, x[:, ::-1]], axis=0), [2, 1])  # noqa: E731
    with pytest.raises(ValueError, match="in an order that cannot be told.*Received: rows=4"):
        on_two(function).predict_on_batch(X)


@pytest.mark.parametrize("eager", [False, True])
def test_a_loss_of_the_whole_batch_wants_one_row_for_each_example(eager):
    """Views on top of one another would come in another order than on one device."""

    class Contrastive(Outputs):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(y_pred)

    model = Contrastive(lambda x, table: tf.concat([x, -x], axis=0))
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=2))
    model.compile("sgd", run_eagerly=eager)
    with pytest.raises(ValueError, match="Return one output for each of them"):
        model.train_on_batch(X, X)
