"""What workers decide together: from what all of them have said, after the same step."""

import pytest

from keras_multigpu.callbacks.resumable_checkpoint.ending import Together
from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder


class Workers:
    """A group of two processes, seen from one of them; the other says what the test says."""

    is_spread = True

    def __init__(self, is_chief, *others):
        self.is_chief = is_chief
        self.others = list(others)
        self.exchanges = 0

    def of_processes(self, numbers):
        self.exchanges += 1
        rows = [list(numbers), self.others.pop(0)]
        return rows if self.is_chief else rows[::-1]


class OneProcess:
    is_chief, is_spread = True, False


def test_one_process_asks_nobody():
    together = Together(OneProcess())
    assert together.asked(15, False) == (15, False)
    assert together.asked(None, True) == (None, True)


@pytest.mark.parametrize("is_chief", [True, False])
def test_a_signal_counts_whoever_it_has_reached(is_chief):
    assert Together(Workers(is_chief, [0, 0, 1])).asked(15, False) == (15, False)
    assert Together(Workers(is_chief, [15, 0, 1])).asked(None, False) == (15, False)


def test_the_clock_of_the_chief_decides():
    assert Together(Workers(True, [0, 0, 1])).asked(None, True) == (None, True)
    assert Together(Workers(False, [0, 0, 1])).asked(None, True) == (None, False)
    assert Together(Workers(False, [0, 1, 1])).asked(None, False) == (None, True)


def test_workers_ask_after_as_many_steps_as_the_chief_says():
    """A signal waits for it, unless an epoch ends."""
    group = Workers(False, [0, 0, 3], [0, 0, 5], [0, 0, 5])
    together = Together(group)
    assert together.asked(None, False) == (None, False)
    assert [together.asked(15, False) for _ in range(3)] == [(None, False)] * 2 + [(15, False)]
    assert together.asked(15, False, now=True) == (15, False)
    assert group.exchanges == 3


def test_all_go_on_from_what_the_chief_has_found(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    assert Together(Workers(True, [-1, 0, 0])).newest(folder) == (None, None)
    assert Together(Workers(False, [-1, 0, 0])).newest(folder) == (None, None)
    with pytest.raises(ValueError, match="Expected a folder that all workers can read"):
        Together(Workers(False, [7, 0, 0])).newest(folder)
