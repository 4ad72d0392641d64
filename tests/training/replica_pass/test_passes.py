"""A pass that sums in its middle what losses are divided by."""

import functools

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


class OwnStep(keras.Sequential):
    """A step of one's own, in which replicas take turns also where a graph is traced."""

    def train_step(self, data):
        return super().train_step(data)


def trained(devices, made=keras.Sequential, **options):
    """The loss of a step, the loss and the weights after it."""
    keras.utils.set_random_seed(3)
    parts = [layers.Embedding(3, 2, mask_zero=True), layers.SimpleRNN(1, return_sequences=True)]
    model = made([keras.Input((2,), dtype="int32"), *parts, Noting()])
    model = kmg.distribute(model, devices=devices)
    model.compile(keras.optimizers.SGD(0.5), "mse", **options)
    loss = model.train_on_batch(WORDS, np.ones((3, 2, 1)))
    evaluated = model.test_on_batch(WORDS[1:], np.ones((2, 2, 1)))
    return [loss, evaluated, *model.get_weights()]


@functools.cache
def on_one_device():
    return trained(1)


WAYS = [
    {},
    {"jit_compile": True},
    {"micro_batches": 2},
    {"run_eagerly": True},
    {"made": OwnStep},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.slow
def test_unmasked_values_of_all_replicas_are_counted(options):
    """As on one device, whatever the way: in the middle of the pass, or before it."""
    for found, expected in zip(trained(2, **options), on_one_device(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-7)


@pytest.mark.slow
def test_the_forward_pass_of_a_masked_model_is_traced_once():
    """By each step; another call makes the model."""
    Noting.calls = 0
    trained(2)
    assert Noting.calls == 3
