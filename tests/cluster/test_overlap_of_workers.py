"""Workers exchange sums while the backward pass still runs, even with a single core."""

from pathlib import Path

import pytest
from worker_processes import run_workers

SCRIPT = Path(__file__).with_name("overlapping_worker.py")


@pytest.mark.in_test_all("test_overlap.py shows it in one process")
def test_the_first_sum_is_over_before_the_backward_pass_ends(tmp_path):
    """A single thread would finish the backward pass first, and sum only then."""
    run_workers(SCRIPT, 2, [tmp_path])
    assert min(float((tmp_path / name).read_text()) for name in "01") > 0
