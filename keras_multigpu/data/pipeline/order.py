"""The example at each position of an epoch, and its batches: arithmetic on (seed, epoch, position).

A full shuffle without a list: each position goes through a few rounds of a Feistel network over
`a * b >= length` numbers, keyed by seed and epoch. So every worker computes any part of any epoch
in constant time and memory, with the same result:

    Order(1_000_000, seed=1).examples(epoch=7, positions=np.array([999_999]))

With `classes`, every class appears equally often. Positions then come in blocks with each class
once, so that any run of positions (a batch, or a replica's part of it) has equally many examples of
each class, give or take one.

`tf.random.experimental.index_shuffle` takes one length for all positions, but classes differ in
length; it may change between versions, but checkpoints depend on the order; and it is no faster.
"""

from typing import NamedTuple

import numpy as np

from keras_multigpu.batch_sizes import share_bounds

# Four rounds look random for long lists; short ones need more.
ROUNDS = 8


class Order:
    """The order of the examples in every epoch; with `classes`, all are equally frequent."""

    def __init__(
        self,
        num_examples: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        classes: np.ndarray | None = None,
    ) -> None:
        self.seed = seed
        self.shuffle = shuffle
        self._classes = None if classes is None else Classes(classes)
        # The number of positions in an epoch.
        self.length = num_examples if self._classes is None else self._classes.length

    def examples(self, epoch: int, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The examples at some positions, and how often each has already occurred in this epoch.

        The latter is zero unless classes are balanced.
        """
        positions = np.asarray(positions, np.int64)
        if positions.size and not 0 <= positions.min() <= positions.max() < self.length:
            raise IndexError(f"Positions must lie from 0 to {self.length - 1}.")
        if self._classes is not None:
            key = hashed(self.seed, epoch) if self.shuffle else None
            return self._classes.examples(key, positions)
        examples = positions
        if self.shuffle:
            examples = shuffled(positions, self.length, hashed(self.seed, epoch))
        return examples, np.zeros_like(positions)


class Classes:
    """Positions at which each class appears equally often.

    Every class appears as often as the largest class has examples. It goes through all its
    examples before it starts again in a new order, so the counts of its examples differ by at most
    one within an epoch.
    """

    def __init__(self, classes: np.ndarray) -> None:
        _, places, self._sizes = np.unique(classes, return_inverse=True, return_counts=True)
        self._members = np.argsort(places, kind="stable")
        self._starts = np.cumsum(self._sizes) - self._sizes
        self.length = len(self._sizes) * int(self._sizes.max(initial=0))

    def examples(
        self, key: np.ndarray | None, positions: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """As `Order.examples`; unshuffled without a key."""
        block, which = np.divmod(positions, len(self._sizes))
        if key is not None:
            # 1 and 2 here, 3 in `draw_seeds` and 4 in streams make the hashes independent.
            which = shuffled(which, len(self._sizes), hashed(key, 1, block))
        size = self._sizes[which]
        repeat, member = np.divmod(block, size)
        if key is not None:
            member = shuffled(member, size, hashed(key, 2, which, repeat))
        return self._members[self._starts[which] + member], repeat


def shuffled(positions: np.ndarray, length: int | np.ndarray, key: np.ndarray) -> np.ndarray:
    """The numbers at some positions of a shuffled `range(length)`.

    `length`, and the `key` that chooses the shuffle, may differ for each position.
    """
    positions, lengths, key = np.broadcast_arrays(positions, np.asarray(length, np.int64), key)
    numbers = permuted(positions, lengths, key)
    # Numbers past the end go through again until none is; the result is still one to one.
    outside = np.flatnonzero(numbers >= lengths)
    while outside.size:
        numbers[outside] = permuted(numbers[outside], lengths[outside], key[outside])
        outside = outside[numbers[outside] >= lengths[outside]]
    return numbers


def permuted(numbers: np.ndarray, lengths: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Permute the numbers below `a * b`, which is at least `lengths`."""
    # It exceeds `lengths` by less than `a`, about the square root. Of a million numbers, fewer than
    # one in a thousand fall past the end.
    a = np.sqrt(np.maximum(lengths - 1, 0)).astype(np.int64) + 1
    b = -(-lengths // a)
    left, right = np.divmod(numbers, b)
    for step in range(ROUNDS):
        if step % 2:
            right = (right + below(b, hashed(key, step, left))) % b
        else:
            left = (left + below(a, hashed(key, step, right))) % a
    return left * b + right


def below(limit: np.ndarray, hashes: np.ndarray) -> np.ndarray:
    # The bias towards small numbers is at most `limit / 2**64`.
    return (hashes % limit.astype(np.uint64)).astype(np.int64)


def hashed(*keys: int | np.ndarray) -> np.ndarray:
    """One 64-bit hash of several integers or arrays of them (the finalizer of SplitMix64)."""
    result = np.zeros((1,), np.uint64)
    for key in keys:
        number = np.uint64(key % 2**64) if isinstance(key, int) else key
        result = result + np.asarray(number).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        result = (result ^ (result >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        result = (result ^ (result >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        result = result ^ (result >> np.uint64(31))
    return result


def draw_seeds(seed: int, epoch: int, examples: np.ndarray, repeats: np.ndarray) -> np.ndarray:
    """Two 31-bit seeds for the random draws of each example; `int32[n, 2]`.

    They depend on seed, epoch and example alone (and on the repetition if classes are balanced), so
    they are the same on every worker and replica.
    """
    hashes = hashed(seed, epoch, 3, examples, repeats)
    halves = np.stack([hashes >> np.uint64(33), hashes & np.uint64(0x7FFFFFFF)], axis=-1)
    return halves.astype(np.int32)


class Place(NamedTuple):
    """Where a batch begins: `start` examples into an epoch."""

    epoch: int
    start: int


class Part(NamedTuple):
    """The rows of a batch that are read: those of consecutive shards.

    Attributes:
        first: The first shard.
        stop: One after the last shard.
        shards: The number of shards of a batch, as in `keras_multigpu.batch_sizes`.
        in_pairs: Whether rows 0 and 1, 2 and 3, and so on stay together, and an odd last row with
            the pair before it, so that layers can mix them.
    """

    first: int = 0
    stop: int = 1
    shards: int = 1
    in_pairs: bool = False

    def rows(self, size: int) -> tuple[int, int]:
        """The first row in a batch of this size, and the one after the last."""
        low = share_bounds(size, self.first, self.shards)[0]
        high = share_bounds(size, self.stop - 1, self.shards)[1]
        if self.in_pairs and high > low:
            # A batch of odd size ends with a group of three rows that stay together.
            if high == size and size % 2:
                low = min(low, max(size - 3, 0))
            low, high = low - low % 2, min(high + high % 2, size)
        return low, high


def steps_of(examples: int, batch_size: int, remainder: str) -> int:
    whole, rest = divmod(max(examples, 0), batch_size)
    return whole + (rest > 0 and remainder == "keep")


class Plan(NamedTuple):
    """The batches of all epochs."""

    order: Order
    global_batch_size: int
    remainder: str

    def steps(self, start: int = 0) -> int:
        """The number of batches from a position to the end of its epoch."""
        return steps_of(self.order.length - start, self.global_batch_size, self.remainder)

    def steps_until(self, first: Place, stop: int | None) -> int | None:
        """The number of batches from a place to an epoch; None if that never comes."""
        if stop is None:
            return None
        return self.steps(first.start) + (stop - first.epoch - 1) * self.steps()

    def place(self, first: Place, step: int) -> Place:
        """Where batch number `step` begins, counted from `first` on over all epochs."""
        in_first = self.steps(first.start)
        if step < in_first:
            return Place(first.epoch, first.start + step * self.global_batch_size)
        epochs, step = divmod(step - in_first, self.steps())
        return Place(first.epoch + 1 + epochs, step * self.global_batch_size)

    def positions(self, start: int, part: Part) -> np.ndarray:
        size = min(self.global_batch_size, self.order.length - start)
        low, high = part.rows(size)
        return np.arange(start + low, start + high, dtype=np.int64)

    def cuts(self, start: int, part: Part) -> np.ndarray:
        """The size of each batch of an epoch, and how many of its rows precede a part."""
        starts = start + self.global_batch_size * np.arange(self.steps(start), dtype=np.int64)
        sizes = np.minimum(self.global_batch_size, self.order.length - starts)
        # There are at most two sizes, so the bounds are computed at most twice.
        before = {size: part.rows(size)[0] for size in map(int, np.unique(sizes))}
        return np.stack([sizes, np.array([before[int(n)] for n in sizes], np.int64)], axis=1)

    def static_size(self, part: Part, start: int = 0) -> int | None:
        """The size of this part in every batch; None if it differs."""
        size = self.global_batch_size
        whole = self.order.length % size == 0 and (self.order.length - start) % size == 0
        if self.remainder == "keep" and not whole:
            return None
        low, high = part.rows(self.global_batch_size)
        return high - low
