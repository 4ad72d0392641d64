"""Where Keras keeps the parts of an optimizer, and how small variables are updated together."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.keras_internals.optimizer_internals import AT_ONCE, JoinedVariable
from keras_multigpu.training.steps.one_device import plain_storages
from keras_multigpu.training.variables.placement import place_optimizers

GRADIENTS = [tf.constant(value) for value in ([[1.0, -2.0]], [4.0, 0.5, -8.0], 2.0)]


def weights():
    return [keras.Variable(start) for start in ([[1.0, 2.0]], [3.0, 4.0, 5.0], 6.0)]


def updates_of(optimizer, variables, gradients, steps=1):
    asked = []
    optimizer.build(variables)
    original = optimizer.update_step

    def counted(gradient, variable, learning_rate):
        asked.append(variable)
        original(gradient, variable, learning_rate)

    vars(optimizer)["update_step"] = counted
    for _ in range(steps):
        with optimizer_internals.on_one_device([optimizer]):
            optimizer.apply(gradients, variables)
    return [variable.numpy() for variable in (*variables, *optimizer.variables)], asked


def test_joined_variables_lie_end_to_end_padded_with_zeros():
    """The parts keep their shapes and get their new values once, at the end."""
    parts = weights()
    joined = JoinedVariable(parts)
    assert joined.shape == (AT_ONCE,) and joined.dtype == "float32"
    joined.assign_add(tf.ones(AT_ONCE))
    joined.assign_sub(4.0 * tf.one_hot(5, AT_ONCE))
    joined.give_back()
    assert [part.numpy().tolist() for part in parts] == [[[2.0, 3.0]], [4.0, 5.0, 6.0], 3.0]


def test_a_joined_variable_acts_as_a_tensor():
    """In arithmetic with numbers on either side, and wherever TensorFlow takes a tensor."""
    parts = [keras.Variable([1.0, 2.0]), keras.Variable([[4.0]])]
    v = JoinedVariable(parts)
    found = [v + 1, 1 + v, v - 1, v * 2, 2 * v, v / 2, -v, tf.square(v), tf.cast(v, "int32")]
    assert [each.numpy()[:3].tolist() for each in found] == [
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


def test_small_variables_are_updated_in_one_call():
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


@pytest.mark.parametrize("kind", sorted(optimizer_internals.ELEMENTWISE, key=lambda c: c.__name__))
def test_a_joined_update_equals_single_updates(kind, monkeypatch):
    """For every elementwise optimizer and all its slots, up to the last digit.

    Vectorized and scalar instructions of a processor round differently.
    """
    results = []
    for small, count in ((optimizer_internals.SMALL, 2), (0, 6)):
        monkeypatch.setattr(optimizer_internals, "SMALL", small)
        values, asked = updates_of(kind(0.1), weights(), GRADIENTS, steps=2)
        assert len(asked) == count
        results.append(values)
    for together, single in zip(*results, strict=True):
        np.testing.assert_allclose(together, single, rtol=1e-6)


def test_variables_that_cannot_be_joined_are_updated_alone(monkeypatch):
    """Large ones, rows of a table, other dtypes, and all those of Lamb, which needs them whole."""
    monkeypatch.setattr(optimizer_internals, "SMALL", 4)
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
    assert [len(variable.shape) for variable in asked] == [2, 1, 0]


def test_variables_without_decay_are_found():
    """`exclude_from_weight_decay` still keeps ids and a pattern of names."""
    optimizer = keras.optimizers.AdamW()
    assert optimizer_internals.not_decayed(optimizer) == [0, []]
    optimizer.exclude_from_weight_decay([keras.Variable(1.0)], ["gamma", "beta"])
    assert optimizer_internals.not_decayed(optimizer) == [1, ["beta", "gamma"]]


@pytest.mark.parametrize(("momentum", "remembered"), [(0.0, 0), (0.9, 3)])
def test_slots_and_updated_variables_are_found(momentum, remembered):
    optimizer = keras.optimizers.SGD(momentum=momentum, use_ema=True)
    variables = [keras.Variable(tf.ones(shape)) for shape in [(2,), (3,), (1, 2)]]
    optimizer.build(variables)
    kept, moved = optimizer_internals.remembered_and_moved(optimizer)
    assert len(kept) == remembered and all("momentum" in each.path for each in kept)
    assert [v.path for v in moved[:3]] == [v.path for v in variables]
    assert len(moved) == 6 and all("average" in each.path for each in moved[3:])


def test_the_rate_and_step_counter_of_an_optimizer_are_found():
    """`_learning_rate` is still the variable or schedule, and `_iterations` counts every step."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    assert optimizer_internals.compiled_rate(keras.optimizers.SGD(schedule)) is schedule
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    rate = optimizer_internals.compiled_rate(optimizer)
    assert isinstance(rate, keras.Variable) and rate is optimizer.learning_rate
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer.apply([tf.ones(2)], [variable])
    assert int(optimizer_internals.step_counter(optimizer)) == 1
    assert int(optimizer.iterations) == 0


def test_optimizers_can_be_built_for_variables_of_any_strategy():
    """Keras still checks the strategy of a variable in `add_variable_from_reference`."""
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    variable = keras.Variable(np.ones(2, "float32"))
    with strategy.scope():
        refused, optimizer = (keras.optimizers.SGD(momentum=0.9) for _ in range(2))
    with pytest.raises(RuntimeError, match="inside"):
        refused.build([variable])
    with optimizer_internals.variables_anywhere():
        optimizer.build([variable])
    assert len(optimizer.variables) == 3


def test_an_optimizer_recognizes_variables_moved_to_replicas():
    """Keras still identifies variables by `id`, for indices and decay."""
    first, second = (keras.Variable(np.ones(2, "float32"), name=name) for name in "ab")
    optimizer = keras.optimizers.AdamW(learning_rate=0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[first])
    optimizer.build([first, second])
    place_optimizers([optimizer], kmg.strategy(devices=2), [first, second])
    with plain_storages([first, second, *optimizer.variables]):
        with optimizer_internals.on_one_device([optimizer]):
            optimizer.apply([tf.zeros(2), tf.zeros(2)], [first, second])
            found = [first.numpy(), second.numpy()]
    np.testing.assert_allclose(found, [[1, 1], [0.95, 0.95]])
