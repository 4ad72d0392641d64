"""The estimated end of training, by a clock that the tests advance."""

import time

import pytest
from test_throughput_report import throughput_of

from keras_multigpu.callbacks.throughput_report.report import time_of_day
from keras_multigpu.callbacks.throughput_report.throughput_report import EndTime
from keras_multigpu.callbacks.timing import Timing, no_sums


class Told:
    """A clock that only the tests advance."""

    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def ends(clock, seconds, epochs, steps=10, resumed_at=0):
    """The estimates after epochs of these durations."""
    end_time, found = EndTime(clock), []
    for number, each in enumerate(seconds):
        end_time.begin_epoch(0 if number else resumed_at)
        clock.now += each
        found.append(end_time.after(steps, epochs - number - 1))
    return found


def test_the_first_epoch_counts_only_until_the_second():
    """It takes 100 s because it compiles; the others take 10, 14 and 12."""
    first, *others = ends(Told(), [100, 10, 14, 12], 5)
    assert first == 1100 + 4 * 100
    assert others == [1110 + 3 * 10, 1124 + 2 * 12, 1136 + 12]


def test_time_between_epochs_counts():
    """Epochs take ten seconds, and a checkpoint after each two."""
    clock = Told()
    end_time = EndTime(clock)
    for _ in range(3):
        end_time.begin_epoch(0)
        clock.now += 10
        found = end_time.after(5, 4)
        clock.now += 2
    assert found == 1034 + 4 * (10 + 2 + 10) / 2


def test_the_rest_of_a_resumed_epoch_counts_as_a_part():
    """Eight of ten steps were done before; the other two take four seconds."""
    assert ends(Told(), [4, 20, 22], 5, resumed_at=8) == [
        pytest.approx(1004 + 4 * 20),
        1024 + 3 * 20,
        1046 + 2 * 21,
    ]
    # Only the end of the epoch was left.
    assert ends(Told(), [1, 20, 30], 4, resumed_at=10) == [None, 1021 + 2 * 20, 1051 + 30]


def test_the_end_on_another_day_has_a_date():
    noon = time.mktime((2026, 11, 26, 12, 0, 0, 0, 0, -1))
    assert time_of_day(noon + 7800, noon) == "14:10"
    assert time_of_day(noon + 86400, noon) == "2026-11-27 12:00"


def test_the_end_is_printed_while_epochs_remain():
    timing = Timing(1.0, 0.0, 1.0, 2, no_sums(1))
    found = throughput_of(11, ["CPU:0"], timing)._replace(epochs=40)
    assert str(found).splitlines()[0] == (
        "Throughput of epoch 12 of 40 (2 steps, compiling left out)"
    )
    later = time.time() + 10 * 86400
    line = str(found._replace(ends=later)).splitlines()[0]
    assert line.endswith(f"left out); ends about {time_of_day(later, 0)}")
