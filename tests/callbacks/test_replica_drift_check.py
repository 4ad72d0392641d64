"""`ReplicaDriftCheck` finds a change in a single copy, down to one bit."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas, replicas_of
from helpers.own_step import OwnStep

import keras_multigpu as kmg
from keras_multigpu.callbacks import replica_drift_check
from keras_multigpu.callbacks.replica_drift_check import (
    Checksums,
    Copied,
    ReplicaDriftCheck,
    checksum,
    difference,
    drift_of,
    odd_ones,
)
from keras_multigpu.keras_internals import variable_internals
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.variables.model_state import ModelState

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(26, 3)).astype("float32")
Y = RANDOM.integers(0, 2, 26)


def layers():
    """The layers of a small model with dropout and batch statistics."""
    return [
        keras.Input((3,)),
        keras.layers.Dense(4, name="first"),
        keras.layers.BatchNormalization(name="norm"),
        keras.layers.Dropout(0.3, seed=1),
        keras.layers.Dense(2, name="last"),
    ]


def compiled(model, **options):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.1), loss, metrics=["accuracy"], **options)
    return model


def network(replicas, **options):
    model = on_replicas(keras.Sequential(layers()), replicas)
    return compiled(model, **options)


def stock(replicas):
    """A model for Keras's own `fit`."""
    with replicas_of(replicas).scope():
        return compiled(keras.Sequential(layers()))


class Corrupt(keras.callbacks.Callback):
    """Changes a copy of a variable after a step of an epoch."""

    def __init__(self, change, epoch=1, step=3):
        super().__init__()
        self.change, self.at = change, (epoch, step)

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch + 1) == self.at:
            self.change(self.model)


def copies_of(model, variable):
    """The copies of one of the model's variables."""
    storage = variable_internals.variable_storage(variable)
    return model.distribute_strategy.experimental_local_results(storage)


def added(replica, value, name="last/bias", places=1):
    """Adds to the first places of a weight, on one replica."""

    def change(model):
        variables = [*model.variables, *model.optimizer.variables]
        (variable,) = [one for one in variables if one.path.endswith(name)]
        part = copies_of(model, variable)[replica]
        flat = part.numpy().reshape(-1)
        flat[:places] += np.asarray(value, flat.dtype)
        part.assign(flat.reshape(part.shape))

    return change


def flipped(replica, bit=0, name="first/kernel"):
    """Flips one bit of one element, on one replica."""

    def change(model):
        (variable,) = [one for one in model.variables if one.path.endswith(name)]
        part = copies_of(model, variable)[replica]
        value = part.numpy()
        value.reshape(-1).view("uint32")[5] ^= np.uint32(1 << bit)
        part.assign(value)

    return change


def fit(model, *callbacks, **arguments):
    """Two epochs of seven steps, the last of them with two examples."""
    given = {"epochs": 2, "verbose": 0, "shuffle": False, **arguments}
    return model.fit(X, Y, 4, callbacks=list(callbacks), **given)


@pytest.fixture(scope="module")
def again():
    """A function that returns a trained model, the same for many tests and in the same state."""
    kept = {}

    def again(replicas):
        if replicas not in kept:
            model = network(replicas)
            fit(model, epochs=1)
            kept[replicas] = model, ModelState.of(model)
        model, state = kept[replicas]
        state.restore(model)
        for variable in [*model.variables, *model.optimizer.variables]:
            first, *others = copies_of(model, variable)
            assert all(np.array_equal(first, other) for other in others)
        return model

    return again


@pytest.fixture(autouse=True, scope="module")
def compiled_once():
    """Checksums of a model are compiled once for all tests."""
    kept = []

    def checksums(variables):
        known = next((one for one in kept if one.fits(variables)), None)
        if known is None:
            kept.append(known := Checksums(variables))
        return known

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_drift_check, "Checksums", checksums)
        yield


@pytest.mark.parametrize(
    ("replicas", "options"),
    [(2, {}), (3, {}), (2, {"steps_per_execution": 2})],
)
@pytest.mark.in_test_all("one kind of model shows it", after=1)
@pytest.mark.slow
def test_replicas_that_agree_have_no_drift(again, replicas, options):
    """Checked every second step and at the end of an epoch, with an empty replica, too."""
    check = ReplicaDriftCheck(every_steps=2)
    model = network(replicas, **options) if options else again(replicas)
    fit(model, check)
    assert check.checks == 2 * 4
    assert check.drifts == []


@pytest.mark.in_test_all("it checks weights, not steps")
def test_a_custom_train_step_can_be_checked():
    check = ReplicaDriftCheck(every_steps=3)
    model = compiled(on_replicas(OwnStep(layers()[-1]), 2))
    fit(model, check)
    assert check.checks == 2 * 3
    with pytest.raises(RuntimeError, match="last/bias on CPU:1 differs"):
        fit(model, Corrupt(added(1, 1.0)), check)


