"""Probes see what each replica saw, and can forbid a step; expected values are written by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of
from helpers.own_step import OwnStep, UnseenStep

import keras_multigpu as kmg
from keras_multigpu.training.watching.probe import Probe
from keras_multigpu.training.watching.stopwatch import time_within


class Remember(Probe):
    """Records what each replica saw in the last step, and counts steps."""

    timed = True

    def build(self, strategy):
        self.seen = tf.Variable(tf.zeros([strategy.num_replicas_in_sync, 6]))
        self.order = tf.Variable(tf.zeros([strategy.num_replicas_in_sync, 2], tf.float64))
        self.steps = tf.Variable(0)

    def on_replica(self, seen):
        numbers = [
            tf.cast(seen.examples, tf.float32),
            seen.loss,
            seen.square_norm,
            seen.total_square_norm,
            tf.reduce_sum(seen.gradients[0]),
            tf.reduce_sum(seen.total_gradients[0]),
        ]
        return [tf.stack(numbers), tf.stack(seen.times.moments)]

    def collect(self, measured, allowed):
        self.seen.assign([numbers for numbers, _ in measured])
        self.order.assign([times[1:] - times[:-1] for _, times in measured])
        self.steps.assign_add(1)


class Forbid(Probe):
    def on_replica(self, seen):
        return [seen.total_loss]

    def allows(self, measured):
        return measured[0][0] < 50.0


class Watch(keras.callbacks.Callback):
    def __init__(self, probe):
        super().__init__()
        self.probe = probe

    def on_train_begin(self, logs=None):
        self.model.training_run.watch(self.probe)


def line(replicas, rate=0.0, **compiled):
    """A model `y = w x` with `w = 1`, to be fitted to zero."""
    inputs = keras.Input((1,))
    outputs = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")(inputs)
    model = kmg.distribute(keras.Model(inputs, outputs), replicas_of(replicas))
    model.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"], **compiled)
    return model


X = np.array([[1.0], [2.0], [3.0]], np.float32)


@pytest.mark.slow
def test_each_replica_has_its_own_loss_and_gradient():
    """Three examples on two replicas: two and one; the gradient of (w x)^2 is 2 w x^2."""
    probe, seen = Remember(), []
    sees = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.append(probe.seen.numpy())
    )
    x, callbacks = np.concatenate([X, X[:1]]), [Watch(probe), sees]
    line(2).fit(x, np.zeros((4, 1)), 3, shuffle=False, verbose=0, callbacks=callbacks)
    first, second = seen[0]
    np.testing.assert_allclose(first, [2, 2.5, 25.0, (28 / 3) ** 2, 5.0, 28 / 3], rtol=1e-6)
    np.testing.assert_allclose(second, [1, 9.0, 324.0, (28 / 3) ** 2, 18.0, 28 / 3], rtol=1e-6)
    assert int(probe.steps.numpy()) == 2
    assert (probe.order.numpy() > 0).all()
    # Of the last batch, which is a single example, the second replica has zeros.
    np.testing.assert_allclose(seen[1][1], [0, 0, 0, 4.0, 0, 2.0], rtol=1e-6)


@pytest.mark.parametrize("rate", [0.0, 0.25])
def test_without_a_graph_the_first_replica_has_the_whole_batch(rate):
    probe, model = Remember(), line(2, rate, run_eagerly=True)
    model.fit(X, np.zeros((3, 1)), 3, verbose=0, callbacks=[Watch(probe)])
    first, second = probe.seen.numpy()
    total = [(28 / 3) ** 2, 28 / 3]
    np.testing.assert_allclose(
        first, [3, 14 / 3, total[0], total[0], total[1], total[1]], rtol=1e-6
    )
    np.testing.assert_allclose(second, [0, 14 / 3, 0, total[0], 0, total[1]], rtol=1e-6)
    before = model.get_weights()
    history = model.fit(X * 10, np.zeros((3, 1)), 3, verbose=0, callbacks=[Watch(Forbid())])
    np.testing.assert_array_equal(model.get_weights(), before)
    assert int(model.optimizer.iterations.numpy()) == 1
    assert history.history["loss"] == [0.0]


def test_a_forbidden_first_step_without_a_graph_changes_nothing():
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    model = kmg.distribute(OwnStep(layer), replicas_of(2))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], run_eagerly=True)
    model.fit(X * 10, np.zeros((3, 1)), 3, verbose=0, callbacks=[Watch(Forbid())])
    kernel, bias = model.get_weights()
    assert (kernel.tolist(), bias.tolist()) == ([[1]], [0])
    assert not any(np.any(variable.numpy()) for variable in model.metrics_variables)
    assert not any(np.any(v.numpy()) for v in model.optimizer.variables if "rate" not in v.name)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.slow
def test_a_forbidden_step_changes_nothing(replicas):
    data = tf.data.Dataset.from_tensor_slices((np.array([[1.0], [100.0]], "float32"), [0.0, 0.0]))
    model = line(replicas, rate=0.25)
    history = model.fit(data.batch(1), verbose=0, callbacks=[Watch(Forbid())])
    np.testing.assert_allclose(model.get_weights()[0], [[0.5]])
    assert int(model.optimizer.iterations.numpy()) == 1
    np.testing.assert_allclose(history.history["loss"], [1.0])
    np.testing.assert_allclose(history.history["mae"], [1.0])


def test_new_callbacks_with_the_settings_of_the_last_fit_trace_nothing():
    """And they begin to count anew."""
    calls = []

    class Noted(keras.layers.Layer):
        def call(self, x):
            calls.append(x)
            return x

    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1)(Noted()(inputs)))
    model = kmg.distribute(model, replicas_of(2))
    model.compile("sgd", "mse", metrics=["mae"])
    counts = []
    for epochs in (1, 2):
        guard, metrics = kmg.callbacks.NaNGuard("skip"), kmg.callbacks.ReplicaMetrics(["mae"])
        report = kmg.callbacks.ThroughputReport(verbose=0)
        calls.clear()
        given = {"epochs": epochs, "verbose": 0, "callbacks": [guard, metrics, report]}
        history = model.fit(X, np.zeros((3, 1)), 3, **given).history
        counts.append(len(calls))
        assert history["skipped_steps"] == [0] * epochs
        assert history["replica_0/examples"] == [2] * epochs
        assert len(report.reports) == epochs
    assert counts[0] > 0 == counts[1]


def test_probes_are_refused_if_a_step_does_not_call_compute_loss():
    """Nothing tells which of its tensors is the loss."""
    model = kmg.distribute(UnseenStep(), replicas_of(2))
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="cannot look inside.*Received: callback='A callback'"):
        model.fit(X, np.zeros((3, 1)), verbose=0, callbacks=[Watch(Remember())])


def test_an_optional_probe_knows_whether_it_sees_the_step():
    class Curious(Forbid):
        required = False

    for cls, sees in ((UnseenStep, False), (OwnStep, True)):
        layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
        model, probe = kmg.distribute(cls(layer), replicas_of(2)), Curious()
        model.compile("sgd", "mse")
        model.fit(X * 10, np.zeros((3, 1)), verbose=0, callbacks=[Watch(probe)])
        assert probe.sees is sees
        trained = model.get_weights()[0].tolist() != [[1.0]]
        assert trained is not sees, "A step that is seen is forbidden here."


def test_a_custom_train_step_is_seen_if_it_calls_compute_loss():
    """And if the optimizer gets its gradients."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = kmg.distribute(OwnStep(layer), replicas_of(2))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    probe = Remember()
    model.fit(X, np.zeros((3, 1)), 3, shuffle=False, verbose=0, callbacks=[Watch(probe)])
    np.testing.assert_allclose(probe.seen.numpy()[:, 1], [2.5, 9.0], rtol=1e-6)


