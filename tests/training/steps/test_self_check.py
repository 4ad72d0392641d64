"""The self-check of a split step finds a false rule, and ignores rounding."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.everything_in_parts import divide_everything
from helpers.one_device import assert_close, assert_equal

import keras_multigpu as kmg
from keras_multigpu.partition.rules import RULES
from keras_multigpu.partition.rules.plan import Plan
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.steps import unsplit
from keras_multigpu.training.steps.self_check import distance
from keras_multigpu.training.steps.trial import Trial

ROWS, BATCH = 20, 7


@pytest.fixture
def false_rule(monkeypatch):
    """A rule for cumulative sums that forgets the rows of other replicas."""

    def rule(op, ins, facts):
        return Plan(ins, ins[:1])

    monkeypatch.setitem(RULES, "Cumsum", rule)


class Ordered(keras.Sequential):
    """A loss that needs cumulative sums over the rows."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return tf.reduce_mean(tf.cumsum(y_pred, axis=0) ** 2)


def trained(replicas, make=Ordered, optimizer=None, data=lambda x: x, epochs=1, **options):
    keras.utils.set_random_seed(1)
    model = make([keras.Input((5,)), keras.layers.Dropout(0.2), keras.layers.Dense(3)])
    x = np.random.default_rng(0).normal(size=(ROWS, 5)).astype("float32")
    if replicas:
        model = kmg.distribute(model, devices=replicas, **options)
    optimizer = optimizer or keras.optimizers.SGD(0.1)
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=not replicas)
    given = tf.data.Dataset.from_tensor_slices(x).batch(BATCH) if data else x
    history = model.fit(given, epochs=epochs, shuffle=False, verbose=0)
    return [*model.get_weights(), history.history["loss"]], model


def alone(model):
    functions = replication_of(model).steps_of("train")
    return [each.unsplit_because for made in functions for each in made.runners]


def test_a_false_rule_is_found_and_does_no_harm(false_rule, caplog):
    expected, _ = trained(0)
    with caplog.at_level("WARNING", logger="keras_multigpu"):
        found, model = trained(3)
    assert_close(found, expected, atol=0)
    assert all(alone(model))
    (said,) = [r.message for r in caplog.records if "would not give the numbers" in r.message]
    assert "One replica computes the whole of train_step" in said
    # Without the check nobody notices.
    found, model = trained(3, self_check=False)
    assert not np.allclose(found[0], expected[0], rtol=1e-3)


def test_on_inexact_makes_a_false_rule_an_error(false_rule):
    with pytest.raises(RuntimeError, match="does not give the numbers of one device: .* differs"):
        trained(2, on_inexact="error")


def test_nothing_of_the_trial_is_kept():
    found, model = trained(2, optimizer=keras.optimizers.Adam(0.01))
    expected, _ = trained(2, optimizer=keras.optimizers.Adam(0.01), self_check=False)
    assert_equal(found, expected)
    assert not any(alone(model))
    assert int(model.optimizer.iterations) == 3


class Growing(keras.Sequential):
    """Keeps the outputs of all steps in a variable that grows."""

    def __init__(self, layers):
        super().__init__(layers)
        self.kept = tf.Variable(tf.zeros((0, 3)), shape=(None, 3), trainable=False)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.kept.assign(tf.concat([self.kept, y_pred], axis=0))
        return tf.reduce_mean(y_pred**2) + tf.reduce_mean(self.kept) ** 2


def test_a_variable_may_change_its_shape():
    expected, one = trained(0, Growing)
    found, model = trained(2, Growing, on_inexact="error")
    assert_close([*found, model.kept.numpy()], [*expected, one.kept.numpy()])
    assert not any(alone(model))


def test_a_false_rule_is_found_with_micro_batches_of_unknown_length(false_rule):
    model = Ordered([keras.Input((None, 5)), keras.layers.Dense(3)])
    model = kmg.distribute(model, devices=2, on_inexact="error")
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False, micro_batches=2)
    x = np.random.default_rng(0).normal(size=(8, 4, 5)).astype("float32")
    spec = tf.TensorSpec((None, None, 5))
    data = tf.data.Dataset.from_generator(lambda: iter([x]), output_signature=spec)
    with pytest.raises(RuntimeError, match="Split over 4 parts.*differs by"):
        model.fit(data, verbose=0)


def test_a_false_rule_is_found_in_16_bits(false_rule):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        _, model = trained(3)
    finally:
        keras.config.set_dtype_policy("float32")
    assert all(alone(model))


