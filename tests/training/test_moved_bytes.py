"""If losses and metrics are sums, only sums leave a replica: measured in bytes moved."""

import keras
import numpy as np
import pytest
from helpers.moved_bytes import counting
from keras import layers, metrics

import keras_multigpu as kmg
from keras_multigpu.training.replication import replication_of

EXAMPLES = 8


def language_model():
    """Predicts the next of six words, with 500 numbers for each."""
    words = np.random.default_rng(0).integers(0, 500, (EXAMPLES, 6))
    model = keras.Sequential([keras.Input((6,)), layers.Embedding(500, 8), layers.Dense(500)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    embedded = EXAMPLES * 6 * (8 + 1)  # A row for each word, and its index.
    top_5 = metrics.SparseTopKCategoricalAccuracy(5)
    return model, loss, ["accuracy", top_5], words, 4 * (embedded + (8 + 1) * 500)


def segmentation_model():
    """Four classes for each of 1,024 pixels, and moving statistics."""
    pixels = np.random.default_rng(0).integers(0, 4, (EXAMPLES, 32, 32, 1))
    model = keras.Sequential(
        [
            keras.Input((32, 32, 1)),
            layers.Conv2D(32, 3, padding="same"),
            layers.BatchNormalization(),
            layers.Conv2D(32, 3, padding="same"),
            layers.Conv2D(4, 1, activation="softmax"),
        ]
    )
    loss = "sparse_categorical_crossentropy"
    numbers = (9 + 1) * 32 + 4 * 32 + (9 * 32 + 1) * 32 + (32 + 1) * 4
    return model, loss, [metrics.MeanIoU(4, sparse_y_pred=False)], pixels, 4 * numbers


@pytest.mark.in_test_all("one number of replicas shows it", after=1)
@pytest.mark.slow
@pytest.mark.parametrize("make", [language_model, segmentation_model])
def test_a_step_moves_little_more_than_gradients_and_statistics(make):
    """And `evaluate` moves a few numbers: predictions stay on their replicas."""
    model, loss, compiled, data, needed = make()
    predictions = 4 * int(np.prod([EXAMPLES, *model.output_shape[1:]]))
    assert predictions > 2 * needed
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=2))
    model.compile("sgd", loss, metrics=compiled)
    with counting(replication_of(model).group) as moved:
        model.train_on_batch(data, data)
    assert needed < moved()["summed"] + moved()["gathered"] <= 1.05 * needed
    with counting(replication_of(model).group) as moved:
        model.test_on_batch(data, data)
    assert moved()["gathered"] == 0
    assert moved()["summed"] < 0.01 * needed


@pytest.mark.slow
def test_gradients_summed_in_bfloat16_are_half_the_bytes():
    x, y = np.random.default_rng(0).normal(size=(2, EXAMPLES, 40)).astype("float32")
    gradients, losses, moved = [], [], []
    for sum_dtype in ("float32", "bfloat16"):
        keras.utils.set_random_seed(0)
        net = keras.Sequential(
            [keras.Input((40,)), layers.Dense(40, activation="tanh"), layers.Dense(40)]
        )
        model = kmg.distribute(net, kmg.strategy("mirrored", devices=2), sum_dtype=sum_dtype)
        model.compile(keras.optimizers.SGD(1.0), "mse")
        before = model.get_weights()
        with counting(replication_of(model).group) as bytes_of:
            losses.append(model.train_on_batch(x, y))
        moved.append(bytes_of()["summed"])
        after = model.get_weights()
        gradients.append([old - new for old, new in zip(before, after, strict=True)])
    numbers = 2 * (40 + 1) * 40
    assert moved[0] - moved[1] == 2 * numbers
    assert losses[0] == losses[1]
    for exact, rounded in zip(*gradients, strict=True):
        error = np.abs(rounded - exact).max() / np.abs(exact).max()
        assert 1e-4 < error < 2**-7
    for variable in model.variables:
        first, other = replication_of(model).strategy.experimental_local_results(variable.value)
        np.testing.assert_array_equal(first, other)
