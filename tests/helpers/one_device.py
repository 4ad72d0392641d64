"""The law that most trainings are tested by: replicas end with the numbers of one device."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from helpers.cpu_replicas import on_replicas


def assert_close(found, expected, rtol=2e-5, atol=2e-6):
    """Two structures of numbers are equal up to rounding; names in them are equal."""
    keras.tree.assert_same_structure(found, expected)
    for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(expected), strict=True):
        if isinstance(other, str):
            assert one == other
        else:
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)


def assert_equal(found, expected):
    """The same to the last bit."""
    assert_close(found, expected, rtol=0, atol=0)


def assert_as_one_device(numbers, replicas=2, in_graph=False, rtol=2e-5, atol=2e-6, **options):
    """What a training returns on replicas, it returns in plain Keras.

    Args:
        numbers: Trains: called with a function that puts a model where it belongs, and with
            arguments for `compile`.
        replicas: How many.
        in_graph: Whether plain Keras needs a graph; without one it takes less time.
        rtol: The largest relative difference.
        atol: The largest difference of numbers near zero.
        **options: More arguments for `compile` on replicas.
    """
    with optimized():
        found = seeded(numbers, lambda model: on_replicas(model, replicas), **options)
    eagerly = {} if in_graph else {"run_eagerly": True}
    assert_close(found, seeded(numbers, lambda model: model, **eagerly), rtol, atol)


@contextlib.contextmanager
def optimized():
    """Let TensorFlow optimize graphs as in a user's program, also in `make test`."""
    before = tf.config.optimizer.get_experimental_options().get("disable_meta_optimizer", False)
    optimize(True)
    try:
        yield
    finally:
        optimize(not before)


def optimize(graphs):
    """Switch TensorFlow's graph optimization on or off."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": not graphs})


def seeded(numbers, place, **options):
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    return numbers(place, **options)
