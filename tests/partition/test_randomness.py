"""Random draws with a row for each example are split into rows."""

import numpy as np
import pytest
import tensorflow as tf
from simulated_replicas import Simulation

from keras_multigpu.partition.layouts import Rows
from keras_multigpu.partition.rules.randomness import skip_ahead

ROWS = tf.TensorSpec([None, 6])
SEED = (1, 2)


def noise(x, draw=tf.random.stateless_normal, **more):
    return draw([tf.shape(x)[0], 3], SEED, **more)


def integers(x):
    return noise(x, tf.random.stateless_uniform, maxval=9, minval=2, dtype=tf.int32)


def in_a_branch(x):
    """Whole in one branch and rows in the other; replicas cannot exchange values in either."""
    rows = noise(x)
    return tf.cond(x[0, 0] > 0, lambda: tf.sort(noise(x), axis=0), lambda: rows)


def in_a_loop(x):
    return tf.while_loop(
        lambda n, rows: n < 3,
        lambda n, rows: (n + 1, tf.sort(noise(x) + rows, axis=0)),
        (0, noise(x)),
    )[1]


@pytest.mark.parametrize(
    ("function", "in_rows"),
    [
        (noise, True),
        (lambda x: noise(x, tf.random.stateless_truncated_normal), True),
        (integers, True),
        # Numbers that may serve to shuffle the batch, and numbers that belong to no examples.
        (lambda x: tf.random.stateless_uniform([tf.shape(x)[0]], SEED), False),
        (lambda x: tf.random.stateless_uniform([4, 3], SEED), False),
        # An operation needs all of them.
        (lambda x: tf.gather(integers(x), [1, 0]), None),
        (lambda x: tf.sort(noise(x, tf.random.stateless_truncated_normal), axis=0), None),
        (in_a_branch, None),
        (in_a_loop, None),
    ],
)
@pytest.mark.parametrize("counts", [(3, 2), (2, 0, 1)])
def test_draws_for_examples_are_split_into_rows(function, in_rows, counts):
    """The same bits as on one device."""
    split = Simulation(function, [ROWS], len(counts))
    x = np.ones((sum(counts), 6), "float32")
    (found,) = split(counts, x)
    np.testing.assert_array_equal(found, function(tf.constant(x)))
    (layout,) = split.outcome.layouts
    assert in_rows is None or isinstance(layout, Rows) == in_rows


def test_a_stateful_draw_is_made_once_for_all_replicas():
    """Replicas get rows of the same draw, and new numbers in the next step."""
    # With the seed that other tests set, each run of the simulation would draw the same.
    tf.random.set_seed(None)
    split = Simulation(lambda x: tf.random.normal([tf.shape(x)[0], 3]), [ROWS], 2)
    x = np.ones((5, 6), "float32")
    (first,), (second,) = split((3, 2), x), split((3, 2), x)
    assert first.shape == (5, 3)
    assert isinstance(split.outcome.layouts[0], Rows)
    assert len(np.unique(np.concatenate([first, second]))) == 30


def test_stateful_resources_are_read_once_for_all_replicas():
    """An iterator, and a table that the step changes."""
    numbers = iter(tf.data.Dataset.range(10, output_type=tf.float32))
    visits = tf.lookup.experimental.MutableHashTable(tf.int32, tf.float32, 0.0)

    def step(x):
        kinds = tf.cast(x[:, 0], tf.int32)
        before = visits.lookup(kinds)
        visits.insert(kinds, before + 1.0)
        return next(numbers), before, visits.lookup(kinds)

    split = Simulation(step, [ROWS], 2)
    x = np.repeat(np.arange(5, dtype="float32")[:, None], 6, axis=1)
    for number in range(2):
        drawn, before, after = split((3, 2), x)
        assert drawn == number
        np.testing.assert_array_equal([before, after], [[number] * 5, [number + 1] * 5])


@pytest.mark.parametrize("low", [5, -300, 2**63 - 7])
def test_a_generator_is_advanced_by_its_draws(low):
    """The lower half of its 128-bit counter may overflow."""
    generator = tf.random.Generator.from_state([low, 3, 11], alg="philox")
    before = tf.identity(generator.state)
    generator.normal([2, 3])
    np.testing.assert_array_equal(skip_ahead(before, tf.constant(6, tf.uint64)), generator.state)
