"""Callbacks that need a run of this package, or its own step, say so, each by its name."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import replicas_of
from helpers.own_step import UnseenStep

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
    with pytest.raises(ValueError, match="Expected") as caught:
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
def test_a_train_step_with_a_loss_of_its_own_is_refused(callback):
    """What cannot be seen in it, and what to do instead."""
    text = refusal(kmg.distribute(UnseenStep(), replicas_of(2)), callback)
    assert text.startswith(f"`{name_of(callback)}` wants to measure inside a `train_step` of your")
    assert "Leave out the callback, or take the loss from `compute_loss`." in text
    assert text.endswith(f"Received: callback='{name_of(callback)}'")
