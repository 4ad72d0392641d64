"""What a custom `train_step` computes, by hand: 3 + 2 examples on two replicas."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import keras_multigpu as kmg
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.shares import normalized

VALUES = [1.0, 2.0, 3.0, 10.0, 20.0]


class KeepsTensors(keras.layers.Layer):
    """Adds a loss, and keeps its input."""

    def call(self, x):
        self.kept, self.all_kept = x, [x, 2 * x]
        self.add_loss(ops.mean(x))
        return x


class Step(keras.Model):
    """The input times a weight of one, trained on `loss(model, x, y_pred)`."""

    def __init__(self, loss):
        super().__init__()
        self.loss_of = loss
        self.keeper = KeepsTensors()
        self.keeper.built = True
        self.scale = self.add_weight(shape=(1,), initializer="ones")
        self.built = True

    def call(self, x):
        return x * self.scale

    def train_step(self, data):
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        with tf.GradientTape() as tape:
            loss = self.loss_of(self, x, self(x))
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"value": loss, "gradient": gradients[0][0]}


def logs_of(taken, values=VALUES, replicas=2, **options):
    model = kmg.distribute(Step(taken), kmg.strategy("mirrored", devices=replicas))
    model.compile(keras.optimizers.SGD(0.0), **options)
    x = np.array(values, "float32")[:, None]
    logs = model.train_on_batch(x, x, return_dict=True)
    return [np.asarray(logs[name]) for name in ("value", "gradient")]


def loss_object(reduction, weight=None):
    """A loss object called in the step: absolute values, perhaps weighted."""
    fn = keras.losses.MeanAbsoluteError(reduction=reduction)

    def loss(model, x, y_pred):
        return fn(ops.zeros_like(x), y_pred, None if weight is None else weight(x))

    return loss


def small(x):
    return ops.cast(x[:, 0] < 10.0, "float32")


def from_layers(model, x, y_pred):
    """What a layer adds, and its outputs that it has kept, also in a list."""
    before = ops.mean(model.keeper(y_pred))
    kept = model.keeper.kept + sum(model.keeper.all_kept)
    return before + sum(model.keeper.losses) + ops.mean(kept)


def in_a_branch(model, x, y_pred):
    loss = loss_object("sum")
    return tf.cond(tf.shape(x)[0] > 0, lambda: loss(model, x, y_pred), lambda: 0.0)


def in_a_function(model, x, y_pred):
    return tf.function(model.compute_loss, autograph=False)(x, 0 * x, y_pred)


def across_rows(model, x, y_pred):
    """As in contrastive losses."""
    return ops.mean(ops.matmul(y_pred, ops.transpose(y_pred)))


LOSSES = [
    (loss_object("sum_over_batch_size"), 36 / 5, 36 / 5),
    (loss_object("sum"), 36, 36),
    (loss_object("sum_over_batch_size", small), 6 / 5, 6 / 5),
    (loss_object("mean_with_sample_weight", small), 6 / 3, 6 / 3),
    (lambda model, x, p: ops.mean(p), 36 / 5, 36 / 5),
    (lambda model, x, p: tf.math.reduce_mean(p, axis=[0, 1]), 36 / 5, 36 / 5),
    (lambda model, x, p: ops.sum(p) / ops.cast(ops.shape(x)[0], "float32"), 36 / 5, 36 / 5),
    (lambda model, x, p: ops.max(p), 20, 20),
    (lambda model, x, p: ops.sum(p * p), 514, 2 * 514),
    (lambda model, x, p: ops.sum(model.scale**2), 1, 2),
    (lambda model, x, p: tf.nn.l2_loss(model.scale) + ops.mean(p), 0.5 + 7.2, 1 + 7.2),
    (lambda model, x, p: ops.mean(p - ops.mean(p)) + ops.mean(p), 7.2, 7.2),
    (lambda model, x, p: ops.mean(ops.stack([ops.mean(p), ops.sum(p)])), 21.6, 21.6),
    (lambda model, x, p: ops.square(ops.mean(p)), 7.2**2, 2 * 7.2**2),
    # The sum of the squares' mean distances from a mean through which the gradient goes.
    (lambda model, x, p: ops.mean(ops.square(p - ops.mean(p))), 50.96, 2 * 50.96),
    (lambda model, x, p: ops.mean(ops.square(p - ops.mean(p, axis=0))), 50.96, 2 * 50.96),
    (lambda model, x, p: ops.sum(ops.square(ops.mean(p, axis=0) - 2)), 27.04, 2 * 5.2 * 7.2),
    (lambda model, x, p: ops.mean(ops.square(ops.sum(p, 0, keepdims=True))), 1296, 2592),
    (lambda model, x, p: ops.mean(ops.square(ops.mean(ops.transpose(p), 1))), 51.84, 103.68),
    (lambda model, x, p: ops.std(p), 50.96**0.5, 50.96**0.5),
    (lambda model, x, p: ops.mean(sum(ops.moments(p, axes=[0]))), 58.16, 7.2 + 2 * 50.96),
    # The batch's axis stays: two values for each row.
    (lambda model, x, p: ops.mean(ops.mean(ops.stack([p, 3 * p]), axis=0)), 14.4, 14.4),
    (across_rows, 51.84, 103.68),
    (in_a_branch, 36, 36),
    (in_a_function, 102.8, 205.6),
    (from_layers, 6 * 7.2, 6 * 7.2),
]
"""What a step may compute of the rows, with its value and its gradient."""


class AllLosses(Step):
    """Takes each of `LOSSES` in one graph, because tracing takes longest."""

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        found = []
        for loss_of, *_ in LOSSES:
            with tf.GradientTape() as tape:
                loss = loss_of(self, x, self(x))
            found.append([loss, tape.gradient(loss, self.scale)[0]])
        return {"losses": found}


@pytest.mark.slow
def test_losses_are_those_of_the_batch(caplog):
    model = kmg.distribute(AllLosses(None), kmg.strategy("mirrored", devices=2))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x = np.array(VALUES, "float32")[:, None]
    found = replication_of(model).run_batch(model, "train", normalized((x, x, None)))["losses"]
    np.testing.assert_allclose(found, [numbers for _, *numbers in LOSSES], rtol=1e-5)
    assert not caplog.records


class Forms(keras.Model):
    """Its steps note the structure of their batches."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(1,), initializer="ones")
        self.built = True
        self.seen = []

    def call(self, x):
        return x * self.scale

    def train_step(self, data):
        self.seen.append(
            str(keras.tree.map_structure(lambda leaf: None if leaf is None else 0, data))
        )
        return {"sum": ops.sum(keras.utils.unpack_x_y_sample_weight(data)[0])}

    def predict_step(self, data):
        self.train_step(data)
        return self(keras.utils.unpack_x_y_sample_weight(data)[0])

    test_step = train_step


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True])
def test_a_step_gets_a_batch_in_the_form_in_which_it_came(eager):
    x = np.array(VALUES, "float32")[:, None]

    def seen(model):
        model.compile("sgd", run_eagerly=eager)
        single, alone, pair = map(tf.data.Dataset.from_tensors, [x, (x,), (x, x)])
        for data in (single, alone, pair, (each for each in [(x,)])):
            model.fit(data, steps_per_epoch=1, shuffle=False, verbose=0)
        for data in (single, alone):
            model.evaluate(data, verbose=0)
            model.predict(data, verbose=0)
        for method in (model.train_on_batch, model.test_on_batch, model.predict_on_batch):
            method(x)
        return model.seen

    expected, found = seen(Forms()), seen(kmg.distribute(Forms(), kmg.strategy(devices=2)))
    assert list(dict.fromkeys(found)) == list(dict.fromkeys(expected))
    assert expected[0] == "0" and len(set(expected)) == 4


