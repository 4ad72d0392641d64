"""`ReplicaDriftCheck` finds a change in a single copy, down to one bit."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas

from keras_multigpu.callbacks import ReplicaDriftCheck
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.replication import replication_of


def network(replicas):
    """A small model with dropout and batch statistics, and all its variables."""
    layers = [
        keras.Input((3,)),
        keras.layers.Dense(4, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, seed=1),
        keras.layers.Dense(2, name="last"),
    ]
    model = on_replicas(keras.Sequential(layers), replicas)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    replication_of(model).placement.prepare(model, method="train_step")
    return model


def flip(model, replica, *names):
    """Flip the lowest bit of the first number of some variables, on one replica."""
    for name in names:
        variables = [*model.variables, *model.optimizer.variables]
        (variable,) = [one for one in variables if one.path.endswith(name)]
        copy = copies_of(variable)[replica]
        value = copy.numpy()
        value.reshape(-1).view("uint8")[0] ^= 1
        copy.assign(value)


def check(model, callback):
    """End the second epoch of a run; returns what was found."""
    vars(model)["training_run"] = SimpleNamespace(group=replication_of(model).group, callbacks=[])
    callback.set_model(model)
    callback.on_epoch_end(1)
    return callback.drifts


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_replicas_that_agree_have_no_drift(replicas):
    """NaN equals NaN, too."""
    model = network(replicas)
    first, *others = model.get_weights()
    model.set_weights([np.full_like(first, np.nan), *others])
    assert check(model, ReplicaDriftCheck()) == []


@pytest.mark.parametrize(
    ("replicas", "flipped", "found"), [(2, 0, 1), (2, 1, 1), (3, 0, 0), (3, 1, 1), (3, 2, 2)]
)
def test_a_single_bit_is_found_and_the_others_outvote_it(replicas, flipped, found):
    """Of two replicas, the first one is believed."""
    model, callback = network(replicas), ReplicaDriftCheck()
    flip(model, flipped, "last/bias")
    with pytest.raises(RuntimeError, match="last/bias on CPU:.*no code assigns.*epoch=1"):
        check(model, callback)
    (drift,) = callback.drifts
    assert drift.variable.endswith("last/bias")
    assert (drift.devices, drift.epoch) == ([f"CPU:{found}"], 1)


def test_optimizer_statistics_and_seeds_are_compared_and_the_message_is_short():
    """It names five and counts the others."""
    names = ("first_kernel_momentum", "seed_generator_state", "norm/moving_mean")
    names += ("first/kernel", "first/bias", "last/kernel")
    model = network(2)
    flip(model, 1, *names)
    with pytest.warns(UserWarning, match="Copies differ.*; and 1 more variables"):
        drifts = check(model, ReplicaDriftCheck(action="warn"))
    assert len(drifts) == 6
    assert all(any(drift.variable.endswith(name) for drift in drifts) for name in names)


@pytest.mark.slow
def test_a_training_on_replicas_has_no_drift():
    """The last step leaves one replica without rows."""
    model, callback = network(3), ReplicaDriftCheck()
    model.fit(np.ones((14, 3)), np.ones((14, 2)), 4, epochs=2, verbose=0, callbacks=[callback])
    assert callback.drifts == []
