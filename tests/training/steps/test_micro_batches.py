"""`compile(micro_batches=...)`: the same step in pieces, and in more when memory runs out."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of
from helpers.one_device import assert_close, assert_equal
from helpers.rows_in_python import zeros_after

import keras_multigpu as kmg

X = np.random.default_rng(0).normal(size=(29, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(29, 1)).astype("float32")
WEIGHTS = np.random.default_rng(2).random(29).astype("float32")


def dense(*layers):
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((4,)),
            *layers,
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            keras.layers.Dense(1),
        ]
    )


def trained(model, loss, **options):
    """Weights, history and optimizer steps after two epochs of uneven batches."""
    model.compile(keras.optimizers.Adam(0.05, clipnorm=0.5), loss, metrics=["mae"], **options)
    fit = {"batch_size": 8, "epochs": 2, "shuffle": False, "verbose": 0}
    history = model.fit(X, Y, sample_weight=WEIGHTS, **fit).history
    return model.get_weights(), history, model.optimizer.iterations.numpy()


class Hungry(keras.layers.Layer):
    """Runs out of memory when a replica gives it more than one row."""

    def call(self, x):
        def check(rows):
            if len(rows) > 1:
                raise MemoryError("not enough")

        return x + zeros_after(check, x)


@pytest.mark.slow
@pytest.mark.usefixtures("python_sees_rows")
def test_pieces_change_nothing(caplog):
    """They are doubled until they fit, and the same step is tried again; some have no example."""
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    expected = trained(dense(), loss, run_eagerly=True)
    model = kmg.distribute(dense(Hungry()), replicas_of(2))
    assert_close(trained(model, loss, micro_batches="auto"), expected, atol=1e-6)
    messages = [record.getMessage() for record in caplog.records if "micro-batches" in record.msg]
    assert ["into 2 micro" in messages[0], "into 4 micro" in messages[1]] == [True, True]


@pytest.mark.slow
@pytest.mark.usefixtures("python_sees_rows")
def test_running_out_of_memory_leaves_nothing_half_done(caplog):
    model = kmg.distribute(dense(Hungry()), replicas_of(2))
    model.compile("adam", "mse", metrics=["mae"])
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.fit(X[:8], Y[:8], batch_size=8, verbose=0)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        model.train_on_batch(X[:8], Y[:8])
    assert caplog.text.count('shard="optimizer"') == 2
    assert_equal(model.get_weights(), dense().get_weights())
    assert model.optimizer.iterations.numpy() == 0
    assert all(not np.any(variable.numpy()) for variable in model.metrics_variables)


def related(y_true, y_pred):
    """Each prediction against all targets of the batch."""
    return keras.ops.mean(keras.ops.square(keras.ops.transpose(y_true) - y_pred), axis=1)


@pytest.mark.slow
def test_pieces_of_a_share_give_the_numbers_of_the_whole_batch(caplog):
    """Moments, dropout, and a loss that relates rows."""

    def made():
        return dense(keras.layers.BatchNormalization(), keras.layers.Dropout(0.5, seed=3))

    expected = trained(made(), related, run_eagerly=True)
    found = trained(kmg.distribute(made(), replicas_of(2)), related, micro_batches=2)
    assert_close(found, expected, atol=1e-6)
    assert "saves little memory" in caplog.text


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "many"])
def test_micro_batches_are_a_positive_number_or_auto(wrong):
    model = kmg.distribute(dense(), replicas_of(2))
    with pytest.raises(ValueError, match="Received: micro_batches="):
        model.compile("sgd", "mse", micro_batches=wrong)
