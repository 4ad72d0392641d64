"""A measurement changes no number: trainings with and without it end with the same bits."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from helpers.one_device import assert_equal

import keras_multigpu as kmg


def trained(replicas, callbacks, policy):
    """Weights and logs of a model whose gradients add rows of two layers and a whole penalty."""
    keras.utils.set_random_seed(1)
    penalty = keras.regularizers.L2(0.013)
    twice = keras.layers.Dense(8, "tanh", kernel_regularizer=penalty, dtype=policy)
    inputs = keras.Input((8,))
    hidden = keras.layers.BatchNormalization(dtype=policy)(twice(inputs))
    hidden = keras.layers.ActivityRegularization(0.01, dtype="float32")(twice(hidden))
    outputs = keras.layers.Dense(3, "softmax", kernel_regularizer=penalty, dtype="float32")(hidden)
    model = on_replicas(keras.Model(inputs, outputs), replicas)
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(optimizer, keras.losses.CategoricalCrossentropy(), metrics=["mae"])
    random = np.random.default_rng(0)
    x = random.normal(size=(22, 8)).astype("float32")
    y = np.eye(3, dtype="float32")[random.integers(0, 3, 22)]
    history = model.fit(x, y, 7, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
    state = [each.numpy() for each in (*model.weights, *model.optimizer.variables)]
    return state, [history.history[name] for name in ("loss", "mae")]


@pytest.mark.parametrize(("replicas", "policy"), [(3, "float32"), (2, "mixed_float16")])
@pytest.mark.slow
def test_callbacks_that_measure_change_no_bit(replicas, policy):
    guard, metrics = kmg.callbacks.NaNGuard("skip"), kmg.callbacks.ReplicaMetrics(["mae"])
    report = kmg.callbacks.ThroughputReport(verbose=0)
    found = trained(replicas, [guard, metrics, report], policy)
    assert_equal(found, trained(replicas, [], policy))
