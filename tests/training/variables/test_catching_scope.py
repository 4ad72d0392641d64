"""What a scope notes of the variables that are used inside of it."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.training.variables.catching_scope import (
    AssignsWeights,
    CatchingScope,
    WeighedNumbers,
)


def test_known_and_unknown_variables():
    """What is read or assigned without a given value is unknown; the variables do not change."""
    known, read, written, apart = (keras.Variable(float(i)) for i in range(4))
    with CatchingScope([known], [tf.constant(9.0)], apart=[apart]) as scope:
        known.assign_add(1.0)
        written.assign(read + apart)
    assert float(scope.get_current_value(known)) == 10.0
    assert float(scope.get_current_value(written)) == 4.0
    assert set(scope.assigned) == {id(known), id(written)}
    assert set(scope.unknown) == {id(read), id(written)}
    assert scope.updates == 2
    assert [float(v.numpy()) for v in (known, read, written, apart)] == [0.0, 1.0, 2.0, 3.0]


def test_no_gradient_flows_through_an_assignment():
    """As on one device, where the value has gone into a variable and come out again."""
    variable, weight = keras.Variable(1.0, trainable=False), tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(weight)
        with CatchingScope([variable], [tf.constant(1.0)]):
            variable.assign(2.0 * weight)
            loss = variable * weight
    assert float(tape.gradient(loss, weight)) == 6.0


def test_an_assignment_that_only_a_branch_knows_is_refused():
    """Its value would be gone outside."""
    variable = keras.Variable(1.0)

    @tf.function(autograph=False)
    def step(x):
        with CatchingScope([variable], [x]):
            tf.cond(x > 0.0, lambda: variable.assign(x), lambda: x)

    with pytest.raises(ValueError, match="inside of a condition.*where.*Received: variable="):
        step(tf.constant(1.0))


def test_a_weight_cannot_be_assigned_and_updated():
    """The optimizer would update the value that was given; another kind of step can do both."""
    weight = keras.Variable(1.0)
    with (
        CatchingScope([weight], [tf.constant(1.0)], updated=[weight]),
        pytest.raises(AssignsWeights, match="a trainable variable.*Received: variable="),
    ):
        weight.assign(2.0)


def test_a_single_number_counts_for_its_part_of_the_batch():
    """A mean of 2 over 3 of 4 rows, and of 6 over the last: 3 over all. Rows count as they are."""
    single, rows = keras.metrics.Mean(), keras.metrics.Mean()
    states = []
    for part, values in ((0.75, [2.0, 2.0, 2.0]), (0.25, [6.0])):
        variables = [*single.variables, *rows.variables]
        zeros = [tf.zeros(())] * 4
        with CatchingScope(variables, zeros, tf.constant(part)) as scope, WeighedNumbers.weighed():
            single.update_state(np.mean(values))
            rows.update_state(values)
        states.append([float(scope.get_current_value(variable)) for variable in variables])
    np.testing.assert_allclose(states, [[1.5, 0.75, 6.0, 3.0], [1.5, 0.25, 6.0, 1.0]])
    single.update_state(5.0)
    assert [float(variable.numpy()) for variable in single.variables] == [5.0, 1.0]
