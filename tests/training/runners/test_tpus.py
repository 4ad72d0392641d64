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
from exactness.runs import alone, require_numbers, run
from helpers.cpu_replicas import replicas_of

import keras_multigpu as kmg
from keras_multigpu.training.announcing import announce
from keras_multigpu.training.replication import Replication, replicate, replication_of
from keras_multigpu.training.runners.tpus import TPUStep
from keras_multigpu.training.steps.request import Options


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
@pytest.mark.slow
def test_cores_end_where_one_device_does():
    (case,) = [case for case in CASES if case.name == "BatchNorm, convnet"]
    case = dataclasses.replace(case, batch_size=6)
    require_numbers(case, run(case, alone), run(case, lambda case: on_cores(case.compiled())))


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


@pytest.mark.usefixtures("sums_on_one_device")
def test_callbacks_see_and_change_values_after_each_step(caplog):
    """Two cores share a batch of four, and a third one does not count."""
    model, x, _ = regression(3)
    model.compile("sgd", lambda y, p: p)
    before, watching = model.get_weights()[0], Watching()
    model.fit(x, np.zeros((8, 1)), batch_size=4, shuffle=False, verbose=0, callbacks=[watching])
    steps = np.diff([before, *watching.seen], axis=0)
    means = x.reshape(2, 4, 3).mean(axis=1)[..., None]
    np.testing.assert_allclose(steps, -means * [[[0.01]], [[0.005]]], rtol=1e-4)
    assert "A batch of 4 examples divides evenly over 2 of 3 TPU cores" in caplog.text


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
