"""What an optimizer of Keras is made of."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.keras_internals.versions import minor


# Before Keras 3.13 Muon fails on TensorFlow.
@pytest.mark.parametrize(
    "name",
    ["SGD", "Adam", "Nadam", "Lamb", *(["Muon"] if minor(keras.version()) >= (3, 13) else [])],
)
def test_an_optimizer_can_be_a_pure_function(name):
    """`apply` inside a stateless scope yields what it would have assigned."""
    trained, pure = (keras.Variable(np.ones((2, 2), "float32"), name="kernel") for _ in range(2))
    gradient = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    ordinary = getattr(keras.optimizers, name)(learning_rate=0.1)
    ordinary.build([trained])
    ordinary.apply([gradient], [trained])
    functional = getattr(keras.optimizers, name)(learning_rate=0.1)
    functional.build([pure])
    optimizer_internals.remember_variables([functional])
    values = [(v, tf.convert_to_tensor(v)) for v in [pure, *functional.variables]]
    with keras.StatelessScope(values) as scope:
        with optimizer_internals.functional([functional]):
            functional.apply([gradient], [pure])
    np.testing.assert_array_equal(pure.numpy(), np.ones((2, 2)))
    np.testing.assert_allclose(scope.get_current_value(pure), trained.numpy(), rtol=1e-6)
    assert type(functional).__name__ == name and functional.iterations.numpy() == 0


def test_weight_decay_exclusions_survive():
    """An optimizer still notes excluded variables by their key."""
    first, second = (keras.Variable(np.ones(2, "float32"), name=name) for name in "ab")
    optimizer = keras.optimizers.AdamW(learning_rate=0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[first])
    optimizer.build([first, second])
    optimizer_internals.remember_variables([optimizer])
    values = [(v, tf.convert_to_tensor(v)) for v in [first, second, *optimizer.variables]]
    with keras.StatelessScope(values) as scope:
        zeros = [tf.zeros(2), tf.zeros(2)]
        with optimizer_internals.functional([optimizer]):
            optimizer.apply(zeros, [first, second])
    np.testing.assert_allclose(scope.get_current_value(first), [1, 1])
    np.testing.assert_allclose(scope.get_current_value(second), [0.95, 0.95])


def test_an_optimizer_says_what_it_keeps_from_decay():
    """`exclude_from_weight_decay` still notes ids, and one pattern of names."""
    optimizer = keras.optimizers.AdamW()
    assert optimizer_internals.not_decayed(optimizer) == [0, []]
    optimizer.exclude_from_weight_decay([keras.Variable(1.0)], ["gamma", "beta"])
    assert optimizer_internals.not_decayed(optimizer) == [1, ["beta", "gamma"]]


def test_an_optimizer_says_what_its_rate_comes_from():
    """`_learning_rate` is still the variable or the schedule, `_iterations` counts all steps."""
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
    """Keras still checks where variables were made in `add_variable_from_reference`."""
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
