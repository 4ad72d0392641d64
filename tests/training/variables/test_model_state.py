"""`ModelState`: values go back to the variables they were taken from, and to no others."""

import keras
import numpy as np
import pytest

import keras_multigpu as kmg
from keras_multigpu.training.variables.metric_storages import MetricStorages
from keras_multigpu.training.variables.model_state import ModelState
from keras_multigpu.training.variables.model_state import give


def model_of(rate=0.1):
    """A model with one kernel of shape (2, 3), its optimizer built."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, use_bias=False)])
    model = kmg.distribute(model, kmg.strategy("one_device", devices=["CPU:0"]))
    model.compile(keras.optimizers.SGD(rate), "mse")
    model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize(
    "value", [np.zeros((4, 2, 3), "f4"), np.zeros((2, 3), "f2"), np.zeros(3, "f4")], ids=str
)
def test_a_value_of_another_shape_or_type_is_refused(value):
    """One with an axis more is no sum of copies; nothing has changed then."""
    model = model_of()
    before = model.get_weights()
    state = ModelState({**ModelState.of(model).values, "weights/0": value})
    with pytest.raises(ValueError, match=r"kernel is float32 of shape \(2, 3\) and the state has"):
        state.restore(model)
    np.testing.assert_array_equal(model.get_weights(), before)


def test_copies_add_up_on_another_number_of_replicas():
    """Two copies, given to three replicas, one, and two again."""
    two = (np.float32([1, 2]), np.float32([10, 20]))
    for count in (3, 1, 2):
        strategy = kmg.strategy(devices=count)
        variable = keras.Variable(np.zeros(2, "f4"), trainable=False)
        MetricStorages(strategy).use([variable], in_parts=True)
        give(variable, two)
        np.testing.assert_array_equal(variable.numpy(), [11, 22])


def test_a_schedule_may_take_the_place_of_a_rate():
    """And a rate that of a schedule: the rate is nobody else's number."""
    plain = model_of()
    scheduled = model_of(keras.optimizers.schedules.CosineDecay(0.5, 10))
    for one, other in ((plain, scheduled), (scheduled, plain)):
        one.optimizer.iterations.assign(7)
        ModelState.of(one).restore(other)
        assert int(other.optimizer.iterations) == 7
    assert float(plain.optimizer.learning_rate) == np.float32(0.1)
