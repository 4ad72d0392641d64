"""Random numbers for each image of a batch, as a function of that image's two seeds.

A batch's images must not share a stream of numbers: what an image gets would depend on its
neighbours, and so on how the batch was split over replicas. So each number is a hash of
`(seed, seed, which number)`, in integer arithmetic that is the same on every device.
`tf.random.stateless_uniform` takes one seed for a whole call, and mapping it over images would
cost a call for each.
"""

import tensorflow as tf

from keras_multigpu.seeded_layers import folded, hashed

# How many numbers are hashed together; a layer draws about as many.
_BLOCK = 16


class Draws:
    """The random numbers of each image of a batch, one after another.

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
        # The product may be rounded up to the limit itself.
        return tf.cast(tf.minimum(tf.floor(self.numbers() * limit), limit - 1), tf.int32)

    def happens(self, probability: float | tf.Tensor) -> tf.Tensor:
        """Whether an event of this probability happens, `bool[n]`."""
        return self.numbers() < probability

    def normal(self) -> tf.Tensor:
        """Normally distributed numbers of mean 0 and deviation 1, `float32[n]`."""
        # The method of Box and Muller. A number may be zero, but never one.
        radius = tf.sqrt(-2 * tf.math.log1p(-self.numbers()))
        return radius * tf.cos(2 * 3.141592653589793 * self.numbers())


def unit_numbers(seeds: tf.Tensor, first: int, count: int) -> tf.Tensor:
    """Numbers from zero to below one, `float32[n, count]`; the `first`-th of each image onwards."""
    hashes = hashed(seeds, tf.range(first, first + count, dtype=tf.int32)[None])
    # 24 bits are what a float32 holds exactly; with more of them some numbers would round to one.
    return tf.cast(tf.bitwise.right_shift(hashes, tf.constant(8, tf.uint32)), tf.float32) * 2.0**-24


def seeds_of(state: tf.Tensor, count: int | tf.Tensor) -> tf.Tensor:
    """The seeds of a batch's images from the two integers that a `SeedGenerator`'s `next` gives."""
    state = tf.reshape(tf.cast(state, tf.int32), (1, 2))
    rows = tf.range(tf.cast(count, tf.int32))[:, None]
    return folded(tf.repeat(state, count, axis=0), rows)
