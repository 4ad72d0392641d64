"""One update as a pure function: new values by hand, nothing assigned."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.keras_internals.optimizer_internals import JoinedVariable
from keras_multigpu.training.variables.adjusted_schedule import (
    is_loss_scaled,
    loss_scale,
    state_of,
    updated,
)
from keras_multigpu.training.variables.placement import with_inner


class Steps:
    """Updates of weights by an optimizer; the values go from one step to the next.

    Args:
        optimizer: The optimizer.
        *starts: What each weight starts with.
    """

    def __init__(self, optimizer, *starts):
        self.optimizer = optimizer
        self.weights = [keras.Variable(start, dtype="float32") for start in starts]
        optimizer.build(self.weights)
        optimizer_internals.remember_variables(with_inner(optimizer))
        self.variables = [*self.weights, *state_of(optimizer)]
        self.values = [tf.convert_to_tensor(variable) for variable in self.variables]

    def step(self, *gradients):
        """The weights after an update with these gradients."""
        before = [variable.numpy() for variable in self.variables]
        tensors = [None if g is None else tf.constant(g, tf.float32) for g in gradients]
        self.values = updated(self.optimizer, self.variables, self.values, tensors)
        for variable, value in zip(self.variables, before, strict=True):
            np.testing.assert_array_equal(variable.numpy(), value)
        return [value.numpy().tolist() for value in self.values[: len(self.weights)]]

    def state(self, name):
        """A variable of the optimizer."""
        names = [variable.name for variable in self.variables]
        return self.values[names.index(name)].numpy().tolist()


def test_momentum():
    """The velocity is -0.5 * 2 = -1, then 0.5 * -1 - 0.5 * 4 = -2.5; iterations are counted."""
    steps = Steps(keras.optimizers.SGD(0.5, momentum=0.5), [1.0, 1.0], 10.0)
    assert steps.step([2.0, 0.0], 2.0) == [[0.0, 1.0], 9.0]
    assert steps.step([4.0, 2.0], 4.0) == [[-2.5, 0.0], 6.5]
    assert steps.state("iteration") == 2


def test_a_weight_without_a_gradient_stays():
    """The loss does not depend on it; Keras warns of it."""
    steps = Steps(keras.optimizers.SGD(0.5), [1.0], [7.0])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        assert steps.step([2.0], None) == [[0.0], [7.0]]


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        ({"clipvalue": 3.0}, [[-3.0], [-3.0]]),
        ({"clipnorm": 2.0}, [[-2.0], [-2.0]]),
        ({"global_clipnorm": 2.5}, [[-1.5], [-2.0]]),  # The norm of (3, 4) is 5.
    ],
)
def test_gradients_are_clipped_once_they_are_summed(clip, expected):
    """Each value, each gradient, or all of them together."""
    assert Steps(keras.optimizers.SGD(1.0, **clip), [0.0], [0.0]).step([3.0], [4.0]) == expected


OPTIMIZERS = {
    "AdamW": {"weight_decay": 0.1},
    "Adadelta": {},
    "Adafactor": {},
    "Adagrad": {},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "Ftrl": {},
    "Lamb": {},
    "Lion": {},
    "Nadam": {},
    "RMSprop": {"centered": True, "momentum": 0.5},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_optimizer_of_keras_computes_what_it_would_assign(name):
    """Three steps, each with what the one before has left in the optimizer's variables."""

    def made():
        return getattr(keras.optimizers, name)(0.1, **OPTIMIZERS[name])

    optimizer, weights = made(), [keras.Variable([[1.0, -2.0], [3.0, 0.5]]), keras.Variable([4.0])]
    steps = Steps(made(), *(weight.numpy() for weight in weights))
    for size in (1.0, -3.0, 0.5):
        gradients = [[[size, 2.0], [-size, 0.1]], [3.0 * size]]
        optimizer.apply([tf.constant(gradient) for gradient in gradients], weights)
        for found, weight in zip(steps.step(*gradients), weights, strict=True):
            np.testing.assert_allclose(found, weight.numpy(), rtol=1e-6)


def test_decay_and_averages():
    """Decay takes 0.5 * 0.5 of the weight; the average starts with it and goes half of the way."""
    optimizer = keras.optimizers.SGD(0.5, weight_decay=0.5, use_ema=True, ema_momentum=0.5)
    steps = Steps(optimizer, [4.0])
    assert steps.step([2.0]) == [[2.0]]  # 4 - 1 - 1
    assert steps.values[-1].numpy().tolist() == [2.0]
    assert steps.step([2.0]) == [[0.5]]  # 2 - 0.5 - 1
    assert steps.values[-1].numpy().tolist() == [1.25]


def test_gradients_accumulate():
    """Every second step updates, by the mean of two gradients."""
    steps = Steps(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), [0.0])
    assert [steps.step([gradient]) for gradient in (1.0, 3.0, 5.0, 7.0)] == [
        [[0.0]],
        [[-2.0]],
        [[-2.0]],
        [[-8.0]],
    ]


def test_a_schedule_is_asked_with_the_present_step():
    """One, a half, a half: the counter is a value and not the variable."""
    rate = keras.optimizers.schedules.PiecewiseConstantDecay([0], [1.0, 0.5])
    steps = Steps(keras.optimizers.SGD(rate), [0.0])
    assert [steps.step([1.0]) for _ in range(3)] == [[[-1.0]], [[-1.5]], [[-2.0]]]


