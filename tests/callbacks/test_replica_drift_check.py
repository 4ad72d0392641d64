"""`ReplicaDriftCheck` finds a change in a single copy, down to one bit."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas

from keras_multigpu.callbacks import ReplicaDriftCheck
from keras_multigpu.keras_internals import variable_internals

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(14, 3)).astype("float32")
Y = RANDOM.integers(0, 2, 14)


@pytest.fixture(scope="module", params=[2, 3])
def replicas(request):
    return request.param


@pytest.fixture(scope="module")
def model(replicas):
    """A small model with dropout and batch statistics; an epoch leaves one replica without rows."""
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(4, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, seed=1),
        keras.layers.Dense(2, name="last"),
    ]
    model = on_replicas(keras.Sequential(layers), replicas)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"])
    return model


def copies_of(model, variable):
    storage = variable_internals.variable_storage(variable)
    return model.distribute_strategy.experimental_local_results(storage)


def equalize(model):
    """Give all replicas the values of the first one."""
    for variable in [*model.variables, *model.optimizer.variables]:
        first, *others = copies_of(model, variable)
        for other in others:
            other.assign(first.numpy())


class Flip(keras.callbacks.Callback):
    """Flips the lowest bit of a variable's first number, on one replica, in the second epoch."""

    def __init__(self, replica, *names):
        super().__init__()
        self.replica, self.names = replica, names

    def on_epoch_end(self, epoch, logs=None):
        for name in self.names if epoch == 1 else ():
            variables = [*self.model.variables, *self.model.optimizer.variables]
            (variable,) = [one for one in variables if one.path.endswith(name)]
            copy = copies_of(self.model, variable)[self.replica]
            value = copy.numpy()
            value.reshape(-1).view("uint8")[0] ^= 1
            copy.assign(value)


def fit(model, *callbacks):
    model.fit(X, Y, 4, epochs=2, verbose=0, shuffle=False, callbacks=list(callbacks))


def test_replicas_that_agree_have_no_drift(model):
    """NaN equals NaN, too."""
    before = model.get_weights()
    model.set_weights([np.full_like(before[0], np.nan), *before[1:]])
    check = ReplicaDriftCheck()
    fit(model, check)
    model.set_weights(before)
    assert check.drifts == []


def test_a_single_bit_is_found_and_the_others_outvote_it(model, replicas):
    """Of two replicas, the first one is believed."""
    for odd in range(replicas):
        check = ReplicaDriftCheck()
        with pytest.raises(RuntimeError, match="last/bias on CPU:.*no code assigns.*epoch=1"):
            fit(model, Flip(odd, "last/bias"), check)
        (drift,) = check.drifts
        assert drift.variable.endswith("last/bias")
        assert (drift.devices, drift.epoch) == ([f"CPU:{1 if replicas == 2 else odd}"], 1)
        equalize(model)


def test_optimizer_statistics_and_seeds_are_compared_and_the_message_is_short(model):
    """It names five and counts the others."""
    names = ("first_kernel_momentum", "seed_generator_state", "norm/moving_mean")
    names += ("first/kernel", "first/bias", "last/kernel")
    check = ReplicaDriftCheck(action="warn")
    with pytest.warns(UserWarning, match="Copies differ.*; and 1 more variables"):
        fit(model, Flip(1, *names), check)
    equalize(model)
    assert {name for drift in check.drifts for name in names if drift.variable.endswith(name)} == {
        *names
    }
    assert len(check.drifts) == 6


def test_one_copy_has_nothing_to_compare():
    check, model = ReplicaDriftCheck(), on_replicas(keras.Sequential([keras.layers.Dense(2)]), 1)
    model.compile("sgd", "sparse_categorical_crossentropy")
    fit(model, check)
    assert check.drifts == []
