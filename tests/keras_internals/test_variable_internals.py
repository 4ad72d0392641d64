"""Where Keras and TensorFlow keep values, scopes and seeds."""

import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.keras_internals import variable_internals


def test_the_storage_of_a_variable_can_be_replaced():
    """A Keras variable still keeps its value in `_value` and reads it from there."""
    variable = keras.Variable(np.zeros(2, "float32"))
    variable_internals.set_storages([variable], [tf.Variable([1.0, 2.0])])
    np.testing.assert_array_equal(variable.numpy(), [1, 2])
    variable.assign([3.0, 4.0])
    np.testing.assert_array_equal(variable_internals.variable_storage(variable).numpy(), [3, 4])


def test_an_optimizer_outside_a_strategy_updates_all_copies():
    """TensorFlow still asks a variable for its own copy outside a strategy's optimizer."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        storage = tf.Variable([1.0, 2.0])
    variable_internals.updated_by_others(storage)
    tf.distribute.get_strategy().extended.update(
        storage, lambda variable: variable.assign_sub(variable * 0.5), group=False
    )
    for copy in storage.values:
        np.testing.assert_array_equal(copy, [0.5, 1])


def test_seed_states_of_layers_and_the_global_one_are_found():
    """Layers still list their seed generators, and unseeded draws share one state."""
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5)])
    (state,) = variable_internals.seed_states(model)
    assert state is model.layers[-1].seed_generator.state
    before = variable_internals.global_seed_state().numpy()
    keras.random.normal((1,))
    assert not np.array_equal(before, variable_internals.global_seed_state().numpy())


def test_the_state_of_a_seed_generator_is_recognized():
    """A seed generator still gives its state this name."""
    assert variable_internals.is_seed_state(keras.random.SeedGenerator(1).state)
    assert not variable_internals.is_seed_state(keras.Variable(0.0))


def with_seed(seed):
    """Set the seed. Keras 3.10 keeps its global generator unless the session is cleared."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)


def test_reading_the_global_seed_early_changes_no_draw():
    """Keras still makes its global generator at its first use, with a seed from `random`."""
    found = []
    for early in (False, True):
        with_seed(3)
        if early:
            variable_internals.global_seed_state()
        first = random.random()
        found.append([first, keras.random.normal((2,)).numpy().tolist(), random.random()])
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]
    with_seed(3)
    expected = keras.random.normal((2,)).numpy()
    with_seed(3)
    variable_internals.global_seed_state()
    np.testing.assert_array_equal(keras.random.normal((2,)), expected)


def in_parts(refuse=None):
    """A variable of three rows of two numbers, in parts of two rows and one."""
    parts = [tf.Variable([[1.0, 2.0], [3.0, 4.0]], name="slot"), tf.Variable([[5.0, 6.0]])]
    return variable_internals.VariableInParts(parts, 0, refuse)


def test_a_variable_in_parts_reads_as_one_and_is_assigned_as_one():
    storage = in_parts()
    variable = keras.Variable(np.zeros((3, 2)), dtype="float32")
    variable_internals.set_storages([variable], [storage])
    np.testing.assert_array_equal(variable.numpy(), [[1, 2], [3, 4], [5, 6]])
    np.testing.assert_array_equal(variable + 1.0, [[2, 3], [4, 5], [6, 7]])
    np.testing.assert_array_equal(variable[1:, 0], [3, 5])
    np.testing.assert_array_equal(keras.ops.take(variable, [2, 0], axis=0), [[5, 6], [1, 2]])
    np.testing.assert_array_equal(tf.gather_nd(storage, [[2, 1]]), [6])

    @tf.function
    def step():
        variable.assign(2 * variable)
        variable.assign_sub(np.ones((3, 2)))
        variable.assign_add(tf.ones((3, 2)))
        return tf.reduce_sum(variable)

    assert step() == 42
    np.testing.assert_array_equal(storage.parts[1], [[10, 12]])
    with pytest.raises(ValueError, match="incompatible"):
        storage.assign(np.zeros((2, 2)))


def test_a_variable_in_parts_is_saved_whole(tmp_path):
    storage = in_parts()
    variable = keras.Variable(np.zeros((3, 2)), dtype="float32")
    variable_internals.set_storages([variable], [storage])
    path = tf.train.Checkpoint(variable=variable).save(tmp_path / "checkpoint")
    plain = keras.Variable(np.zeros((3, 2)), dtype="float32")
    tf.train.Checkpoint(variable=plain).restore(path)
    np.testing.assert_array_equal(plain, [[1, 2], [3, 4], [5, 6]])
    storage.assign(np.zeros((3, 2)))
    tf.train.Checkpoint(variable=variable).restore(path)
    np.testing.assert_array_equal(storage.parts[1], [[5, 6]])


def test_a_graph_of_one_device_has_a_stand_in_that_takes_no_memory():
    storage = in_parts()
    stand_in = storage.stand_in
    assert stand_in.stands_for is storage and stand_in.shape == (3, 2)

    @tf.function
    def run():
        stand_in.assign(storage)
        stand_in.assign(2 * stand_in)
        storage.assign(stand_in)
        stand_in.empty()

    for _ in range(2):
        run()
    np.testing.assert_array_equal(storage, [[4, 8], [12, 16], [20, 24]])
    assert tf.size(tf.raw_ops.ReadVariableOp(resource=stand_in.handle, dtype=tf.float32)) == 0


def test_a_variable_in_parts_refuses_updates_from_each_replica():
    """TensorFlow still tells an update which copy it handles, and for a plain variable none."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        copied = tf.Variable(1.0)

    def refuse():
        raise RuntimeError("in parts")

    storage = in_parts(refuse)
    tf.distribute.get_strategy().extended.update(
        tf.Variable(1.0), lambda _: storage.assign_add(tf.ones((3, 2))), group=False
    )
    assert storage.parts[1].numpy().tolist() == [[6, 7]]
    with pytest.raises(RuntimeError, match="in parts"):
        strategy.extended.update(copied, lambda _: storage.assign_add(tf.ones((3, 2))), group=False)
