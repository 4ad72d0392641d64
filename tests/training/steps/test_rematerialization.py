"""`keras.RematScope`: layers are recomputed for their gradients, and nothing else changes."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of
from helpers.one_device import assert_as_one_device

import keras_multigpu as kmg

X = np.random.default_rng(0).normal(size=(7, 4)).astype("float32")
KINDS = np.array([0, 1, 2, 0, 1, 2, 0])


def scope(recomputed):
    return keras.RematScope(mode="full" if recomputed else None)


class Block(keras.layers.Layer):
    """Everything that recomputing could get wrong: draws, statistics, losses, its own state."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(4, "gelu", activity_regularizer="l2")
        self.norm = keras.layers.BatchNormalization(momentum=0.5)
        self.dropout = keras.layers.Dropout(0.5, seed=1)

    def build(self, shape):
        self.dense.build(shape)
        self.norm.build(shape)
        self.mean = self.add_weight(shape=(4,), trainable=False, initializer="zeros")

    def call(self, x, training=None):
        y = self.dropout(self.norm(self.dense(x), training=training), training=training)
        self.mean.assign(0.5 * self.mean + keras.ops.mean(y, 0))
        self.add_loss(keras.ops.mean(y**2))
        return x + y - self.mean


def trained(place, **options):
    """Recomputed on replicas, and in plain Keras, which refuses it, not."""
    with scope(isinstance(place(keras.Sequential()), kmg.DistributedModel)):
        layers = [Block(), keras.layers.Dense(3, "softmax")]
    model = place(keras.Sequential([keras.Input((4,)), *layers]))
    optimizer = keras.optimizers.AdamW(0.05)
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"], **options)
    logs = []
    for _ in range(3):
        # Keras 3.10 does not do that itself.
        model.reset_metrics()
        found = model.train_on_batch(X, KINDS, return_dict=True)
        logs.append({name: float(value) for name, value in found.items()})
    return logs, [value.numpy() for value in (*model.variables, *optimizer.variables)]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"jit_compile": False}, {"run_eagerly": True}])
def test_recomputed_layers_train_exactly(options):
    """Without a graph nothing is recomputed."""
    assert_as_one_device(trained, **options)


def step_of(loss_of, *variables):
    """The gradients of a loss, on two replicas."""

    def step(x):
        with tf.GradientTape() as tape:
            loss = loss_of(x)
        return tape.gradient(loss, [variable.value for variable in variables])

    return kmg.function(step, strategy=replicas_of(2), self_check=False)


class Scale(keras.layers.Layer):
    """`x * w`, twice."""

    calls = 0

    def build(self, shape):
        self.w = self.add_weight(shape=(), initializer=keras.initializers.Constant(3.0))

    def call(self, x, times=None, flag=True):
        Scale.calls += 1
        y = x * self.w
        return y * self.w if times is None else y * times


def test_tensors_in_keywords_have_gradients():
    """The gradient of `x w t` by `t` is `x w`, summed over the examples."""
    with scope(True):
        layer = Scale()
    layer.build(())
    times, before = keras.Variable(2.0), Scale.calls
    step = step_of(lambda x: tf.reduce_sum(layer(x, times=times * 1.0, flag=False)), times, layer.w)
    found = step(tf.constant([[1.0], [2.0], [4.0]]))
    assert [float(each) for each in found] == [21.0, 14.0]
    assert Scale.calls == before + 2


def test_second_derivatives_are_exact():
    """With `y = x w^2`, `dy/dx = w^2`, of which the gradient by `w` is `2 w` for each example."""
    with scope(True):
        layer = Scale()
    layer.build(())

    def loss(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, flag=False)
        return tf.reduce_sum(tape.gradient(y, x))

    (found,) = step_of(loss, layer.w)(tf.constant([[1.0], [2.0], [4.0]]))
    assert float(found) == 18.0


def test_recomputation_uses_the_weights_of_the_forward_pass():
    """One assigned later does not count: the gradient of `x w^2` at 3 is 6 a unit of `x`."""
    with scope(True):
        layer = Scale()
    layer.build(())

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(x, flag=False))
        layer.w.assign(100.0)
        return tape.gradient(loss, layer.w.value)

    found = kmg.function(step, strategy=replicas_of(2), self_check=False)(tf.ones((3, 1)))
    assert float(found) == 18.0 and float(layer.w) == 100.0


def test_captured_tensors_have_gradients_inside_loops():
    """Only a constant is captured inside the loop."""
    w = keras.Variable(2.0)

    def loss(x):
        scale = w * 1.0
        turn = keras.remat(lambda z, flag=True: z * scale)
        _, z = tf.while_loop(lambda n, _: n < 3, lambda n, z: (n + 1, turn(z, flag=True)), (0, x))
        return tf.reduce_sum(z)

    # The gradient of `x w^3` at 2 is 12 a unit of `x`.
    assert float(step_of(loss, w)(tf.ones((3, 1)))[0]) == 36.0


def test_an_unused_result_has_no_gradient():
    with scope(True):
        layer = Pair()
    layer.build(())
    step = step_of(lambda x: tf.reduce_sum(layer(x, flag=True)[0]), layer.one, layer.other)
    used, unused = step(tf.ones((3, 1)))
    assert float(used) == 3.0 and unused is None


class Pair(keras.layers.Layer):
    """Two results with a weight each."""

    def build(self, shape):
        self.one, self.other = (self.add_weight(shape=()) for _ in range(2))

    def call(self, x, flag=True):
        return x * self.one, x * self.other


class Noise(keras.layers.Layer):
    """Uses TensorFlow's generator, which cannot repeat a draw."""

    def call(self, x, flag=True):
        return x * tf.random.uniform(tf.shape(x), 2.0, 2.0)


class Steps(keras.layers.Layer):
    """Counts in a loop."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), trainable=False, initializer="zeros")

    def call(self, x, flag=True):
        def turn(n, z):
            self.count.assign_add(1.0)
            return n + 1, z * 2.0

        return tf.while_loop(lambda n, _: n < 2, turn, (0, x))[1]


@pytest.mark.parametrize(("kind", "factor"), [(Noise, 2.0), (Steps, 4.0)])
def test_a_layer_with_effects_is_computed_once_with_a_warning(kind, factor, caplog):
    with scope(True):
        layer = kind(name=f"layer_{kind.__name__.lower()}")
    layer.build(())
    w = keras.Variable(5.0)
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        (found,) = step_of(lambda x: tf.reduce_sum(layer(x * w, flag=False)), w)(tf.ones((3, 1)))
    assert float(found) == 3 * factor
    assert f"`{layer.name}` is not computed again, so it saves no memory: " in caplog.text
    if kind is Steps:
        assert float(layer.count) == 2.0


def test_remat_in_plain_keras_is_unchanged():
    """Calls without keywords still go to TensorFlow."""
    kept = []

    @keras.remat
    def square(x):
        kept.append(x)
        return x * x

    x = tf.constant(3.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = square(x)
    assert float(tape.gradient(y, x)) == 6.0 and len(kept) == 2
