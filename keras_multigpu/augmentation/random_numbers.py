"""Random numbers for each image of a batch, computed from that image's two seeds.

If images shared a stream of numbers, what an image gets would depend on its neighbours, and so on
how the batch is split over replicas. So each number is a hash of (seed, seed, position in the
stream), in integer arithmetic that gives the same on every device. `tf.random.stateless_uniform`
takes one seed for a whole call, and would need a call for each image.
"""

import numpy as np
import tensorflow as tf

from keras_multigpu.seeded_layers import fold_seeds, hash_words

# How many numbers of an image are hashed at once; most layers draw no more.
_BLOCK = 16


class Draws:
    """A stream of random numbers for each image of a batch.

    The same calls in the same order with the same seeds give the same numbers.

    Args:
        seeds: `int32[n, 2]`, two integers for each image.
    """

    def __init__(self, seeds: tf.Tensor) -> None:
        self._seeds = seeds
        self._taken = 0
        self._block: list[tf.Tensor] = []

    def numbers(self) -> tf.Tensor:
        """Numbers from zero to below one, `float32[n]`."""
        place = self._taken % _BLOCK
        if place == 0:
            self._block = tf.unstack(unit_numbers(self._seeds, self._taken, _BLOCK), axis=1)
        self._taken += 1
        return self._block[place]

    def uniform(self, low: float | tf.Tensor, high: float | tf.Tensor) -> tf.Tensor:
        """Numbers from `low` to `high`, `float32[n]`."""
        return low + self.numbers() * (high - low)

    def integers(self, limit: int | tf.Tensor) -> tf.Tensor:
        """Integers from zero to below `limit`, `int32[n]`."""
        limit = tf.cast(limit, tf.float32)
        # Rounding may bring the product up to the limit itself.
        return tf.cast(tf.minimum(tf.floor(self.numbers() * limit), limit - 1), tf.int32)

    def happens(self, probability: float | tf.Tensor) -> tf.Tensor:
        """Draw whether an event of this probability happens, `bool[n]`."""
        return self.numbers() < probability

    def normal(self) -> tf.Tensor:
        """Normally distributed numbers of mean 0 and standard deviation 1, `float32[n]`."""
        # The method of Box and Muller. A number may be zero, but never one.
        radius = tf.sqrt(-2 * tf.math.log1p(-self.numbers()))
        return radius * tf.cos(2 * 3.141592653589793 * self.numbers())


def unit_numbers(seeds: tf.Tensor, first: int, count: int) -> tf.Tensor:
    """The numbers of each stream from position `first` on, `float32[n, count]`."""
    hashes = hash_words(seeds, tf.range(first, first + count, dtype=tf.int32)[None])
    # A float32 holds 24 bits exactly; with more, some numbers would round to one.
    return tf.cast(tf.bitwise.right_shift(hashes, tf.constant(8, tf.uint32)), tf.float32) * 2.0**-24


def seeds_of(state: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """The seeds of a batch's images, from the two integers that `SeedGenerator.next` returns."""
    state = tf.reshape(tf.cast(state, tf.int32), (1, 2))
    rows = tf.range(tf.cast(count, tf.int32))[:, None]
    return fold_seeds(tf.repeat(state, count, axis=0), rows)


def beta(draws: Draws, alpha: float) -> tf.Tensor:
    """Numbers from the distribution Beta(alpha, alpha), `float32[n]`."""
    # Exact and without rejection. A polar formula gives Student's t with 2 alpha degrees of freedom
    # (Bailey 1994, Mathematics of Computation 62); then `(1 + t / sqrt(2 alpha + t^2)) / 2` has
    # this distribution. It is rearranged so that numbers close to zero keep their digits.
    logarithm = tf.math.log1p(-draws.numbers()) / alpha
    cosine = tf.cos(2 * np.pi * draws.numbers())
    power, rest = tf.exp(logarithm), -tf.math.expm1(logarithm)
    total = tf.maximum(power + cosine**2 * rest, np.finfo(np.float32).tiny)
    smaller = 0.5 * (power / total) / (1 + tf.abs(cosine) * tf.sqrt(rest / total))
    return tf.where(cosine < 0, smaller, 1 - smaller)
