"""A pass that sums in its middle what losses are divided by."""

import keras
import numpy as np
import pytest
from keras import layers

import keras_multigpu as kmg

WORDS = np.array([[1, 2], [2, 1], [1, 0]])
"""All four words of the first replica count, and one of the two of the second."""


class Noting(layers.Layer):
    """Counts its calls."""

    calls = 0
    supports_masking = True

    def call(self, x):
        type(self).calls += 1
        return x


def trained(devices, **options):
    """The loss and the weights after a step."""
    keras.utils.set_random_seed(3)
    parts = [layers.Embedding(3, 2, mask_zero=True), layers.SimpleRNN(1, return_sequences=True)]
    model = keras.Sequential([keras.Input((2,), dtype="int32"), *parts, Noting()])
    model = kmg.distribute(model, devices=devices)
    model.compile(keras.optimizers.SGD(0.5), "mse", **options)
    loss = model.train_on_batch(WORDS, np.ones((3, 2, 1)))
    return [loss, *model.get_weights()]


# XLA hands no lists of a loop over from what comes before a sum to what comes after it.
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}, {"micro_batches": 2}], ids=str)
def test_unmasked_values_of_all_replicas_are_counted(options):
    """As on one device, whatever the way: in the middle of the pass, or before it."""
    for found, expected in zip(trained(2, **options), trained(1), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)


def test_the_forward_pass_of_a_masked_model_is_traced_once():
    """By the step; the other call makes the model."""
    Noting.calls = 0
    trained(2)
    assert Noting.calls == 2
