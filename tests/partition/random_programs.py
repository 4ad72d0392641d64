"""Random training steps, including some that nobody would write.

A program is a chain of pieces, a loss of the result, and an update of two variables. Each piece
turns rows of `WIDTH` numbers into such rows. Pieces work along the batch and across it, in loops
and conditions, with positions of rows, random draws and the batch size as a number.
"""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

WIDTH = 6
FLOAT = tf.float64
# An offset, so that rounding does not decide about numbers that would be zero.
OFF = 0.0123
Piece = Callable[[tf.Tensor, "Program"], tf.Tensor]

# Each row by itself.
ALONE: dict[str, Piece] = {
    "dense": lambda x, p: tf.tanh(x @ p.kernel + p.bias),
    "residual": lambda x, p: x + 0.1 * tf.nn.relu(x @ p.kernel),
    "layer norm": lambda x, p: (
        (x - tf.reduce_mean(x, 1, keepdims=True)) / (tf.math.reduce_std(x, 1, keepdims=True) + 0.1)
    ),
    "softmax": lambda x, p: tf.nn.softmax(x) * 2.0,
    "gate": lambda x, p: tf.where(x > p.number(), x, 0.3 * x),
    "sorted": lambda x, p: tf.sort(x, 1),
    "best two": lambda x, p: tf.reshape(
        tf.tile(tf.math.top_k(x, 2).values[:, None], [1, 3, 1]), [-1, WIDTH]
    ),
    "split and swapped": lambda x, p: tf.concat(tf.split(x, 2, axis=1)[::-1], axis=1),
    "folded": lambda x, p: tf.reshape(
        tf.math.cumsum(tf.reshape(x, [-1, 2, 3]), axis=1), [-1, WIDTH]
    ),
    "outer": lambda x, p: tf.reduce_sum(x[:, :, None] * x[:, None, :], 2) * 0.1,
    "transposed": lambda x, p: tf.transpose(tf.sin(tf.transpose(x))),
    "embedding": lambda x, p: (
        x * 0.5 + tf.gather(p.kernel, tf.cast(tf.abs(x[:, 0]) * 3.0, tf.int32) % WIDTH)
    ),
    "one hot": lambda x, p: (
        x + tf.one_hot(tf.argmax(x + 0.01 * tf.range(WIDTH, dtype=FLOAT), 1), WIDTH, dtype=FLOAT)
    ),
    "padded": lambda x, p: tf.pad(x, [[0, 0], [1, 0]])[:, :WIDTH],
    "einsum": lambda x, p: tf.einsum("bi,ij,bj->bj", x, p.kernel, x) * 0.1,
    "convolution": lambda x, p: tf.reshape(
        tf.nn.conv1d(x[:, :, None], p.filters, 1, "SAME"), [-1, WIDTH]
    ),
    "flat": lambda x, p: tf.reshape(tf.tanh(tf.reshape(x, [-1])), tf.shape(x)),
    "stacked": lambda x, p: tf.reduce_mean(tf.stack([x, x * x, tf.sin(x)], axis=1), axis=1),
    "clipped norm": lambda x, p: tf.clip_by_norm(x, 1.5, axes=[1]),
}
# All rows together.
ACROSS: dict[str, Piece] = {
    "centred": lambda x, p: x - tf.reduce_mean(x, 0),
    "normalised": lambda x, p: tf.nn.batch_normalization(
        x, *tf.nn.moments(x, [0]), p.bias[0], 1.0 + p.bias[1], 0.1
    ),
    "attends to the batch": lambda x, p: tf.nn.softmax(x @ tf.transpose(x) * 0.3) @ x,
    "similar": lambda x, p: (
        x
        * tf.reduce_mean(
            tf.math.l2_normalize(x, 1) @ tf.transpose(tf.math.l2_normalize(x, 1)), 1, keepdims=True
        )
    ),
    "of the largest": lambda x, p: x / (1.0 + tf.reduce_max(tf.abs(x))),
    "above the least": lambda x, p: x - tf.reduce_min(x, 0),
    "running sum": lambda x, p: tf.cumsum(x, 0) * 0.2,
    "backwards": lambda x, p: x + 0.5 * x[::-1],
    "rolled": lambda x, p: x - 0.5 * tf.roll(x, 1, 0),
    "two views": lambda x, p: tf.add(*tf.split(tf.concat([x, tf.cos(x)], 0) @ p.kernel, 2, 0)),
    "first row": lambda x, p: x + x[:1] - x[-1],
    "by position": lambda x, p: x * tf.cast(tf.range(tf.shape(x)[0]), FLOAT)[:, None] * 0.1,
    "by size": lambda x, p: x / tf.cast(tf.shape(x)[0], FLOAT),
    "sorted by rows": lambda x, p: tf.gather(x, tf.argsort(x[:, 1])),
    "softmax of rows": lambda x, p: x * tf.nn.softmax(x[:, 0])[:, None],
    "every second": lambda x, p: tf.repeat(x[::2], 2, 0)[: tf.shape(x)[0]],
    "segments": lambda x, p: (
        x
        + tf.gather(
            tf.math.unsorted_segment_sum(x, tf.cast(tf.abs(x[:, 2]), tf.int32) % 3, 3),
            tf.cast(tf.abs(x[:, 2]), tf.int32) % 3,
        )
        * 0.1
    ),
    "selected": lambda x, p: x - tf.reduce_sum(tf.boolean_mask(x, x[:, 0] > OFF), 0) * 0.1,
    "norm of all": lambda x, p: x / (1.0 + tf.norm(x)),
    "any": lambda x, p: tf.where(tf.reduce_any(x > 1.0 + OFF, 0), x, -x),
    "median": lambda x, p: x - tf.sort(x, 0)[tf.shape(x)[0] // 2],
}
# Loops, conditions and draws around another piece.
AROUND: dict[str, Callable[[tf.Tensor, "Program", Piece], tf.Tensor]] = {
    "loop": lambda x, p, piece: tf.while_loop(
        lambda n, y: n < 3, lambda n, y: (n + 1, y + 0.3 * tf.tanh(piece(y, p))), (0, x)
    )[1],
    "sums in a loop": lambda x, p, piece: (
        x
        + tf.while_loop(
            lambda n, y, total: n < 2,
            lambda n, y, total: (n + 1, tf.tanh(piece(y, p)), total + tf.reduce_sum(y, 0)),
            (0, x, tf.zeros([WIDTH], FLOAT)),
        )[2]
        * 0.1
    ),
    "time": lambda x, p, piece: tf.transpose(
        tf.scan(
            lambda before, now: 0.5 * before + tf.tanh(now),
            tf.transpose(piece(x, p)),
            tf.zeros_like(x[:, 0]),
        )
    ),
    "condition": lambda x, p, piece: tf.cond(
        tf.reduce_sum(tf.square(x)) > 17.0, lambda: piece(x, p), lambda: x * 0.5
    ),
    "case": lambda x, p, piece: tf.switch_case(
        tf.shape(x)[0] % 2, [lambda: piece(x, p), lambda: tf.sin(x)]
    ),
    "called": lambda x, p, piece: tf.function(lambda y: piece(y, p), autograph=False)(x),
    "dropped": lambda x, p, piece: tf.nn.experimental.stateless_dropout(
        piece(x, p), 0.3, seed=[p.seed, 1]
    ),
    "noisy": lambda x, p, piece: (
        piece(x, p) + 0.1 * tf.random.stateless_normal(tf.shape(x), [p.seed, 2], dtype=FLOAT)
    ),
    "stopped": lambda x, p, piece: x + tf.stop_gradient(piece(x, p)),
    "again": lambda x, p, piece: piece(piece(x, p), p),
    "recomputed": lambda x, p, piece: tf.recompute_grad(lambda y: piece(y, p))(x),
    "own gradient": lambda x, p, piece: tf.custom_gradient(
        lambda y: (y * 2.0, lambda upstream: upstream * tf.reduce_mean(tf.abs(y)))
    )(piece(x, p)),
}
LOSSES: dict[str, Callable[[tf.Tensor, tf.Tensor], tf.Tensor]] = {
    "mean of squares": lambda y, x: tf.reduce_mean(tf.square(y - x)),
    "sum": lambda y, x: tf.reduce_sum(tf.sin(y) * y) * 0.1,
    "root": lambda y, x: tf.sqrt(tf.reduce_mean(tf.square(y - x)) + 0.1),
    "over a count": lambda y, x: (
        tf.reduce_sum(tf.nn.relu(y)) / tf.reduce_sum(1.0 + tf.cast(y > OFF, FLOAT))
    ),
    "contrast": lambda y, x: tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(
            tf.range(tf.shape(y)[0]), y @ tf.transpose(tf.tanh(x))
        )
    ),
    "correlation": lambda y, x: (
        -tf.reduce_mean((y - tf.reduce_mean(y)) * (x - tf.reduce_mean(x)))
        / (1.0 + tf.math.reduce_std(y) * tf.math.reduce_std(x))
    ),
    "hardest": lambda y, x: tf.reduce_mean(tf.math.top_k(tf.reduce_sum(y * y, 1), 1).values),
    "weighted": lambda y, x: (
        tf.reduce_sum(y[:, 0] * tf.abs(x[:, 1])) / tf.reduce_sum(tf.abs(x[:, 1]))
    ),
}
UPDATES = ("descent", "clipped together", "momentum", "sharpened", "only if finite", "gathered")