@pytest.mark.slow
def test_the_error_names_variable_device_and_step(again):
    """One of two copies is changed after step 3 of epoch 1; the next check is after step 4."""
    check = ReplicaDriftCheck(every_steps=4, ignore=["*norm/moving_*"])
    with pytest.raises(RuntimeError) as raised:
        fit(again(2), Corrupt(added(1, 0.5)), check)
    text = str(raised.value)
    assert "last/bias on CPU:1 differs from CPU:0 in 1 of 2 values, by up to 0.5" in text
    assert "Expected every bit to be equal on all replicas. Resume from an earlier" in text
    assert "Received: epoch=1, step=4, devices=['CPU:1'], variables=" in text
    drift = next(one for one in check.drifts if one.variable.endswith("last/bias"))
    assert (drift.epoch, drift.step, drift.is_majority) == (1, 4, False)


@pytest.mark.parametrize("bit", [0, 31])
def test_a_single_bit_is_found(again, bit):
    """The lowest bit and the sign; at the end of the epoch."""
    check = ReplicaDriftCheck(action="warn")
    with pytest.warns(UserWarning, match="first/kernel on CPU:1 differs from CPU:0 in .* of 12"):
        fit(again(2), Corrupt(flipped(1, bit), step=7), check)
    (drift,) = check.drifts
    assert (drift.elements, drift.size, drift.step) == (1, 12, 7)


@pytest.mark.parametrize(("odd", "believed"), [(0, "CPU:1"), (2, "CPU:0")])
def test_one_of_three_is_outvoted(odd, believed):
    copies = [tf.Variable(tf.zeros(4)) for _ in range(3)]
    copies[odd].assign([2.0, 0.0, -1.0, 0.0])
    group = ReplicaGroup(kmg.strategy(devices=3))
    checks = [int(checksum(copy.read_value())) for copy in copies]
    drift = drift_of(Copied("norm/beta", tuple(copies), False), checks, group, 1, 7)
    assert drift == ("norm/beta", [f"CPU:{odd}"], believed, True, 2, 4, 2.0, 1, 7)
    assert str(drift) == (
        f"norm/beta on CPU:{odd} differs from {believed} and most others in 2 of 4 values, by up "
        "to 2"
    )


def test_optimizer_variables_and_seeds_are_compared(again):
    """A moment of Adam, and the state of a seed generator. NaN equals NaN."""
    check = ReplicaDriftCheck(action="warn", every_steps=7)
    changes = [added(1, 1.0, "first_kernel_momentum"), added(1, 1, "seed_generator_state")]
    nan = [added(replica, np.nan, "first/bias") for replica in range(2)]
    disturb = [Corrupt(change, epoch=0, step=7) for change in [*changes, *nan]]
    with pytest.warns(UserWarning, match="do not hold the same values"):
        fit(again(2), *disturb, check, epochs=1)
    names = [drift.variable.rpartition("/")[2] for drift in check.drifts]
    assert len(names) == 2
    assert names[0] == "seed_generator_state"
    assert names[1].endswith("first_kernel_momentum")


def test_many_variables_make_one_short_message(again):
    """The message names five and counts the others."""

    def change(model):
        for variable in model.trainable_variables:
            part = copies_of(model, variable)[1]
            part.assign(np.full(part.shape, np.nan, "float32"))

    check = ReplicaDriftCheck(action="warn")
    with pytest.warns(UserWarning, match="not finite; and 1 more variables"):
        fit(again(2), Corrupt(change, epoch=0, step=7), check, epochs=1)
    assert len(check.drifts) == 6


def epoch(model, check, steps=1):
    """Call the check's hooks as Keras does in an epoch of some steps."""
    callbacks = keras.callbacks.CallbackList([check], model=model)
    callbacks.on_train_begin()
    callbacks.on_epoch_begin(0)
    for step in range(steps):
        callbacks.on_train_batch_end(step)
    callbacks.on_epoch_end(0)


@pytest.mark.in_test_all("about Keras, not about us")
def test_stock_keras_drifts_by_design_and_the_error_says_so():
    """Each replica has its own moving statistics."""
    model = stock(2)
    added(1, 0.5, "norm/moving_mean")(model)
    with pytest.raises(RuntimeError, match="norm/moving_mean on CPU:1.*leave them out"):
        epoch(model, ReplicaDriftCheck())
    check = ReplicaDriftCheck(every_steps=2, ignore=["*/moving_mean", "*/moving_variance"])
    epoch(model, check, 5)
    assert (check.checks, check.drifts) == (3, [])
    added(1, 0.5)(model)
    with pytest.raises(RuntimeError, match="last/bias on CPU:1 differs from CPU:0"):
        epoch(model, check)


