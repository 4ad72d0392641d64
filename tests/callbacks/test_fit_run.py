"""Callbacks that need a run of this package, or its own step, say so, each by its name."""

import keras
import numpy as np
import pytest
from cpu_replicas import replicas_of
from own_step import OwnStep

import keras_multigpu as kmg
from keras_multigpu import callbacks

X, Y = np.zeros((4, 3), "float32"), np.zeros((4, 1), "float32")

SEEING = [
    callbacks.GradientNoiseScale(),
    callbacks.NaNGuard("skip"),
    callbacks.ReplicaMetrics(),
]
"""Callbacks that look into the step."""

ALL = [
    *SEEING,
    callbacks.BatchSizeFinder(),
    callbacks.BatchSizeScaling(4),
    callbacks.LearningRateFinder(),
    callbacks.ResumableCheckpoint("never_written"),
    callbacks.ThroughputReport(),
]
"""Callbacks that need `model.training_run`."""


def name_of(callback):
    """Its class, which names the test and has to be in the error."""
    return type(callback).__name__


def refusal(model, callback):
    """The text with which `fit` ends."""
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="cannot work with a model") as caught:
        model.fit(X, Y, verbose=0, callbacks=[callback])
    return str(caught.value)


@pytest.mark.parametrize("callback", ALL, ids=name_of)
def test_a_model_of_stock_keras_is_refused(callback):
    """What is missing there, and what to write."""
    text = refusal(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]), callback)
    assert text.startswith(
        f"`{name_of(callback)}` cannot work with a model of stock Keras. Expected "
    )
    assert ": elsewhere " in text
    assert "write `model = kmg.distribute(model)` before `compile`" in text
    assert text.endswith("Received: model='Sequential'")


@pytest.mark.parametrize("callback", SEEING, ids=name_of)
def test_a_train_step_of_ones_own_is_refused(callback):
    """What cannot be seen in it, and what to do instead."""
    text = refusal(kmg.distribute(OwnStep(), replicas_of(2)), callback)
    assert text.startswith(
        f"`{name_of(callback)}` cannot work with a model with a `train_step` of its own."
    )
    assert ": elsewhere " in text
    instead = "Pass `action='rollback'`" if name_of(callback) == "NaNGuard" else "Leave out the"
    assert f" {instead}" in text
    assert "write the model with `compute_loss` instead of `train_step`" in text
    assert "Received: model=" in text
