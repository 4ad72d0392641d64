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


@pytest.mark.slow
def test_a_step_moves_little_more_than_gradients_and_statistics():
    """And `evaluate` moves a few numbers: predictions stay on their replicas."""
    model, loss, compiled, data, needed = language_model()
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
