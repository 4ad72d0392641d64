"""Operands of every kind, and the table of samples."""

import functools
import inspect

import numpy as np
import tensorflow as tf
from validator import Operand, Sample

from keras_multigpu.partition.sizes import Size

raw = tf.raw_ops
B, C, T = Size.of("batch"), Size.of("other"), Size.of("time")
SAMPLES: dict[str, list[Sample]] = {}


def add(
    kinds,
    *operands,
    modes=("open", "static", "unknown"),
    tolerance=None,
    one_row=True,
    wishes=True,
    **attributes,
):
    """Add a sample for each of these types of operations.

    Operands are its first inputs, in order, of those that `attributes` does not name. Where that
    does not do, a function of the operands comes first, which may take the raw operation.
    """
    function = call
    if callable(operands[0]):
        function, *operands = operands
    if tolerance is None:
        tolerance = 1e-5 if any(one.dtype == tf.float32 for one in operands) else 1e-6
    takes_op = next(iter(inspect.signature(function).parameters)) == "op"
    for kind in kinds.split():
        given = [getattr(raw, kind)] if takes_op else []
        own = functools.partial(function, *given, **attributes)
        sample = Sample(own, tuple(operands), modes, tolerance, one_row, wishes)
        SAMPLES.setdefault(kind, []).append(sample)


def add_open(kinds, *operands, **more):
    """Add a sample that is tried only where lengths change from batch to batch."""
    add(kinds, *operands, modes=("open",), **more)


def call(op, *values, **more):
    others = [name for name in inspect.signature(op).parameters if name not in more]
    return op(**dict(zip(others, values, strict=False)), **more)


def floats(*dims, dtype=tf.float64, special=True):
    return Operand(dims, dtype, lambda random, shape: random.normal(size=shape) * 2, special)


def between(low, high, *dims, dtype=tf.float64):
    """Numbers in an interval, for operations that fail outside it."""
    return Operand(dims, dtype, lambda random, shape: random.uniform(low, high, shape))


def ints(high, *dims, dtype=tf.int32, low=0):
    return Operand(dims, dtype, lambda random, shape: random.integers(low, high, shape))


def bools(*dims):
    return Operand(dims, tf.bool, lambda random, shape: random.random(shape) > 0.5)


def complexes(*dims):
    return Operand(
        dims,
        tf.complex128,
        lambda random, shape: random.normal(size=shape) + 1j * random.normal(size=shape),
    )


def texts(*dims, words=("1.5", "-2", "30", "7")):
    return Operand(
        dims,
        tf.string,
        lambda random, shape: np.array(words, object)[random.integers(0, len(words), shape)],
    )


def lists(*dims):
    return Operand(dims, tf.float64, lambda random, shape: random.normal(size=shape), False, True)


def positive_definite(*dims):
    def values(random, shape):
        root = random.normal(size=shape)
        return root @ np.swapaxes(root, -1, -2) + 3 * np.eye(shape[-1])

    return Operand(dims, tf.float64, values)


NUMBERS = np.random.default_rng(0)


def weights(*shape, dtype=tf.float64):
    return tf.constant(NUMBERS.normal(size=shape), dtype)
