"""`shard_optimizer=True`: each replica keeps a part of the optimizer's state, and nothing changes."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from helpers.cpu_replicas import replicas_of

import keras_multigpu as kmg
from keras_multigpu.training.replica_group import copies_of

SIZE = 257
"""A kernel of this size squared is not joined with other weights."""
X = np.random.default_rng(0).normal(size=(7, SIZE)).astype("float32")
optimizers = keras.optimizers
OPTIMIZERS = {
    "conditions": lambda: optimizers.LossScaleOptimizer(
        optimizers.AdamW(
            1e-2,
            weight_decay=0.1,
            global_clipnorm=0.1,
            gradient_accumulation_steps=2,
            use_ema=True,
            ema_overwrite_frequency=2,
        )
    )
}
EVERY = {
    "Adam, averages, clipnorm": lambda: optimizers.Adam(1e-2, clipnorm=0.1, use_ema=True),
    "Adam, accumulation": lambda: optimizers.Adam(1e-2, gradient_accumulation_steps=2),
    "SGD": lambda: optimizers.SGD(1e-2, momentum=0.9, nesterov=True, clipvalue=0.01),
    "RMSprop": lambda: optimizers.RMSprop(1e-3, centered=True, momentum=0.5, weight_decay=0.1),
    "AdamW": lambda: optimizers.AdamW(1e-2, global_clipnorm=0.1),
    "amsgrad": lambda: optimizers.Adam(1e-2, amsgrad=True),
    "Lion": lambda: optimizers.Lion(1e-3),
    "Lamb": lambda: optimizers.Lamb(1e-3),
    "Nadam": lambda: optimizers.Nadam(1e-3),
    "Muon": lambda: optimizers.Muon(1e-3),
    "Adafactor": lambda: optimizers.Adafactor(1e-2),
    "Adagrad": lambda: optimizers.Adagrad(1e-2),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adamax": lambda: optimizers.Adamax(1e-2),
    "Ftrl": lambda: optimizers.Ftrl(1e-2),
}


def made():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(SIZE, "tanh"), keras.layers.Dense(SIZE), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((SIZE,)), *layers])


def placed(shards, count=2):
    return kmg.distribute(made(), replicas_of(count), self_check=shards, shard_optimizer=shards)


def values(model):
    return [v.numpy() for v in (*model.variables, *model.optimizer.variables)]


def trained(shards, optimizer, count=2, **options):
    model = placed(shards, count)
    model.compile(optimizer, "mse", **options)
    losses = [model.train_on_batch(X, X[:, :1]) for _ in range(3)]
    return model, [*losses, *values(model)]


def assert_equal(one, other):
    for first, second in zip(one, other, strict=True):
        np.testing.assert_array_equal(first, second)


def kept_once(model):
    return [v.path for v in model.optimizer.variables if len(copies_of(v)) == 1]


every = pytest.mark.parametrize(
    ("name", "count"),
    [("conditions", 2)]
    + [(name, count) for name in OPTIMIZERS | EVERY for count in (2, 4) if ALL_REPLICAS],
)


@every
def test_the_numbers_stay_the_same_to_the_bit(name, count):
    optimizer = (OPTIMIZERS | EVERY)[name]
    model, sharded = trained(True, optimizer(), count)
    assert_equal(sharded, trained(False, optimizer(), count)[1])
    large = [v for v in model.optimizer.variables if v.shape == (SIZE, SIZE)]
    homes = {copies_of(v)[0].device for v in large if len(copies_of(v)) == 1}
    assert len(homes) == 2
    mirrored = [v.path for v in large if len(copies_of(v)) > 1]
    # The norm of all gradients needs the sums of all.
    assert all("gradient_accumulator" in path for path in mirrored)
    assert not mirrored or name == "conditions"
