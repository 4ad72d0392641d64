"""Efficiency, the first limit, table and picture, of turns whose figures are written by hand."""

import io

import numpy as np
import pytest

from keras_multigpu.scaling.report import (
    GLOBAL,
    NO_MEMORY,
    REPLICA,
    first_limit,
    picture_of,
    rows_of,
    table_of,
)


def turn(batch, step, **parts):
    """A turn of ten steps: the milliseconds of a step and of its parts; the rest is the host's."""
    parts = {"data_wait": 0, "compute": 0, "all_reduce": 0} | parts
    parts["host"] = step - sum(parts.values())
    return {
        "batch": batch,
        "steps": 10,
        "step_time": step / 1e3,
        "examples_per_second": 1e3 * batch / step,
        "parts": {name: 10 * each / 1e3 for name, each in parts.items()},
        "peak_memory": [0, 2**20],
        "bytes": 2048,
        "alone": None,
        "tries": {name: f"less {name}" for name in parts},
    }


ONE = turn(64, 100, compute=90)


def test_efficiency_is_the_median_of_the_rounds_ratios():
    """32 examples a second and more of two, against 20 of one in each round: 0.8 and so on."""
    rounds = {1: [turn(2, 100)] * 3, 2: [turn(4, step) for step in (125, 100, 200)]}
    first, two = rows_of(rounds)
    assert first.efficiency == (1, 1, 1)
    assert two.efficiency == pytest.approx((0.8, 0.5, 1))
    assert two.step == pytest.approx(0.125)
    assert two.rate == pytest.approx(32)


def test_with_the_global_batch_fixed_half_a_step_is_perfect():
    (_, two) = rows_of({1: [ONE], 2: [turn(64, 50, compute=45)]})
    assert two.efficiency[0] == pytest.approx(1)


def test_the_fewest_replicas_need_not_be_one():
    """Four take 60 ms where two take 100 and perfect ones 50."""
    (_, four) = rows_of({2: [ONE], 4: [turn(64, 60, compute=45)]})
    assert four.efficiency[0] == pytest.approx(5 / 6)


LIMITS = {
    # Perfect are 45 ms of compute and 5 of the host.
    "sums": (GLOBAL, turn(64, 70, compute=45, all_reduce=20), "sums: on 2 replicas 20.0 ms of "),
    "host": (
        GLOBAL,
        turn(64, 70, compute=45),
        "the host (Python, dispatch, update): on 2",
    ),
    # Perfect are 90 ms of compute and 10 of the host.
    "data": (
        REPLICA,
        turn(128, 150, compute=90, data_wait=50),
        "waiting for data: on 2 replicas 50",
    ),
    "compute": (
        REPLICA,
        turn(128, 140, compute=130),
        "the devices themselves: on 2 replicas 40.0 ms",
    ),
    "none": (REPLICA, turn(128, 105, compute=90), "none up to 2 replicas."),
    "memory": (REPLICA, {"failed": NO_MEMORY}, "memory, which ran out on 2 replicas; try `compile"),
    "failure": (REPLICA, {"failed": "no"}, "unknown, since 2 replicas failed: no"),
    "alone": (
        GLOBAL,
        turn(64, 100) | {"alone": "of a reason."},
        "the step: one replica takes the whole batch, because of a reason.",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_first_limit_is_what_takes_most_beyond_perfect_scaling(name):
    fixed, two, expected = LIMITS[name]
    rows = rows_of({1: [ONE], 2: [two]})
    assert first_limit(fixed, rows, shares_cores=False).startswith(expected)


def test_a_limit_says_what_to_try():
    rows = rows_of({1: [ONE], 2: [turn(64, 70, compute=45, all_reduce=20)]})
    assert first_limit(GLOBAL, rows, True).endswith("beyond perfect scaling; try less all_reduce.")
    rows = rows_of({1: [ONE], 2: [turn(64, 100, compute=90)]})
    assert first_limit(GLOBAL, rows, True).endswith(
        "they share the machine's cores, so try it on GPUs."
    )


def test_the_first_of_several_limits_counts():
    """Two replicas wait for data; that four wait for sums comes later."""
    two, four = turn(64, 80, compute=45, data_wait=30), turn(64, 90, compute=22, all_reduce=60)
    assert "data: on 2" in first_limit(GLOBAL, rows_of({1: [ONE], 2: [two], 4: [four]}), False)


def test_the_table_has_a_line_for_each_number_and_says_why_one_is_missing():
    lines = table_of(rows_of({1: [ONE], 2: [turn(64, 70, all_reduce=20)], 4: [{"failed": "no"}]}))
    assert lines[2:] == [
        "| 1 | 64 | 100.0 | 640 | 1.00 (1.00–1.00) | 0.0 | 90.0 | 0.0 | 10.0 | 1.0 MiB | 2.0 KiB |",
        "| 2 | 64 | 70.0 | 914 | 0.71 (0.71–0.71) | 0.0 | 0.0 | 20.0 | 50.0 | 1.0 MiB | 2.0 KiB |",
        "| 4 | no |  |  |  |  |  |  |  |  |  |",
    ]
    assert {line.count("|") for line in lines} == {12}


def test_the_picture_shows_the_speeds_and_the_parts():
    """Bars are stacked: those of two replicas end at 70 ms."""
    rows = rows_of({1: [ONE], 2: [turn(64, 70, compute=45, all_reduce=20)]})
    figure = picture_of({GLOBAL: rows, REPLICA: rows}, "title")
    speeds, bars, _ = figure.axes
    assert speeds.lines[0].get_ydata() == pytest.approx([1, 10 / 7])
    tops = [patch.get_y() + patch.get_height() for patch in bars.patches]
    assert max(tops[1::2]) == pytest.approx(70)
    file = io.BytesIO()
    figure.savefig(file, format="png")
    assert np.frombuffer(file.getvalue(), np.uint8).size > 1000
