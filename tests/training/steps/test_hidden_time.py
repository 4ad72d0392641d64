"""How long sums travelled while a replica still computed."""

import pytest
import tensorflow as tf

from keras_multigpu.training.watching.stopwatch import time_within


@pytest.mark.parametrize(
    ("begun", "ended", "until", "expected"),
    [
        ([1.0], [3.0], 1.0, 0.0),
        ([1.0, 4.0], [3.0, 6.0], 5.0, 3.0),
        # The second has waited for the first.
        ([1.0, 2.0, 7.0], [4.0, 5.0, 9.0], 7.0, 4.0),
    ],
)
def test_overlapping_times_count_once(begun, ended, until, expected):
    begun, ended = (list(map(tf.constant, times)) for times in (begun, ended))
    assert float(time_within(begun, ended, tf.constant(until))) == expected
