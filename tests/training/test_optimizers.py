"""Custom optimizers, and weights that the loss does not depend on."""

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from helpers.one_device import assert_as_one_device

X = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")


@pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")
@pytest.mark.slow
def test_weights_that_the_loss_does_not_depend_on_are_unchanged():
    class OneHead(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean((y_pred[0] - y) ** 2)

    x = keras.Input((1,))
    heads = [keras.layers.Dense(1, kernel_initializer="ones")(x) for _ in range(2)]
    model = on_replicas(OneHead(x, heads), 2)
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    model.train_on_batch(np.ones((3, 1)), np.zeros((3, 1)))
    first, _, second, _ = model.get_weights()
    assert first[0, 0] < 0.95 and second[0, 0] == 1


class Halving(keras.optimizers.SGD):
    """Halves each gradient in `apply_gradients`."""

    def apply_gradients(self, grads_and_vars):
        return super().apply_gradients([(0.5 * g, v) for g, v in grads_and_vars])


class Lookahead(keras.optimizers.Optimizer):
    """Has an optimizer for kernels and one for biases, and goes half way back every second step."""

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


@pytest.mark.parametrize("make", [Halving, Lookahead])
@pytest.mark.slow
def test_custom_optimizers_update_as_on_one_device(make):
    """An overridden `apply_gradients`, and optimizers around others."""

    def weights(place, **options):
        """Three epochs end with a smaller batch."""
        model = place(keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
        model.compile(make(), "mse", **options)
        model.fit(X, X[:, :1], 4, epochs=3, shuffle=False, verbose=0)
        return model.get_weights()

    assert_as_one_device(weights, atol=1e-6)
