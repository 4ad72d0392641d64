"""The step for TPUs, run on CPUs: it has not been run on a real TPU."""

import dataclasses
import functools
import logging
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactness.cases import CASES
from exactness.runs import alone, differences, run
from helpers.all_replicas import in_test_all
from helpers.cpu_replicas import replicas_of

import keras_multigpu as kmg
from keras_multigpu.training.announcing import announce
from keras_multigpu.training.replication import Replication, replicate, replication_of
from keras_multigpu.training.runners.tpus import TPUStep
from keras_multigpu.training.steps.request import Options

BY_NAME = {case.name: case for case in CASES}


def on_cores(model, count=2):
    """The model with its training step for TPUs, on CPUs as cores."""
    model = kmg.distribute(model, replicas_of(1))
    strategy = tf.distribute.MirroredStrategy(["CPU:0"]) if count == 1 else replicas_of(count)
    replicate(model, as_tpus(strategy))
    return model


def as_tpus(strategy, **options):
    """A `Replication` that takes the strategy for a TPU strategy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tf.distribute, "TPUStrategy", type(strategy))
        return Replication(strategy, Options(**options))


def regression(count=2, optimizer="sgd", **options):
    """A small model on cores, and eight examples."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model = on_cores(model, count)
    model.compile(optimizer, "mse", **options)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    return model, x, x.sum(axis=1, keepdims=True)


# Batches of 6, 6 and 3: two cores share the first ones, and one takes the last.
@pytest.mark.in_test_all("a replica trains alike", after=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("BatchNorm, convnet", 2),
        ("mixed_float16, overflow on one replica", 2),
        ("loss object of the whole batch", 3),
        # The step is that of replicas, for which the table of trainings has all of these.
        *in_test_all(
            ("outputs as dict, sample weights, loss weights", 2),
            ("masked words, LSTM", 3),
            ("penalties of weights, activities and a layer", 2),
            ("sums over a mask, penalties, clipping by hand", 2),
            ("R2Score, root of the mean", 2),
        ),
    ],
)
def test_cores_end_where_one_device_does(name, count):
    case = dataclasses.replace(BY_NAME[name], batch_size=6)
    expected = run(case, alone)
    found = run(case, lambda case: on_cores(case.compiled(), count))
    apart = differences(expected, found)
    assert not {name: each for name, each in apart.items() if each > case.tolerance}


def words(compiled):
    """Losses and final weights of a model of masked words, with noise and moments."""
    keras.utils.set_random_seed(1)
    layers = [
        keras.layers.Embedding(5, 3, mask_zero=True),
        keras.layers.BatchNormalization(),
        # Next to none: XLA draws other numbers.
        keras.layers.GaussianNoise(1e-9),
        keras.layers.Dense(1),
    ]
    model = on_cores(keras.Sequential([keras.Input((4,)), *layers]), 1)
    tpus = replication_of(model).elsewhere
    # There is one core, but it does what the second of two does: sums are those of one half.
    tpus.workers = 2
    run_on_cores = tpus.run
    tpus.on_each = lambda values: values[1]

    def run(function, arguments):
        _, *leaves = arguments
        on_second = tf.function(
            # One, but XLA does not know it, as on a TPU, where all cores have one program.
            lambda *leaves: function(tf.random.uniform((), 1, 2, tf.int32), *leaves),
            autograph=False,
            jit_compile=compiled,
        )
        return run_on_cores(on_second, leaves)

    tpus.run = run
    model.compile(keras.optimizers.Adam(0.1), relating, metrics=["mae"])
    x = np.arange(24).reshape(6, 4) % 5
    losses = [model.train_on_batch(x[:size], np.ones((size, 4, 1))) for size in (6, 4)]
    return [*losses, *(variable.numpy() for variable in model.variables)]


def relating(y_true, y_pred):
    """A loss that needs the rows of all cores."""
    rows = tf.reshape(y_pred - y_true, [tf.shape(y_pred)[0], -1])
    return tf.reduce_mean(tf.matmul(rows, rows, transpose_b=True) ** 2)


