"""How a global batch is shared, by hand."""

import pytest
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds, shares, smaller

SHARES = [
    # The global batch, the number of replicas, each replica's (start, stop).
    (8, 1, [(0, 8)]),
    (8, 2, [(0, 4), (4, 8)]),
    # The first replicas take the rest, one example each.
    (10, 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
    (7, 3, [(0, 3), (3, 5), (5, 7)]),
    # With fewer examples than replicas, the last replicas get an empty share.
    (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
    (0, 2, [(0, 0), (0, 0)]),
    (9, 8, [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)]),
]


@pytest.mark.parametrize(("global_batch_size", "replicas", "expected"), SHARES)
def test_shares_of_integers(global_batch_size, replicas, expected):
    """Shares are contiguous, in replica order, and differ by at most one example."""
    assert shares(global_batch_size, replicas) == expected


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize(("global_batch_size", "replicas", "expected"), SHARES)
def test_share_bounds_of_tensors(global_batch_size, replicas, expected, dtype):
    """A batch size and a replica number known only in the step give the same answers."""
    size = tf.constant(global_batch_size, dtype)
    for replica, bounds in enumerate(expected):
        start, stop = share_bounds(size, tf.constant(replica, dtype), replicas)
        assert (int(start), int(stop)) == bounds
        assert start.dtype == stop.dtype == dtype


def test_share_bounds_inside_a_traced_function():
    @tf.function(
        input_signature=[tf.TensorSpec((), tf.int32), tf.TensorSpec((), tf.int32)], jit_compile=True
    )
    def bounds(size, replica):
        return share_bounds(size, replica, 4)

    assert [tuple(map(int, bounds(10, replica))) for replica in range(4)] == [
        (0, 3),
        (3, 6),
        (6, 8),
        (8, 10),
    ]


@pytest.mark.parametrize(
    ("first", "second", "expected"), [(1, 2, 1), (2, 1, 1), (3, 3, 3), (0, 5, 0), (-1, 1, -1)]
)
def test_smaller(first, second, expected):
    assert smaller(first, second) == expected
    assert int(smaller(tf.constant(first), second)) == expected
    assert int(smaller(first, tf.constant(second))) == expected
    assert int(smaller(tf.constant(first), tf.constant(second))) == expected
