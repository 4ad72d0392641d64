"""`ModelState`: values are restored to their own variables, and to no others."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import keras_multigpu as kmg
from keras_multigpu.identities import changes
from keras_multigpu.training.variables.model_state import ModelState, identity_of_model, rates_of


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
    model = model_of()
    before = model.get_weights()
    state = ModelState({**ModelState.of(model).values, "weights/0": value})
    with pytest.raises(ValueError, match=r"kernel is float32 of shape \(2, 3\) and the state has"):
        state.restore(model)
    np.testing.assert_array_equal(model.get_weights(), before)


def test_a_schedule_may_replace_a_rate():
    """And a rate may replace a schedule."""
    plain = model_of()
    scheduled = model_of(keras.optimizers.schedules.CosineDecay(0.5, 10))
    for one, other in ((plain, scheduled), (scheduled, plain)):
        one.optimizer.iterations.assign(7)
        ModelState.of(one).restore(other)
        assert int(other.optimizer.iterations) == 7
    assert float(plain.optimizer.learning_rate) == np.float32(0.1)


SHARED = layers.Dense(3)


class Deep(keras.Model):
    """A custom model."""

    def __init__(self, units):
        super().__init__()
        self.inner = keras.Sequential([layers.Dense(units), layers.Dense(1)])
        self.beta = units

    def call(self, x):
        return self.inner(x)


def functional(swapped=False, axis=1, power=2.0, rate=0.5):
    """Shared layers, bare operations, a softmax as a layer and as an activation."""
    x, y = inputs = keras.Input((3,)), keras.Input((3,))
    both = [SHARED(y), SHARED(x)] if swapped else [SHARED(x), SHARED(y)]
    soft = [layers.Softmax()(both[0]), layers.Dense(3, "softmax")(both[1])]
    total = ops.mean(soft[0] - soft[1] ** power, axis=axis, keepdims=True)
    return keras.Model(inputs, layers.Dropout(rate)(total))


def identity(model=None, optimizer="sgd", **compiled):
    model = kmg.distribute(model or functional(), kmg.strategy("one_device", devices=["CPU:0"]))
    model.compile(optimizer, **{"loss": "mse", "metrics": ["mae"], **compiled})
    return identity_of_model(model)


@pytest.mark.parametrize(
    ("changed", "places"),
    [
        ({}, set()),
        ({"model": functional(swapped=True)}, "layers[0].wiring"),
        ({"model": functional(axis=0)}, "layers[0].wiring"),
        ({"model": functional(power=3.0)}, "layers[0].wiring"),
        ({"model": functional(rate=0.4)}, "rate"),
        ({"model": Deep(3)}, "layers"),
        ({"loss": "mae"}, "loss"),
        ({"metrics": ["mse"]}, "metrics[0]"),
        ({"loss_weights": 2.0}, "loss_weights"),
        ({"optimizer": "rmsprop"}, "optimizers[0]"),
        ({"optimizer": keras.optimizers.SGD(0.5)}, set()),
        ({"optimizer": keras.optimizers.SGD(momentum=0.9)}, "optimizers[0].momentum"),
        ({"optimizer": keras.optimizers.SGD(nesterov=True)}, "optimizers[0].nesterov"),
    ],
)
def test_the_identity_depends_on_the_computation_and_not_on_names(changed, places):
    found = changes(identity(), identity(**changed))
    assert bool(found) is bool(places), found
    assert all(places in place for place in found)


def test_the_identity_includes_frozen_weights_and_those_without_decay():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    kept = keras.optimizers.AdamW()
    kept.exclude_from_weight_decay(var_names=["bias", "gamma"])
    assert set(changes(identity(model, keras.optimizers.AdamW()), identity(model, kept))) == {
        "without_decay[0][1]"
    }
    before = identity(model)
    model.layers[0].bias.trainable = False
    assert changes(before, identity(model)) == {"frozen": ([], [1])}


def test_a_custom_model_is_identified_by_its_layers_and_arguments():
    assert identity(Deep(3)) == identity(Deep(3))
    found = set(changes(identity(Deep(3)), identity(Deep(4))))
    assert found == {"layers[3].units"}


def test_rates_are_numbers_or_what_schedules_were_made_of():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1)])
    inner = keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.5, 10))
    model.compile(keras.optimizers.LossScaleOptimizer(inner))
    *_, rate = rates_of(model)
    assert (rate["class"], rate["decay_steps"]) == ("CosineDecay", 10)
    model.compile(keras.optimizers.Adam(0.5))
    assert rates_of(model) == [0.5]