@pytest.mark.slow
def test_the_sign_of_rounding_errors_in_16_bits_is_no_difference():
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((16, 16, 3), dtype="bfloat16"),
            keras.layers.Conv2D(8, 3, dtype="mixed_bfloat16"),
            keras.layers.BatchNormalization(dtype="mixed_bfloat16"),
            keras.layers.Conv2DTranspose(4, 3, strides=2, dtype="mixed_bfloat16"),
            keras.layers.GlobalAveragePooling2D(dtype="mixed_bfloat16"),
            keras.layers.Dense(5, dtype="mixed_bfloat16"),
        ]
    )
    model = kmg.distribute(model, devices=3, on_inexact="error")
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Lion(), loss, jit_compile=False)
    draws = np.random.default_rng(0)
    x = draws.normal(size=(16, 16, 16, 3)).astype("float32")
    model.fit(x, draws.integers(0, 5, 16), batch_size=16, verbose=0)
    assert not any(alone(model))


class Centred(keras.layers.Layer):
    """Subtracts the mean of the batch, and scales the rest."""

    def build(self, shape):
        self.scale = self.add_weight(shape=shape[1:], initializer="ones")

    def call(self, x):
        return self.scale * (x - tf.reduce_mean(x, axis=0))


def test_a_gradient_of_rounding_errors_is_no_difference():
    """Adam steps by its sign."""
    x = np.random.default_rng(0).normal(size=(5, 40)).astype("float32")
    (scale,), ends = np.ones((1, 40), "float32"), []
    for replicas in (1, 2):
        model = keras.Sequential([keras.Input((40,)), Centred()])
        model = kmg.distribute(model, devices=replicas, on_inexact="error")
        model.compile("adam", lambda y, y_pred: y_pred, jit_compile=False)
        model.fit(x, np.zeros(5), batch_size=5, verbose=0)
        assert not any(alone(model)) or replicas == 1
        ends.append(np.sign(model.get_weights()[0] - scale))
    assert not np.array_equal(*ends)


@pytest.mark.parametrize("shard", [None, "weights"])
def test_the_state_of_an_optimizer_is_compared(shard, false_rule, monkeypatch):
    divide_everything(monkeypatch)
    monkeypatch.setattr(unsplit, "AT_ONCE", 1)
    _, model = trained(3, optimizer=keras.optimizers.Adam(0.01), shard=shard)
    assert all(alone(model))


@pytest.mark.parametrize("side", ["on_one_device", "in_parts"])
def test_a_check_without_memory_is_said_and_training_goes_on(side, monkeypatch, caplog):
    def fail(*_):
        raise tf.errors.ResourceExhaustedError(None, None, "out of memory")

    monkeypatch.setattr(Trial, side, fail)
    found, model = trained(2)
    assert not any(alone(model))
    np.testing.assert_array_equal(found[0], trained(2, self_check=False)[0][0])
    assert "self-check of `train_step` was left out: memory ran out" in caplog.text


def test_a_check_that_one_device_cannot_run_is_said(caplog):
    model = kmg.distribute(keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)]), devices=2)
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="label"):
        model.fit(np.zeros((6, 5), "float32"), np.full(6, 7), verbose=0)
    assert "self-check of `train_step` was left out: one device cannot run it" in caplog.text


def test_an_unknown_on_inexact_is_refused():
    with pytest.raises(ValueError, match="`on_inexact` has an unknown value"):
        trained(2, on_inexact="never")


@pytest.mark.parametrize(
    ("expected", "found", "rounded", "size"),
    [
        ([1.0, 2.0], [1.0, 2.5], 0.0, 0.25),
        ([np.nan, np.inf], [np.nan, np.inf], 0.0, 0.0),
        ([np.nan, 1.0], [1.0, 1.0], 0.0, np.inf),
        ([0.0, 0.0], [1e-9, 0.0], 1e-8, 0.0),
        ([0.0, 0.0], [1e-7, 0.0], 1e-8, np.inf),
        ([3, 4], [3, 4], 0.0, 0.0),
        ([3, 4], [3, 5], 0.0, 1.0),
        ([1.0], [1.0, 1.0], 0.0, np.inf),
    ],
)
def test_differences_are_relative_to_what_a_step_changes(expected, found, rounded, size):
    assert distance(np.array(expected), np.array(found), rounded) == size