def test_without_a_graph_losses_are_those_of_the_batch():
    found = logs_of(lambda model, x, p: ops.std(p), run_eagerly=True)
    np.testing.assert_allclose(found, [50.96**0.5] * 2, rtol=1e-6)


def test_reductions_along_batches_of_a_fixed_size_are_those_of_the_batch(caplog):
    model = Step(lambda model, x, p: ops.sum(ops.square(ops.mean(ops.abs(p), axis=0))))
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=2))
    model.compile(keras.optimizers.SGD(0.0))
    x = np.array([1.0, -2.0, 3.0, -4.0], "float32")[:, None]
    data = tf.data.Dataset.from_tensor_slices((x, x)).batch(4, drop_remainder=True)
    logs = model.fit(data, verbose=0).history
    np.testing.assert_allclose([*logs["value"], *logs["gradient"]], [6.25, 12.5], rtol=1e-6)
    assert not caplog.records


def test_a_replica_without_examples_adds_nothing_to_a_loss():
    def loss(model, x, y_pred):
        return ops.mean(y_pred) + ops.sum(ops.square(model.scale))

    np.testing.assert_allclose(logs_of(loss, [1.0, 3.0], replicas=3), [3, 4], rtol=1e-6)


def test_rows_keep_their_own_values():
    seen = []

    def loss(model, x, y_pred):
        each = keras.losses.MeanAbsoluteError(reduction=None)(ops.zeros_like(x), y_pred)
        seen.extend([each.shape.rank, ops.mean(y_pred, axis=-1).shape.rank])
        return each

    value, gradient = logs_of(loss)
    np.testing.assert_array_equal(value, VALUES)
    # The gradient of a list of values is that of their sum.
    assert gradient == 36
    assert set(seen) == {1}


