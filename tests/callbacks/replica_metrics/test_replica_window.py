"""Which replica stays behind, by hand."""

import numpy as np
import pytest

from keras_multigpu.callbacks.replica_metrics.window import Place, Window, behind


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
def test_behind_is_who_is_slower_than_the_median_of_the_others(times, expected):
    """By the factor 1.25."""
    place = Place([0, 1, 2], ["GPU:0"] * 3)
    window = Window(0, 1, place, {"compute_time": np.array(times), "step_time": np.array(times)})
    found = behind(window, 1.25, None)
    if expected is None:
        assert found is None
    else:
        assert (found.replica, found.factor) == expected
        assert (found.worker, found.windows) == (2, 1)
        assert behind(window, 1.25, found).windows == 2
