"""`sum_dtype="bfloat16"` rounds gradients while they travel, and nothing else."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.moved_bytes import counting
from keras import layers

import keras_multigpu as kmg
from keras_multigpu.training.exchange.cuts import gradient_sums
from keras_multigpu.training.replication import replication_of

X, Y = np.random.default_rng(0).normal(size=(2, 9, 4)).astype("float32")
FIRST, NORMALISED, LAST = (4 + 1) * 6, 2 * 6, (6 + 1) * 4


class Net(keras.Sequential):
    """Two layers, with an optimizer for each."""

    def __init__(self):
        super().__init__([keras.Input((4,)), layers.Dense(6), layers.Dense(4)])
        self.optimizers = [keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1)]

    def loss_of(self, data):
        return tf.reduce_mean((self(data[0], training=True) - data[1]) ** 2)

    def gradients(self, data, weights):
        with tf.GradientTape() as tape:
            loss = self.loss_of(data)
        return loss, tape.gradient(loss, weights)


class InTurn(Net):
    """The second layer is trained against the first one's new weights, as in a GAN."""

    def train_step(self, data):
        for layer, optimizer in zip(self.layers, self.optimizers, strict=True):
            loss, gradients = self.gradients(data, layer.trainable_weights)
            optimizer.apply(gradients, layer.trainable_weights)
        return {"loss": loss}


class Clipped(Net):
    """Gradients are clipped and scaled before the optimizer gets them."""

    def train_step(self, data):
        loss, gradients = self.gradients(data, self.trainable_weights)
        clipped, _ = tf.clip_by_global_norm(gradients, 0.1)
        self.optimizers[0].apply([2.0 * each for each in clipped], self.trainable_weights)
        return {"loss": loss}


class Logged(Net):
    """The norm of the first gradient is shown."""

    def train_step(self, data):
        loss, gradients = self.gradients(data, self.trainable_weights)
        self.optimizers[0].apply(gradients, self.trainable_weights)
        return {"loss": loss, "norm": tf.norm(gradients[0])}


class Sharpened(Net):
    """SAM: the first gradient moves the weights to where the second is taken."""

    def train_step(self, data):
        weights = self.trainable_weights
        _, first = self.gradients(data, weights)
        moves = [0.1 * gradient for gradient in first]
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_add(move)
        loss, second = self.gradients(data, weights)
        for weight, move in zip(weights, moves, strict=True):
            weight.assign_sub(move)
        self.optimizers[0].apply(second, weights)
        return {"loss": loss}


class Weighted(Net):
    """The weight of the loss is learned, and its gradient depends on the loss."""

    def __init__(self):
        super().__init__()
        self.uncertainty = self.add_weight(shape=(), initializer="zeros")

    def loss_of(self, data):
        return tf.exp(-self.uncertainty) * super().loss_of(data) + self.uncertainty

    def train_step(self, data):
        loss, gradients = self.gradients(data, self.trainable_weights)
        self.optimizers[0].apply(gradients, self.trainable_weights)
        return {"loss": loss}


class Remembered(Net):
    """A variable without optimizer follows a weight, and another sums outputs."""

    def __init__(self):
        super().__init__()
        self.follower = self.add_weight(shape=(6, 4), trainable=False)
        self.seen = self.add_weight(shape=(4,), trainable=False)

    def train_step(self, data):
        loss, gradients = self.gradients(data, self.trainable_weights)
        self.optimizers[0].apply(gradients, self.trainable_weights)
        self.follower.assign(0.9 * self.follower + 0.1 * self.layers[-1].kernel)
        self.seen.assign(0.9 * self.seen + tf.reduce_sum(data[1], axis=0))
        return {"loss": loss}


def normalised():
    ends = [layers.Dense(6), layers.BatchNormalization(), layers.Dense(4)]
    return keras.Sequential([keras.Input((4,)), *ends])


def trained(make, sum_dtype, micro_batches=1, **arguments):
    """What a step logs, the bytes that it sums, and the weights after it."""
    keras.utils.set_random_seed(0)
    model = kmg.distribute(make(), kmg.strategy("mirrored", devices=2), sum_dtype=sum_dtype)
    optimizer = keras.optimizers.SGD(0.1, global_clipnorm=1.0)
    kinds = {} if micro_batches == 1 else {"micro_batches": micro_batches}
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False, **kinds)
    with counting(replication_of(model).group) as moved:
        logs = model.fit(X, Y, batch_size=9, verbose=0, **arguments).history
    return logs, moved()["summed"], model.get_weights()


@pytest.mark.in_test_all("three kinds of steps show it", after=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "rounded", "options"),
    [
        # What BatchNorm's gradient is made of goes on to each example.
        (normalised, FIRST + LAST, {"micro_batches": 2}),
        (InTurn, FIRST + LAST, {}),
        (Logged, FIRST + LAST - 4 * 6, {}),
        (normalised, FIRST + LAST, {}),
        (Clipped, FIRST + LAST, {}),
        (Sharpened, FIRST + LAST, {}),
        (Weighted, FIRST + LAST + 1, {}),
        (Remembered, FIRST + LAST, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_what_is_logged_or_goes_back_to_examples_is_exact(make, rounded, options):
    logs, bytes_of, weights = trained(make, "float32", **options)
    again, fewer, others = trained(make, "bfloat16", **options)
    assert bytes_of - fewer == 2 * rounded
    if make is not InTurn:  # Its second loss has seen rounded weights.
        assert again == logs
    for exact, near in zip(weights, others, strict=True):
        np.testing.assert_allclose(near, exact, atol=4e-3)


def test_only_float32_sums_are_rounded():
    with tf.Graph().as_default():
        for dtype, expected in ((tf.float32, {"sum"}), (tf.float64, set()), (tf.int32, set())):
            with tf.Graph().as_default():
                own = tf.compat.v1.placeholder(dtype, [3])
                total = tf.identity(own, "sum")
                assert gradient_sums([total], {"sum"}, [total + 1], [], [own]) == expected
