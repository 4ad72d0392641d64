"""Random numbers depend on an image's own seeds alone."""

import numpy as np
import tensorflow as tf

from keras_multigpu.augmentation import Draws

# Seeds that differ as little as possible.
NEIGHBOURS = tf.stack([tf.fill([20_000], 7), tf.range(20_000)], axis=1)


def numbers_of(seeds, count):
    draws = Draws(seeds)
    return np.stack([draws.numbers() for _ in range(count)], axis=1)


def hash_by_hand(first, second, number):
    """The hash of `seeded_layers.hash_words` in Python's integers."""

    def mixed(word):
        for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):
            word = ((word ^ (word >> shift)) * factor) % 2**32
        return word ^ (word >> 15)

    number = number * 0x9E3779B9 % 2**32
    word = mixed((first + number) % 2**32) ^ second
    return mixed((mixed(word) + number) % 2**32)


def test_numbers_are_the_hash_of_two_seeds_and_a_position():
    """The expected integers are computed here, so later versions have to draw the same."""
    numbers = numbers_of(tf.constant([[3, 5], [-1, 2**31 - 1]]), 17)[:, 14:]
    expected = [
        [(hash_by_hand(a, b, k) >> 8) / 2**24 for k in (14, 15, 16)]
        for a, b in ((3, 5), (2**32 - 1, 2**31 - 1))
    ]
    np.testing.assert_array_equal(numbers, expected)


def test_numbers_of_neighbouring_seeds_are_uniform_and_unrelated():
    numbers = numbers_of(NEIGHBOURS, 16)
    assert 0 <= numbers.min() and numbers.max() < 1
    counts = np.stack([np.histogram(column, 10, (0, 1))[0] for column in numbers.T])
    np.testing.assert_allclose(counts, 2000, atol=200)
    related = np.corrcoef(numbers.T) - np.eye(16)
    assert np.abs(related).max() < 0.03
    assert abs(np.corrcoef(numbers[1:, 0], numbers[:-1, 0])[0, 1]) < 0.03


def test_draws_keep_to_their_limits():
    draws = Draws(NEIGHBOURS)
    uniform = draws.uniform(-2.0, 3.0).numpy()
    assert -2 <= uniform.min() < -1.99 and 2.99 < uniform.max() < 3
    np.testing.assert_allclose(np.bincount(draws.integers(4)), 5000, atol=250)
    np.testing.assert_allclose(np.mean(draws.happens(0.3)), 0.3, atol=0.015)
    assert not np.any(draws.happens(0.0)) and np.all(draws.happens(1.0))
    normal = draws.normal().numpy()
    np.testing.assert_allclose([normal.mean(), normal.std()], [0, 1], atol=0.03)
    assert np.all(np.isfinite(normal))


def test_draws_are_the_same_when_compiled():
    def draw(seeds):
        return Draws(seeds).uniform(0.0, 8.0)

    compiled = tf.function(draw, jit_compile=True)
    np.testing.assert_array_equal(compiled(NEIGHBOURS), draw(NEIGHBOURS))