@pytest.mark.parametrize("make", [network, lambda replicas: compiled(keras.Sequential(layers()))])
def test_one_replica_has_nothing_to_compare(make, caplog):
    check, model = ReplicaDriftCheck(every_steps=1), make(1)
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        epoch(model, check, 2)
    assert check.checks == 0
    assert [one.message for one in caplog.records] == [
        "ReplicaDriftCheck: there is only one copy of the variables, so there is nothing to "
        "compare."
    ]


def test_between_checks_nothing_is_computed(again, monkeypatch):
    check, asked = ReplicaDriftCheck(every_steps=5), []
    monkeypatch.setattr(check, "_compared", lambda _: asked.append(check._step) or [])
    fit(again(2), check, epochs=1)
    assert asked == [5, 7]


@pytest.mark.slow
def test_checksums_are_compiled_once():
    check, model = ReplicaDriftCheck(every_steps=1), stock(2)
    epoch(model, check, 2)
    first = check._checksums
    epoch(model, check)
    assert check._checksums is first
    epoch(stock(2), check)
    assert check._checksums is not first


DTYPES = ["float32", "float16", "bfloat16", "float64", "int32", "int64", "uint8", "int8", "bool"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_checksum_of_each_type(dtype):
    """It follows the formula, and changes when one element changes."""
    integers = RANDOM.integers(0, 100, (5, 7))
    values = tf.cast(integers > 50 if dtype == "bool" else integers, dtype)
    flat = values.numpy().reshape(-1)
    assert int(checksum(values)) == by_formula(flat)
    assert int(tf.function(checksum, jit_compile=True)(values)) == by_formula(flat)
    seen = {by_formula(flat)}
    for index in range(5):
        changed = flat.copy()
        changed[index] = not changed[index] if dtype == "bool" else changed[index] + 1
        seen.add(int(checksum(tf.constant(changed, dtype))))
    assert len(seen) == 6


def by_formula(flat):
    """The checksum in integers of Python."""
    words = flat.view({1: "uint8", 2: "uint16"}.get(flat.dtype.itemsize, "uint32"))
    total = 0
    for position, word in enumerate(words.tolist()):
        mixed = (word + position * 0x9E3779B1) % 2**32
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
            mixed = (mixed ^ (mixed >> shift)) * factor % 2**32
        total = (total + mixed) % 2**32
    return total


@pytest.mark.parametrize(
    ("one", "other"),
    [([1.0, 2.0], [2.0, 1.0]), ([1.0, -1.0], [-1.0, 1.0]), ([0.0, 1.0], [-0.0, 1.0])],
)
def test_a_checksum_sees_exchanged_values_and_the_sign_of_zero(one, other):
    """A sum with odd factors would miss swapped signs."""
    assert int(checksum(tf.constant(one))) != int(checksum(tf.constant(other)))


def test_nan_has_a_checksum_like_any_other_value():
    value = tf.constant([np.nan, np.inf])
    assert int(checksum(value)) == int(checksum(tf.identity(value)))
    assert int(checksum(tf.zeros([0]))) == 0


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        ([7, 7, 9, 7], (0, [2])),
        ([9, 7, 7, 7], (1, [0])),
        ([7, 9], (0, [1])),
        ([7, 7, 9, 9], (0, [2, 3])),
        ([9, 9, 7, 7, 7], (2, [0, 1])),
        ([1, 2, 3, 4], (0, [1, 2, 3])),
    ],
)
def test_the_majority_is_believed(checks, expected):
    assert odd_ones(checks) == expected


def test_differences_are_counted_in_bits():
    assert difference(np.array([0.0, 1.0, 2.0]), np.array([-0.0, 1.0, 2.5])) == (2, 0.5)
    assert difference(np.array([[True, False]]), np.array([[True, True]])) == (1, 1.0)
    count, largest = difference(np.array([1.0, np.nan]), np.array([np.nan, np.nan]))
    assert count == 1 and np.isnan(largest)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"every_steps": 0}, "`every_steps` is not a positive integer.*Received: every_steps=0"),
        ({"action": "stop"}, "Expected one of 'raise', 'warn'.*action='stop'"),
        ({"ignore": "norm"}, "`ignore` is not a list of patterns.*Received: ignore='norm'"),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(ValueError, match=text):
        ReplicaDriftCheck(**arguments)


def test_a_pattern_that_matches_nothing_is_an_error(again):
    with pytest.raises(ValueError, match="not match any variable.*first/kernel.*pattern=.nrom"):
        fit(again(2), ReplicaDriftCheck(every_steps=1, ignore=["nrom/*"]))
