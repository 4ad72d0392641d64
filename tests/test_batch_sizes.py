"""How a global batch is divided among replicas, with shares worked out by hand."""

import pytest
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds, shares, smaller

SHARES = [
    # The global batch, the number of replicas, each replica's (start, stop).
    (8, 1, [(0, 8)]),
    (8, 2, [(0, 4), (4, 8)]),
    # The first replicas take the remaining examples, one each.
    (10, 4, [(0, 3), (3, 6), (6, 8), (8, 10)]),
    (7, 3, [(0, 3), (3, 5), (5, 7)]),
    # With fewer examples than replicas, the last replicas get an empty share.
    (2, 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
    (0, 2, [(0, 0), (0, 0)]),
    (9, 8, [(0, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 9)]),
]


@pytest.mark.parametrize(("global_batch_size", "replicas", "expected"), SHARES)
def test_shares_are_contiguous_and_differ_by_at_most_one_example(
    global_batch_size, replicas, expected
):
    """They follow the order of the replicas."""
    assert shares(global_batch_size, replicas) == expected


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
@pytest.mark.parametrize(("global_batch_size", "replicas", "expected"), SHARES)
def test_sizes_known_only_in_the_step_give_the_same_shares(
    global_batch_size, replicas, expected, dtype
):
    size = tf.constant(global_batch_size, dtype)
    for replica, bounds in enumerate(expected):
        start, stop = share_bounds(size, tf.constant(replica, dtype), replicas)
        assert (int(start), int(stop)) == bounds
        assert start.dtype == stop.dtype == dtype


def test_share_bounds_compile_with_xla():
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
def test_the_smaller_number_is_found_among_integers_and_tensors(first, second, expected):
    assert smaller(first, second) == expected
    assert int(smaller(tf.constant(first), second)) == expected
    assert int(smaller(first, tf.constant(second))) == expected
    assert int(smaller(tf.constant(first), tf.constant(second))) == expected