class TwoOptimizers(Step):
    """Optimizers that are built by the step; one is given a gradient that no tape made."""

    def __init__(self):
        super().__init__(None)
        self.shift = self.add_weight(shape=(1,), initializer="zeros")
        self.second = keras.optimizers.SGD(1.0, momentum=0.5)

    def train_step(self, data):
        x = data[0]
        with tf.GradientTape() as tape:
            loss = ops.mean(self(x))
        self.optimizer.apply(tape.gradient(loss, [self.scale]), [self.scale])
        self.second.apply([tf.reshape(tf.math.reduce_min(x, axis=[0, 1]), [1])], [self.shift])
        return {"value": loss}


def test_optimizers_are_built_while_the_step_is_traced():
    model = TwoOptimizers()
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=2))
    model.compile(keras.optimizers.SGD(1.0))
    x = np.array(VALUES, "float32")[:, None]
    model.train_on_batch(x, x)
    # The mean of all, and the least.
    np.testing.assert_allclose([model.scale[0], model.shift[0]], [1 - 7.2, -1], rtol=1e-6)
    # Another method puts variables where they belong; momentum is half of what it was, and one.
    model.predict(x, verbose=0)
    model.train_on_batch(x, x)
    np.testing.assert_allclose([model.scale[0], model.shift[0]], [1 - 14.4, -2.5], rtol=1e-6)


class InFunctions(keras.Model):
    """Makes its variables in its step, which TensorFlow traces once and keeps."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

    def call(self, x):
        return self.dense(x)

    @tf.function
    def train_step(self, data):
        return {"value": self.learn(data[0])}

    @tf.function
    def learn(self, x):
        with tf.GradientTape() as tape:
            loss = ops.mean(self(x))
        weights = self.trainable_weights
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return loss


def test_functions_that_a_step_calls_train_the_variables(capsys):
    """`explain` traces them first: TensorFlow keeps what it has traced, and its variables."""
    model = kmg.distribute(InFunctions(), devices=2)
    model.compile(keras.optimizers.SGD(1.0, momentum=0.5))
    x = np.array(VALUES, "float32")[:, None]
    kmg.explain(model, x, x)
    assert capsys.readouterr().out
    for _ in range(2):
        model.train_on_batch(x, x)
    # The mean is 7.2; its momentum is half of it.
    np.testing.assert_allclose(model.dense.kernel[0, 0], 1 - 7.2 - 1.5 * 7.2, rtol=1e-6)
    assert model.optimizer.iterations == 2


def test_a_prediction_may_have_any_structure():
    class Predicts(Step):
        def predict_step(self, data):
            y_pred = self(data)
            numbers = {"mean": ops.mean(y_pred), "rows": ops.sum(ops.ones_like(y_pred))}
            return y_pred, {**numbers, "turned": ops.transpose(y_pred)}

    model = kmg.distribute(Predicts(None), kmg.strategy("mirrored", devices=2))
    rows, others = model.predict(np.array(VALUES, "float32")[:, None], verbose=0)
    np.testing.assert_array_equal(rows[:, 0], VALUES)
    np.testing.assert_array_equal(others["turned"][0], VALUES)
    np.testing.assert_allclose([others["mean"], others["rows"]], [7.2, 5.0], rtol=1e-6)


class Renamed(Step):
    """Logs its running means, of rows and of a number, under other names."""

    def __init__(self):
        super().__init__(None)
        self.of_rows, self.of_batch = keras.metrics.Mean("rows"), keras.metrics.Mean("batch")

    def test_step(self, data):
        self.of_rows.update_state(data)
        self.of_batch.update_state(ops.mean(data))
        return {"loss": self.of_rows.result(), "number": self.of_batch.result()}


def test_a_metric_may_be_logged_under_any_name():
    """Batches of 3 and 2 are 2 + 1 and 1 + 1 rows; means of the replicas' means would be 7.9."""
    model = kmg.distribute(Renamed(), kmg.strategy("mirrored", devices=2))
    model.compile()
    x = np.array(VALUES, "float32")[:, None]
    logs = model.evaluate(x, batch_size=3, verbose=0, return_dict=True)
    assert logs == pytest.approx({"loss": 36 / 5, "number": (2 + 15) / 2})