def test_a_scaled_loss():
    """Gradients are divided by the scale; one that is not finite skips the step and halves it.

    After two finite steps the scale doubles.
    """
    optimizer = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.SGD(1.0), initial_scale=8.0, dynamic_growth_steps=2
    )
    steps = Steps(optimizer, [0.0], [0.0])
    assert is_loss_scaled(optimizer) and not is_loss_scaled(optimizer.inner_optimizer)

    def scale():
        return float(loss_scale(optimizer, steps.variables[2:], steps.values[2:]))

    assert scale() == 8
    assert steps.step([8.0], [16.0]) == [[-1.0], [-2.0]]
    assert steps.step([np.inf], [16.0]) == [[-1.0], [-2.0]]
    assert scale() == 4 and steps.state("step_counter") == 0
    assert steps.step([4.0], [0.0]) == [[-2.0], [-2.0]]
    assert steps.step([np.nan], [0.0]) == [[-2.0], [-2.0]]
    assert scale() == 2
    for _ in range(2):
        steps.step([0.0], [0.0])
    assert scale() == 4 and steps.state("step_counter") == 0


def test_other_losses_are_not_scaled():
    """Unless the optimizer has a factor of its own."""
    assert float(loss_scale(None, [], [])) == 1
    for optimizer, expected in [
        (keras.optimizers.SGD(), 1),
        (keras.optimizers.SGD(loss_scale_factor=4.0), 4),
    ]:
        steps = Steps(optimizer, [0.0])
        assert float(loss_scale(optimizer, steps.variables[1:], steps.values[1:])) == expected


GRADIENTS = [tf.constant(value) for value in ([[1.0, -2.0]], [4.0, 0.5, -8.0], 2.0)]


def weights():
    return [keras.Variable(start) for start in ([[1.0, 2.0]], [3.0, 4.0, 5.0], 6.0)]


def updates_of(optimizer, variables, gradients, steps=1):
    """The variables after some updates, and what each update was asked for."""
    asked = []
    optimizer.build(variables)
    optimizer_internals.remember_variables([optimizer])
    touched = [*variables, *optimizer.variables]
    values = [tf.convert_to_tensor(variable) for variable in touched]

    original = optimizer.update_step

    def counted(gradient, variable, learning_rate):
        asked.append(variable)
        original(gradient, variable, learning_rate)

    vars(optimizer)["update_step"] = counted
    for _ in range(steps):
        with keras.StatelessScope(list(zip(touched, values, strict=True))) as scope:
            with optimizer_internals.functional([optimizer]):
                optimizer.apply(gradients, variables)
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


@pytest.mark.parametrize("kind", sorted(optimizer_internals.ELEMENTWISE, key=lambda c: c.__name__))
def test_each_elementwise_optimizer_has_the_numbers_of_single_updates(kind, monkeypatch):
    """To the bit, in all their slots: joined, and one by one, as with variables too large."""
    results = []
    for small, count in ((optimizer_internals.SMALL, 2), (0, 6)):
        monkeypatch.setattr(optimizer_internals, "SMALL", small)
        values, asked = updates_of(kind(0.1), weights(), GRADIENTS, steps=2)
        assert len(asked) == count
        results.append(values)
    for together, single in zip(*results, strict=True):
        np.testing.assert_array_equal(together, single)


def test_what_cannot_be_joined_is_updated_alone(monkeypatch):
    """Large variables, rows of a table, other dtypes, optimizers that look at a whole variable."""
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
    assert [type(variable) for variable in asked] == [keras.Variable] * 3


class Halving(keras.optimizers.SGD):
    """Takes half of each gradient, where Keras's step hands them over."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * g, v) for g, v in grads_and_vars])


class Lookahead(keras.optimizers.Optimizer):
    """Kernels and biases have an optimizer each, and go half way back every second time."""

    def __init__(self):
        super().__init__(learning_rate=0.1)
        self.parts = {"kernels": keras.optimizers.Adam(0.1), "biases": [keras.optimizers.SGD(0.1)]}

    def build(self, variables):
        super().build(variables)
        self.parts["kernels"].build(variables[:1])
        self.parts["biases"][0].build(variables[1:])
        self.slow = [self.add_variable_from_reference(v, "slow") for v in variables]

    def apply(self, grads, trainable_variables=None):
        if not self.built:
            self.build(trainable_variables)
        self.parts["kernels"].apply(grads[:1], trainable_variables[:1])
        self.parts["biases"][0].apply(grads[1:], trainable_variables[1:])
        self.iterations.assign_add(1)
        back = 0.5 * keras.ops.cast(self.iterations % 2 == 0, "float32")
        for slow, weight in zip(self.slow, trainable_variables, strict=True):
            weight.assign(weight + back * (slow - weight))
            slow.assign(weight)


class Around(keras.optimizers.Optimizer):
    """Doubles gradients for another optimizer, which is built when it gets them."""

    def __init__(self):
        super().__init__(learning_rate=0.1)
        self.inner = keras.optimizers.Adam(0.1)

    def apply(self, grads, trainable_variables=None):
        self.inner.apply([2 * g for g in grads], trainable_variables)
        self.iterations.assign_add(1)


class OwnStep(keras.Model):
    """Calls Keras's step."""

    def train_step(self, data):
        return super().train_step(data)


@pytest.mark.parametrize("cls", [keras.Model, OwnStep])
@pytest.mark.parametrize("make", [Halving, Lookahead, Around])
@pytest.mark.slow
def test_what_a_user_has_made_of_optimizers(make, cls):
    """Another `apply_gradients`, and one optimizer around others, update as on one device."""
    x = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")

    def trained(place):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,))
        model = place(cls(inputs, keras.layers.Dense(1)(inputs)))
        model.compile(make(), "mse", run_eagerly=not isinstance(model, kmg.DistributedModel))
        model.fit(x, x[:, :1], 3, shuffle=False, verbose=0)
        return model.get_weights()

    found = trained(lambda model: kmg.distribute(model, devices=2))
    for one, other in zip(found, trained(lambda model: model), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