class Program:
    """A random training step.

    Args:
        seed: Decides all of it.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.seed = seed
        draws = np.random.default_rng(seed)
        with tf.init_scope():
            self.kernel = tf.Variable(draws.normal(size=(WIDTH, WIDTH)) * 0.5)
            self.bias = tf.Variable(draws.normal(size=WIDTH) * 0.1)
            self.filters = tf.constant(draws.normal(size=(3, 1, 1)))
            self.slot = tf.Variable(np.zeros((WIDTH, WIDTH)))
            self.total = tf.Variable(np.zeros(()))
        self.variables = [self.kernel, self.bias, self.slot, self.total]
        self.names: list[str] = []
        self._pieces = [self._piece() for _ in range(self._random.randint(2, 4))]
        self.loss = self._random.choice(list(LOSSES))
        self.update = self._random.choice(UPDATES)
        self._threshold = OFF + self._random.uniform(-0.5, 0.5)

    def __repr__(self) -> str:
        return f"{self.seed}: {', '.join(self.names)}; {self.loss}; {self.update}"

    def number(self) -> float:
        return self._threshold

    def _piece(self) -> Piece:
        table = self._random.choice([ALONE, ALONE, ACROSS])
        name = self._random.choice(list(table))
        piece = table[name]
        if self._random.random() < 0.4:
            around = self._random.choice(list(AROUND))
            self.names.append(f"{around} ({name})")
            return lambda x, program: AROUND[around](x, program, piece)
        self.names.append(name)
        return piece

    def call(self, x: tf.Tensor) -> tf.Tensor:
        y = x
        for piece in self._pieces:
            y = tf.ensure_shape(piece(y, self), [None, WIDTH])
        return y

    def step(self, x: tf.Tensor) -> Any:
        """Train on a batch; returns the output, the loss, and a metric."""
        trained = [self.kernel, self.bias]
        with tf.GradientTape() as tape:
            y = self.call(x)
            loss = LOSSES[self.loss](y, x)
        gradients = [
            tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient)
            for variable, gradient in zip(trained, tape.gradient(loss, trained), strict=True)
        ]
        self._apply(gradients, x, trained)
        self.total.assign_add(tf.reduce_sum(tf.cast(y > OFF, FLOAT)))
        return y, loss, self.total / tf.cast(tf.shape(x)[0], FLOAT)

    def _apply(self, gradients: list[tf.Tensor], x: tf.Tensor, trained: list[Any]) -> None:
        if self.update == "clipped together":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.7)
        if self.update == "momentum":
            self.slot.assign(0.9 * self.slot + gradients[0])
            gradients = [self.slot + 0.0, gradients[1]]
        if self.update == "gathered":
            self.slot.assign(self.slot * 0.5)
            self.slot.assign_add(tf.transpose(x) @ x * 0.01)
        if self.update == "sharpened":
            # The gradient at another point, read after an assignment.
            norm = tf.linalg.global_norm(gradients) + 1e-3
            moved = [0.05 * gradient / norm for gradient in gradients]
            for variable, by in zip(trained, moved, strict=True):
                variable.assign_add(by)
            with tf.GradientTape() as tape:
                loss = LOSSES[self.loss](self.call(x), x)
            there = tape.gradient(loss, trained)
            for variable, by in zip(trained, moved, strict=True):
                variable.assign_sub(by)
            gradients = [
                gradient if new is None else tf.convert_to_tensor(new)
                for gradient, new in zip(gradients, there, strict=True)
            ]
        if self.update == "only if finite":
            is_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in gradients])

            def apply() -> tf.Tensor:
                for variable, gradient in zip(trained, gradients, strict=True):
                    variable.assign_sub(0.1 * gradient)
                return True

            tf.cond(is_finite, apply, lambda: False)
            return
        for variable, gradient in zip(trained, gradients, strict=True):
            variable.assign_sub(0.1 * gradient)