class LogsMetrics(Step):
    """Logs all its metrics, as Keras's guides do; the compiled ones are a nested dict."""

    def train_step(self, data):
        x, y = data[:2]
        for metric in self.metrics:
            metric.update_state(*([x] if metric.name == "loss" else [y, x]))
        return {metric.name: metric.result() for metric in self.metrics}


@pytest.mark.slow
def test_logs_come_in_the_order_of_keras():
    """Keras sorts each level, so the nested `compile_metrics` come before `loss`."""

    def order(model):
        model.compile("sgd", "mse", metrics=[keras.metrics.MeanAbsoluteError("z")])
        x = np.array(VALUES, "float32")[:, None]
        history = model.fit(x, x, batch_size=3, verbose=0, validation_data=(x, x)).history
        return list(history), list(model.evaluate(x, x, verbose=0, return_dict=True))

    expected = order(LogsMetrics(None))
    assert expected[0][:2] == ["z", "loss"]
    assert order(kmg.distribute(LogsMetrics(None), devices=2)) == expected


class LogsAll(keras.Model):
    """Logs what TensorFlow has: rows, ragged rows, strings, and nothing."""

    def train_step(self, data):
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        return {
            "count": tf.shape(x)[0],
            "each": x[:, 0] * 2.0,
            "nothing": None,
            "ragged": tf.RaggedTensor.from_tensor(x),
            "text": tf.constant("text"),
        }


@pytest.mark.slow
def test_logs_may_be_of_any_kind():
    """Those of the last batch, of two examples."""
    model = kmg.distribute(LogsAll(), devices=2)
    model.compile(steps_per_execution=2)
    x = np.array(VALUES, "float32")[:, None]
    history = model.fit(x, batch_size=3, shuffle=False, verbose=0).history
    found = {name: np.asarray(value).tolist() for name, (value,) in history.items()}
    each, ragged = [20.0, 40.0], [[10.0], [20.0]]
    expected = {"count": 2, "each": each, "nothing": None, "ragged": ragged, "text": b"text"}
    assert found == expected


def out_of_range(model, x, outputs):
    places = tf.cast(x[:, 0], tf.int32)
    return tf.reduce_sum(tf.gather(tf.ones([9]), places) * outputs[:, 0])


@pytest.mark.parametrize("fit", [False, True])
def test_an_error_in_the_graph_names_the_users_line(fit):
    model = kmg.distribute(Step(out_of_range), devices=2, self_check=False)
    model.compile("sgd")
    x = np.array(VALUES, "float32")[:, None]
    line = out_of_range.__code__.co_firstlineno + 2
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=rf"^Raised at {__name__}.py:{line}, .*(.*\n)*.*is not in \[0, 9\)",
    ):
        model.fit(x, verbose=0) if fit else model.train_on_batch(x)


@pytest.mark.parametrize("callbacks", [[], [kmg.callbacks.NaNGuard()]], ids=["alone", "watched"])
def test_a_step_that_raises_is_traced_once_more_with_a_batch_size(callbacks):
    """It may have needed one. Its Python has effects, so it is not traced for nothing."""
    sizes = []

    class Raises(Step):
        def train_step(self, data):
            sizes.append(keras.utils.unpack_x_y_sample_weight(data)[0].shape[0])
            raise KeyError(sizes[-1])

    model = kmg.distribute(Raises(lambda *_: 0.0), devices=2)
    model.compile("sgd")
    with pytest.raises(KeyError, match="None"):
        model.fit(np.ones((5, 1), "float32"), batch_size=3, verbose=0, callbacks=callbacks)
    assert sizes == [None, 3]
