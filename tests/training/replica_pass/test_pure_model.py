"""Replicas draw differently and agree on what changed; checkpoints see one device's seeds."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.replica_pass.pure_model import (
    contribution,
    for_one_device,
    for_replica,
)


@pytest.mark.parametrize(
    ("dtype", "replica", "expected"),
    [
        ("int64", 0, [7, 2]),
        ("int64", 2, [7 + 2 * 0x9E3779B1, 2]),
        # Keras's own type: 0x9E3779B1 is 2654435761, and beyond 2**32 it goes on from 0.
        ("uint32", 1, [2654435768, 2]),
        ("uint32", 2, [7 + 2 * 2654435761 - 2**32, 2]),
    ],
)
def test_a_replica_adds_to_the_seed_and_takes_it_off_again(dtype, replica, expected):
    """The counter is one device's, and replica 0 has its seed."""
    state = tf.constant([7, 2], dtype)
    for index in (replica, tf.constant(replica)):
        own = for_replica(state, index)
        assert own.dtype == dtype and own.numpy().tolist() == expected
        assert for_one_device(own, index).numpy().tolist() == [7, 2]


class AlwaysNoisy(keras.Model):
    """Shows the mask its dropout draws."""

    def __init__(self):
        super().__init__()
        self.dropout = keras.layers.Dropout(0.5, seed=7)

    def call(self, x):
        return self.dropout(x, training=True)


class Unseeded(keras.Model):
    """Draws from Keras's global generator."""

    def call(self, x):
        return x + keras.random.normal((1, 8))


def strategy(replicas):
    return kmg.strategy("mirrored", devices=[f"CPU:{i}" for i in range(replicas)])


def draws(model, replicas, batches=2):
    """What each replica drew in each batch: `(batches, replicas, 8)`."""
    model = kmg.distribute(model, strategy(replicas))
    ones = np.ones((replicas * batches, 8), "float32")
    drawn = model.predict(ones, batch_size=replicas, verbose=0)
    return drawn.reshape(batches, replicas, 8)


@pytest.mark.parametrize("make", [AlwaysNoisy, Unseeded])
@pytest.mark.parametrize("replicas", [2, 4])
def test_each_replica_draws_its_own(make, replicas):
    """No two replicas and no two steps share a draw."""
    keras.utils.set_random_seed(1)
    drawn = draws(make(), replicas).reshape(-1, 8)
    assert len({row.tobytes() for row in drawn}) == len(drawn)


@pytest.mark.parametrize("make", [AlwaysNoisy, Unseeded])
@pytest.mark.slow
def test_the_same_seed_replays_bit_for_bit(make):
    """Two runs with one seed are equal."""
    runs = []
    for _ in range(2):
        # Keras 3.10 keeps its global generator when it is given another seed.
        keras.utils.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        runs.append(draws(make(), 3))
    np.testing.assert_array_equal(*runs)


@pytest.mark.slow
def test_the_first_replica_draws_what_one_device_draws():
    """Replica 0's masks are those of plain Keras."""
    plain = AlwaysNoisy().predict(np.ones((2, 8), "float32"), batch_size=1, verbose=0)
    np.testing.assert_array_equal(draws(AlwaysNoisy(), 3)[:, 0], plain)


def noisy_classifier():
    model = keras.Sequential(
        [
            keras.Input((4,)),
            keras.layers.GaussianNoise(0.1, seed=1),
            keras.layers.Dense(8),
            keras.layers.Dropout(0.5, seed=2),
            keras.layers.Dense(1),
        ]
    )
    model.compile("sgd", "mse")
    return model


@pytest.mark.slow
def test_seed_states_are_those_of_one_device():
    """After training, the generators stand where plain Keras's stand, on all replicas."""
    x = np.ones((13, 4), "float32")
    plain = noisy_classifier()
    plain.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    ours = kmg.distribute(noisy_classifier(), strategy(4))
    ours.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
    for before, after in zip(plain.layers, ours.layers, strict=True):
        if hasattr(before, "seed_generator"):
            expected = before.seed_generator.state.numpy()
            state = after.seed_generator.state
            for copy in strategy(4).experimental_local_results(state.value):
                np.testing.assert_array_equal(copy.numpy(), expected)


@pytest.mark.slow
def test_a_training_run_with_noise_replays():
    """Equal seeds give bit-equal weights."""
    x = np.random.default_rng(0).random((13, 4), "float32")
    weights = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        model = kmg.distribute(noisy_classifier(), strategy(2))
        model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
        weights.append(np.concatenate([w.ravel() for w in model.get_weights()]))
    np.testing.assert_array_equal(*weights)


# Three replicas with 3, 1 and 0 of 4 examples; the values they end with; what all get.
TABLE = [
    ("float32", "none", 10.0, [2.0, 6.0, 9.0], 3.0),  # 2 * 3/4 + 6 * 1/4
    ("float32", "sum", 10.0, [12.0, 11.0, 10.0], 13.0),  # 10 + 2 + 1 + 0
    ("float32", "only_first_replica", 10.0, [2.0, 6.0, 9.0], 2.0),
    ("int32", "none", 10, [11, 12, 13], 11),
    ("bool", "none", False, [True, False, False], True),
    ("int64", "sum", 10, [12, 11, 10], 13),
    ("uint8", "sum", 10, [12, 11, 10], 13),
    ("bfloat16", "none", 10.0, [2.0, 6.0, 9.0], 3.0),
    ("float16", "none", 0.0, [2047.0, 2047.0, 0.0], 2047.0),
]


@pytest.mark.parametrize(("dtype", "aggregation", "old", "new", "expected"), TABLE)
def test_the_common_value(dtype, aggregation, old, new, expected):
    """Floats are averaged by examples, sums add up, others follow the first replica."""
    variable = keras.Variable(old, dtype=dtype, trainable=False, aggregation=aggregation)
    old = tf.constant(old, dtype)
    total = sum(
        contribution(variable, old, tf.constant(value, dtype), tf.constant(part), replica == 0)
        for replica, (value, part) in enumerate(zip(new, [0.75, 0.25, 0.0], strict=True))
    )
    result = tf.cast(total, dtype)
    assert result.dtype == dtype
    np.testing.assert_allclose(result.numpy(), expected)


def test_a_single_replica_keeps_its_value():
    """Whatever the sums would be: also where old and new are infinite."""
    for aggregation in ("none", "sum", "only_first_replica"):
        variable = keras.Variable(0.0, aggregation=aggregation)
        old, new = tf.constant(np.inf), tf.constant(3.0)
        assert float(contribution(variable, old, new, tf.constant(1.0), first=True)) == 3.0
