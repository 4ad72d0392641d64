"""What BatchNorm yields with the moments of the global batch: by hand, on shares of every size.

Five numbers with mean 4 and variance 4, of which the last one's target is 9 and all others' 0;
`epsilon` is 5, so the deviation is 3. Before the layer is one weight w = 1. The loss is the mean
of target times output, 9 * (7 - 4) / 3 / 5 = 1.8. Its slope in w is the mean of target times
distance, 9 * (7 - 4) / 5, times `epsilon / deviation ** 3`, 5 / 27: together 1. A layer that took
the moments of shares, or did not differentiate them over all replicas, has other numbers.
"""

import keras
import numpy as np
import pytest

import keras_multigpu as kmg

X = np.array([1.0, 3.0, 5.0, 4.0, 7.0], "float32")[:, None]
TARGETS = np.array([0.0, 0.0, 0.0, 0.0, 9.0], "float32")[:, None]
# The same numbers in sequences of two, one of which ends early.
SEQUENCES = np.array([[1.0, 3.0], [5.0, -1.0], [4.0, 7.0]], "float32")[..., None]
LATE = np.array([[0.0, 0.0], [0.0, 9.0], [0.0, 9.0]], "float32")[..., None]


def trained(replicas, x, y):
    """The loss of one step, the weight after it, and the layer's mean and variance."""
    layers = [
        keras.Input(x.shape[1:]),
        *([keras.layers.Masking(-1.0)] if x is SEQUENCES else []),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        keras.layers.BatchNormalization(momentum=0.0, epsilon=5.0, center=False, scale=False),
    ]
    model = kmg.distribute(keras.Sequential(layers), devices=replicas)
    model.compile(keras.optimizers.SGD(0.5), lambda y, y_pred: y * y_pred)
    loss = model.train_on_batch(x, y)
    return [float(loss), *(float(np.squeeze(value)) for value in model.get_weights())]


@pytest.mark.parametrize("replicas", [2, 3, 8])
@pytest.mark.slow
def test_shares_have_the_moments_of_the_batch(replicas):
    """Uneven shares, shares of one example, and replicas that have none."""
    found = trained(replicas, X, TARGETS)
    np.testing.assert_allclose(found, [1.8, 0.5, 4.0, 4.0], rtol=1e-5)


@pytest.mark.slow
def test_masked_positions_do_not_count():
    """Neither in the moments nor in the number that they are divided by."""
    found = trained(2, SEQUENCES, LATE)
    np.testing.assert_allclose(found, [1.8, 0.5, 4.0, 4.0], rtol=1e-5)