@pytest.mark.in_test_all("the training before is compiled, too")
def test_xla_compiles_the_step_of_a_core_as_a_whole():
    for plain, compiled in zip(words(False), words(True), strict=True):
        np.testing.assert_allclose(compiled, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.in_test_all("the training has such shares, too")
def test_shares_have_one_length_and_idle_cores_do_not_count(caplog):
    """A gradient step on 6 examples with four cores: three take two each."""
    model, x, y = regression(4)
    model.layers[0].set_weights([np.zeros((3, 1)), np.zeros(1)])
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        loss = model.train_on_batch(x[:6], y[:6])
    assert "A batch of 6 examples divides evenly over 3 of 4 TPU cores" in caplog.text
    np.testing.assert_allclose(loss, np.mean(y[:6] ** 2), rtol=1e-5)
    kernel, _ = model.get_weights()
    np.testing.assert_allclose(kernel, 0.01 * 2 * x[:6].T @ y[:6] / 6, rtol=1e-5)


def test_explain_shows_what_cores_share(capsys):
    model, x, y = regression(3)
    found = kmg.explain(model, x, y)
    assert (found.replicas, found.shared, found.gathered_bytes) == (3, 1, 0)
    assert "train_step on 3 replicas" in capsys.readouterr().out


class Watching(keras.callbacks.Callback):
    """Reads the weights after each step, and halves the rate."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(self.model.get_weights()[0])
        self.model.optimizer.learning_rate.assign(self.model.optimizer.learning_rate / 2)


def test_callbacks_see_and_change_values_after_each_step():
    model, x, _ = regression()
    model.compile("sgd", lambda y, p: p)
    before, watching = model.get_weights()[0], Watching()
    model.fit(x, np.zeros((8, 1)), batch_size=4, shuffle=False, verbose=0, callbacks=[watching])
    steps = np.diff([before, *watching.seen], axis=0)
    means = x.reshape(2, 4, 3).mean(axis=1)[..., None]
    np.testing.assert_allclose(steps, -means * [[[0.01]], [[0.005]]], rtol=1e-4)


class Ends(keras.callbacks.Callback):
    """Ends the training in its second epoch, without batch hooks."""

    def on_epoch_begin(self, epoch, logs=None):
        self.weights = self.model.get_weights()
        if epoch:
            raise KeyboardInterrupt


@pytest.mark.in_test_all("values are seen after each step, too")
def test_values_are_copied_back_after_each_epoch_and_an_interruption():
    model, x, y = regression()

    def interrupted():
        yield x, y
        yield x, y
        raise KeyboardInterrupt

    before = model.get_weights()
    with pytest.raises(KeyboardInterrupt):
        model.fit(interrupted(), verbose=0)
    plain, _, _ = regression()
    plain = kmg.distribute(plain, replicas_of(1))
    plain.compile("sgd", "mse")
    plain.fit(x, y, batch_size=8, epochs=2, verbose=0)
    assert not np.allclose(before[0], model.get_weights()[0])
    np.testing.assert_allclose(model.get_weights()[0], plain.get_weights()[0], rtol=1e-5)
    # They go on from there.
    ends = Ends()
    with pytest.raises(KeyboardInterrupt):
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[ends])
    plain.fit(x, y, batch_size=8, verbose=0)
    np.testing.assert_allclose(ends.weights[0], plain.get_weights()[0], rtol=1e-5)


class Rows(keras.Sequential):
    """Returns rows of the batch from its `train_step`, and keeps the largest."""

    def train_step(self, data):
        logs = super().train_step(data)
        outputs = self(data[0], training=True)
        return {**logs, "rows": outputs, "largest": tf.reduce_max(outputs, axis=0)}


def dropping(place, **options):
    """The logs of two steps of a model with dropout and normalised weights."""
    keras.utils.set_random_seed(1)
    dense = keras.layers.SpectralNormalization(keras.layers.Dense(4))
    model = place(Rows([keras.Input((3,)), dense, keras.layers.Dropout(0.5)]))
    # XLA, which Keras would choose for one device, draws other numbers.
    model.compile("sgd", lambda y, p: tf.reduce_max(tf.abs(y - p)), jit_compile=False, **options)
    x = np.random.default_rng(0).normal(size=(9, 3)).astype("float32")
    return [model.train_on_batch(x, x[:, :1], return_dict=True) for _ in range(2)]


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}])
@pytest.mark.in_test_all("seeds are those of replicas")
def test_cores_draw_the_dropout_of_one_device(options):
    expected = dropping(lambda model: model, **options)
    found = dropping(lambda model: on_cores(model, 3), **options)
    for one, other in zip(expected, found, strict=True):
        assert one.keys() == other.keys()
        np.testing.assert_array_equal(one["rows"] == 0, other["rows"] == 0)
        for name, value in one.items():
            np.testing.assert_allclose(other[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.in_test_all("a replica computes it whole alike")
def test_each_core_computes_whole_what_cores_cannot_share(caplog):
    def loss(y, p):
        text = tf.strings.reduce_join(tf.strings.as_string(tf.math.sign(p[:, 0])))
        return tf.reduce_mean((y - p) ** 2) * tf.cast(tf.strings.length(text), tf.float32)

    model, x, y = regression()
    model.compile("sgd", loss)
    losses = [model.train_on_batch(x, y) for _ in range(2)]
    assert "One replica computes the whole of train_step" in caplog.text
    plain = regression()[0]
    plain = keras.models.clone_model(plain)
    plain.set_weights(regression()[0].get_weights())
    plain.compile("sgd", loss, run_eagerly=True)
    np.testing.assert_allclose(losses, [plain.train_on_batch(x, y) for _ in range(2)], rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "callbacks", "what"),
    [
        ({"micro_batches": 2}, [], "TPUs cannot train with `micro_batches`"),
        ({}, [kmg.callbacks.NaNGuard()], "TPUs cannot train with a callback that looks into steps"),
    ],
)
def test_unsupported_settings_of_tpus_are_refused_by_name(settings, callbacks, what):
    model, x, y = regression(**settings)
    with pytest.raises(ValueError, match=what):
        model.fit(x, y, verbose=0, callbacks=callbacks)


def test_inputs_that_are_not_dense_are_refused():
    inputs = keras.Input((3,), sparse=True)
    model = on_cores(keras.Model(inputs, keras.layers.Dense(1)(inputs)))
    model.compile("sgd", "mse")
    data = tf.sparse.from_dense(np.eye(4, 3, dtype="float32")), np.ones((4, 1))
    with pytest.raises(ValueError, match="cannot train with inputs that are not dense numbers"):
        model.train_on_batch(*data)


class Unconnected(tf.distribute.cluster_resolver.TPUClusterResolver):
    """Pretends to have four cores."""

    def __init__(self):
        pass

    def get_tpu_system_metadata(self):
        names = [f"/job:localhost/replica:0/task:0/device:TPU:{core}" for core in range(4)]
        devices = [SimpleNamespace(name=name) for name in names]
        sizes = {"num_cores": 4, "num_hosts": 1, "num_of_cores_per_host": 4}
        return SimpleNamespace(**sizes, topology=None, devices=devices)


def test_the_step_is_traced_under_a_tpu_strategy(monkeypatch, caplog):
    """Without a TPU it can only be traced: TensorFlow puts its variables on the host."""
    layers = [
        keras.layers.Embedding(5, 3, mask_zero=True),
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ]
    model = keras.Sequential([keras.Input((4,)), *layers])
    model = kmg.distribute(model, tf.distribute.TPUStrategy(Unconnected()))
    model.compile("adam", "mse", metrics=["mae"])
    with caplog.at_level(logging.INFO, "keras_multigpu"):
        announce(replication_of(model), model)
    assert "Training on 4 replicas: TPUs." in caplog.text
    assert model.distribute_strategy is kmg.strategy("one_device")

    graphs = []

    class Traced(Exception):
        """Instead of the results."""

    def traced(step, *arguments):
        function = tf.function(step._on_cores, autograph=False)
        graphs.append(function.get_concrete_function(*arguments).graph)
        raise Traced

    made = TPUStep.__init__

    def make(step, *arguments):
        made(step, *arguments)
        step._function = functools.partial(traced, step)

    monkeypatch.setattr(TPUStep, "__init__", make)
    with pytest.raises(Traced):
        model.train_on_batch(np.arange(24).reshape(6, 4) % 5, np.ones((6, 4, 1)))
    operations = graphs[0].get_operations()
    # One trace for all of them, with copies of the variables as inputs.
    kinds = {operation.type for operation in operations}
    assert {"TPUReplicateMetadata", "TPUReplicatedInput", "TPUReplicatedOutput"} <= kinds
    sums = [each.inputs[0].dtype for each in operations if each.type == "CrossReplicaSum"]
    # The moments forward and backward, the divisor of the loss, the rest, and rows of the table.
    assert len(sums) >= 5


def test_a_custom_step_over_a_model_on_tpus_is_refused():
    """It would run on the host, which only stores the model."""
    model, x, _ = regression()

    @kmg.function
    def step(x):
        return model(x)

    with pytest.raises(ValueError, match="A custom training step cannot run on TPUs"):
        step(x)