@pytest.mark.slow
def test_a_replicas_loss_is_the_part_of_its_examples_in_the_weighted_mean():
    """The weights are 10 and 0.1, and the squares 1, 4 and 9, 16: 52.5 in all, over 20.2."""
    model, probe = line(2), Remember()
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))
    x = np.array([[1.0], [2.0], [3.0], [4.0]], np.float32)
    weights = np.array([10.0, 10.0, 0.1, 0.1], np.float32)
    model.fit(
        x,
        np.zeros((4, 1)),
        batch_size=4,
        sample_weight=weights,
        shuffle=False,
        verbose=0,
        callbacks=[Watch(probe)],
    )
    found = probe.seen.numpy()[:, 1]
    np.testing.assert_allclose(found, [2 * 50 / 20.2, 2 * 2.5 / 20.2], rtol=1e-6)


@pytest.mark.slow
def test_a_weight_that_is_used_twice_has_its_penalty_once():
    """The gradient of (w w x)^2 + 0.1 w^2 is 4 x^2 + 0.2; in micro-batches, too."""
    options = {"kernel_initializer": "ones", "kernel_regularizer": keras.regularizers.L2(0.1)}
    twice = keras.layers.Dense(1, use_bias=False, **options)
    inputs = keras.Input((1,))
    model = kmg.distribute(keras.Model(inputs, twice(twice(inputs))), replicas_of(2))
    model.compile(keras.optimizers.SGD(0.0), "mse", micro_batches=2)
    probe = Remember()
    model.fit(X, np.zeros((3, 1)), 3, shuffle=False, verbose=0, callbacks=[Watch(probe)])
    np.testing.assert_allclose(probe.seen.numpy()[:, 1], [2.6, 9.1], rtol=1e-6)
    np.testing.assert_allclose(probe.seen.numpy()[:, 4], [10.2, 36.2], rtol=1e-6)


@pytest.mark.slow
def test_sparse_inputs_can_be_watched():
    class Rows(Remember):
        def on_replica(self, seen):
            self.rows = seen.batch[0]
            return super().on_replica(seen)

    inputs = keras.Input((3,), sparse=True)
    model = kmg.distribute(keras.Model(inputs, keras.layers.Dense(1)(inputs)), replicas_of(2))
    model.compile("sgd", "mse")
    dense = tf.data.Dataset.from_tensor_slices((np.eye(3, dtype="float32"), np.zeros((3, 1))))
    probe = Rows()
    sparse = dense.batch(3).map(lambda x, y: (tf.sparse.from_dense(x), y))
    model.fit(sparse, verbose=0, callbacks=[Watch(probe)])
    assert isinstance(probe.rows, tf.SparseTensor)
    np.testing.assert_array_equal(probe.seen.numpy()[:, 0], [2, 1])


@pytest.mark.parametrize(
    ("begun", "ended", "until", "expected"),
    [
        ([1.0], [3.0], 1.0, 0.0),
        ([1.0, 4.0], [3.0, 6.0], 5.0, 3.0),
        # The second has waited for the first.
        ([1.0, 2.0, 7.0], [4.0, 5.0, 9.0], 7.0, 4.0),
    ],
)
def test_overlapping_times_of_sums_count_once(begun, ended, until, expected):
    """Those in which sums travelled while a replica still computed."""
    begun, ended = (list(map(tf.constant, times)) for times in (begun, ended))
    assert float(time_within(begun, ended, tf.constant(until))) == expected
