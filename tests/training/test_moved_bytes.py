"""If losses and metrics are sums, only sums leave a replica: measured in bytes moved."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import replicas_of
from helpers.moved_bytes import counting
from keras import layers, metrics

import keras_multigpu as kmg
from keras_multigpu.partition.planning import gathering
from keras_multigpu.training.replication import replication_of

EXAMPLES = 8
WIDTH, LAYERS = 320, 5
OPTIMIZERS = {
    "adam": {},
    "clipnorm": {"clipnorm": 1.0},
    "accumulation, global_clipnorm": {"gradient_accumulation_steps": 2, "global_clipnorm": 1.0},
}


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


def dense_model(optimizer):
    model = keras.Sequential([keras.Input((WIDTH,)), *map(layers.Dense, [WIDTH] * LAYERS)])
    model.compile(optimizer, "mse")
    return model


def bytes_of_a_step(model, shard):
    model = kmg.distribute(model, replicas_of(2), shard=shard, self_check=False)
    x = np.ones((EXAMPLES, WIDTH), "float32")
    with counting(replication_of(model).group) as moved:
        model.train_on_batch(x, x)
    return moved


@pytest.mark.parametrize("name", [*OPTIMIZERS, "loss scaling, global_clipnorm", "lamb"])
def test_sharding_costs_what_its_page_says(name, monkeypatch):
    """Gradients are scattered, whatever becomes of them, and new weights or weights are gathered.

    The last layer's weights are gathered once, for the way forward and back.
    """
    monkeypatch.setattr(gathering, "BUCKET", 1)

    def optimizer():
        if name == "lamb":
            return keras.optimizers.Lamb()
        adam = keras.optimizers.Adam(**OPTIMIZERS.get(name, {"global_clipnorm": 1.0}))
        return keras.optimizers.LossScaleOptimizer(adam) if "scaling" in name else adam

    kernels = 4 * LAYERS * WIDTH**2
    for shard, times in (("optimizer", 1), ("weights", 2 - 2 / LAYERS)):
        moved = bytes_of_a_step(dense_model(optimizer()), shard)
        assert moved()["rows scattered"] == kernels
        assert moved()["rows gathered"] == pytest.approx(times * kernels)
        assert moved()["summed"] < 0.01 * kernels


def test_muon_gathers_what_it_multiplies_once():
    """Every replica then makes the rest of the update whole."""
    moved = bytes_of_a_step(dense_model(keras.optimizers.Muon()), "optimizer")()
    assert moved["rows gathered"] == moved["rows scattered"] == 4 * LAYERS * WIDTH**2


def test_lora_sums_the_gradients_of_its_own_kernels():
    """And not that of the kernel beside them, which is frozen."""
    model, rank = dense_model("adam"), 4
    for layer in model.layers:
        layer.enable_lora(rank)
    model.compile("adam", "mse")
    trained = sum(4 * int(np.prod(weight.shape)) for weight in model.trainable_weights)
    assert trained <= bytes_of_a_step(model, None)()["summed"] < 1.01 * trained
