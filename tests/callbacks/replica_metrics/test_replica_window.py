"""Which replica lags behind, by hand."""

import numpy as np
import pytest

from keras_multigpu.callbacks.replica_metrics.window import Window, behind


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([1.0, 1.0, 1.6], (2, 1.6)),
        ([1.0, 1.0, 1.2], None),
        ([1.0, 1.6, 1.6], None),
        ([1.0], None),
        ([1.0, np.nan], None),
    ],
)
def test_a_replica_slower_than_the_median_of_the_others_is_behind(times, expected):
    """By the factor 1.25."""
    values = {"compute_time": np.array(times), "step_time": np.array(times)}
    window = Window(0, 1, [0, 1, 2], ["GPU:0"] * 3, values)
    found = behind(window, None)
    if expected is None:
        assert found is None
    else:
        assert (found.replica, found.factor) == expected
        assert (found.worker, found.windows) == (2, 1)
        assert behind(window, found).windows == 2


@pytest.mark.parametrize(("step_time", "expected"), [(1.0, 1), (11.9, 1), (12.1, None)])
def test_a_lag_that_is_a_small_part_of_a_step_does_not_count(step_time, expected):
    """0.6 seconds are 5% of 12."""
    values = {"compute_time": np.array([1.0, 1.6]), "step_time": np.full(2, step_time)}
    found = behind(Window(0, 1, [0, 0], ["GPU:0", "GPU:1"], values), None)
    assert (found and found.replica) == expected
