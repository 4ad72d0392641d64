"""Small variables are updated as one, with the numbers that each has by itself."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.training.update import joint_update
from keras_multigpu.training.update.joint_update import JoinedVariable
from keras_multigpu.training.update.joint_update import update_jointly

GRADIENTS = [tf.constant(value) for value in ([[1.0, -2.0]], [4.0, 0.5, -8.0], 2.0)]


def weights():
    return [keras.Variable(start) for start in ([[1.0, 2.0]], [3.0, 4.0, 5.0], 6.0)]


def updates_of(optimizer, variables, gradients, steps=1):
    """The variables after some updates, and what each update was asked for."""
    asked = []
    optimizer.build(variables)
    optimizer_internals.remember_variables(optimizer)
    touched = [*variables, *optimizer.variables]
    values = [tf.convert_to_tensor(variable) for variable in touched]

    def update_all(functional, gradients, members, rate):
        original = functional.update_step

        def counted(gradient, variable, learning_rate):
            asked.append(variable)
            original(gradient, variable, learning_rate)

        vars(functional)["update_step"] = counted
        try:
            update_jointly(functional, gradients, members, rate)
        finally:
            del vars(functional)["update_step"]

    for _ in range(steps):
        with keras.StatelessScope(list(zip(touched, values, strict=True))) as scope:
            optimizer_internals.apply_functionally(optimizer, gradients, variables, update_all)
        values = [scope.get_current_value(variable) for variable in touched]
    return [value.numpy() for value in values], asked


def test_joined_variables_are_end_to_end():
    """Parts keep their shapes, and get the new values once."""
    parts = weights()
    with keras.StatelessScope([(part, tf.convert_to_tensor(part)) for part in parts]) as scope:
        joined = JoinedVariable(parts)
        assert joined.shape == (6,) and joined.dtype == "float32"
        joined.give_back()
        assert scope.get_current_value(parts[0]) is not None
        joined.assign_add([1.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        joined.assign_sub(tf.constant([0.0, 0.0, 0.0, 0.0, 0.0, 4.0]))
        joined.give_back()
    new = [scope.get_current_value(part).numpy().tolist() for part in parts]
    assert new == [[[2.0, 3.0]], [4.0, 5.0, 6.0], 3.0]


def test_a_joined_variable_calculates_as_a_tensor():
    """With numbers on either side, and wherever TensorFlow takes a tensor."""
    parts = [keras.Variable([1.0, 2.0]), keras.Variable([[4.0]])]
    with keras.StatelessScope([(part, tf.convert_to_tensor(part)) for part in parts]):
        v = JoinedVariable(parts)
        found = [v + 1, 1 + v, v - 1, v * 2, 2 * v, v / 2, -v, tf.square(v), tf.cast(v, "int32")]
    assert [each.numpy().tolist() for each in found] == [
        [2, 3, 5],
        [2, 3, 5],
        [0, 1, 3],
        [2, 4, 8],
        [2, 4, 8],
        [0.5, 1, 2],
        [-1, -2, -4],
        [1, 4, 16],
        [1, 2, 4],
    ]


def test_small_variables_take_one_update():
    """A velocity of -0.5 * gradient, and half of it again in the second step."""
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    variables = weights()
    values, asked = updates_of(optimizer, variables, GRADIENTS, steps=2)
    # Two steps with gradient g move a weight by -0.5 g - (0.25 g + 0.5 g).
    expected = [[[-0.25, 4.5]], [-2.0, 3.375, 15.0], 3.5]
    for value, answer in zip(values[:3], expected, strict=True):
        np.testing.assert_array_equal(value, np.array(answer, "float32"), strict=True)
    assert [type(variable) for variable in asked] == [JoinedVariable] * 2
    # After the weights, the number of steps and the learning rate.
    assert values[5].tolist() == [[-0.75, 1.5]]


@pytest.mark.parametrize("kind", sorted(joint_update.ELEMENTWISE, key=lambda c: c.__name__))
def test_each_elementwise_optimizer_has_the_numbers_of_single_updates(kind, monkeypatch):
    """To the bit, in all their slots: joined, and one by one, as with variables too large."""
    results = []
    for small, count in ((joint_update.SMALL, 2), (0, 6)):
        monkeypatch.setattr(joint_update, "SMALL", small)
        values, asked = updates_of(kind(0.1), weights(), GRADIENTS, steps=2)
        assert len(asked) == count
        results.append(values)
    for together, single in zip(*results, strict=True):
        np.testing.assert_array_equal(together, single)


def test_what_cannot_be_joined_is_updated_alone(monkeypatch):
    """Large variables, rows of a table, other dtypes, optimizers that look at a whole variable."""
    monkeypatch.setattr(joint_update, "SMALL", 4)
    variables = [
        keras.Variable([1.0, 1.0]),
        keras.Variable(np.ones(5, "float32")),
        keras.Variable([[1.0], [1.0]]),
        keras.Variable([1.0, 1.0], dtype="float16"),
        keras.Variable([1.0]),
    ]
    table = tf.IndexedSlices(tf.constant([[2.0]]), tf.constant([1]), tf.constant([2, 1]))
    gradients = [tf.ones(2), tf.ones(5), table, tf.ones(2, tf.float16), tf.ones(1)]
    values, asked = updates_of(keras.optimizers.SGD(0.5), variables, gradients)
    assert [value.tolist() for value in values[:5]] == [
        [0.5, 0.5],
        [0.5] * 5,
        [[1.0], [0.0]],
        [0.5, 0.5],
        [0.5],
    ]
    assert asked[:2] == variables[1:3]
    parts = [[id(part) for part in each.parts] for each in asked[2:]]
    assert parts == [[id(variables[0]), id(variables[4])], [id(variables[3])]]

    # Lamb scales the step by the norm of each variable.
    _, asked = updates_of(keras.optimizers.Lamb(0.1), weights(), GRADIENTS)
    assert [type(variable) for variable in asked] == [keras.Variable] * 3
