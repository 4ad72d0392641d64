"""One device's side of the self-check updates large variables one after another."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.everything_in_parts import divide_everything

import keras_multigpu as kmg
from keras_multigpu.keras_internals.variable_internals import StandIn
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.steps import trial, unsplit

X = np.random.default_rng(0).normal(size=(6, 5)).astype("float32")


@pytest.fixture
def step(monkeypatch):
    """A step with four kernels, of two slots each, all in parts."""
    divide_everything(monkeypatch)
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(5, "tanh", use_bias=False) for _ in range(4)]
    model = kmg.distribute(keras.Sequential(layers), devices=2, shard="weights", self_check=False)
    model.compile(keras.optimizers.Adam(global_clipnorm=1e-3), "mse", jit_compile=False)
    model.train_on_batch(X, X)
    (runner,) = replication_of(model).steps_of("train")[0].runners
    return runner.step


def whole_stand_ins(step):
    """How many variables in parts one device has whole."""
    values = [
        tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
        for variable in step.traced.variables
        if isinstance(variable, StandIn)
    ]
    return sum(int(tf.size(value)) > 0 for value in values)


@pytest.mark.parametrize("nudge", [(0.0, 0), (1e-6, 1)])
def test_large_variables_are_whole_one_after_another(step, nudge, monkeypatch):
    begin, held, found = trial.Start.begin, [0, 0], [{}, {}]
    before = [[part.numpy() for part in parts] for parts in step.copies]
    for place, at_once in enumerate((2**20, 1)):

        def noted(start, number, place=place):
            begin(start, number)
            held[place] = max(held[place], whole_stand_ins(step))

        monkeypatch.setattr(trial.Start, "begin", noted)
        monkeypatch.setattr(unsplit, "AT_ONCE", at_once)
        own = trial.Trial(step)
        own.on_one_device((tf.constant(X), tf.constant(X), None), found[place].__setitem__, nudge)
    # In one update all; one after another the four kernels, and two slots.
    assert held == [12, 6]
    assert whole_stand_ins(step) == 0
    assert found[0].keys() == found[1].keys() and len(found[0]) > 2 * 4 * 2
    for key, one in found[0].items():
        np.testing.assert_array_equal(one.value, found[1][key].value)
    for parts, values in zip(step.copies, before, strict=True):
        for part, value in zip(parts, values, strict=True):
            np.testing.assert_array_equal(part.numpy(), value)


def test_what_fails_midway_leaves_nothing_behind(step):
    def take(key, value):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    before = [parts[0].numpy() for parts in step.copies]
    with pytest.raises(tf.errors.ResourceExhaustedError):
        trial.Trial(step).on_one_device((tf.constant(X), tf.constant(X), None), take, (1e-6, 1))
    assert whole_stand_ins(step) == 0
    for parts, value in zip(step.copies, before, strict=True):
        np.testing.assert_array_equal(parts[0].numpy(), value)
