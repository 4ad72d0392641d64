"""All workers decide together, after the same step."""

import pytest

from keras_multigpu.callbacks.resumable_checkpoint.ending import Consensus
from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder


class Workers:
    """A group of two processes, seen from one of them; the test speaks for the other."""

    is_spread = True

    def __init__(self, is_chief, *others):
        self.is_chief = is_chief
        self.others = list(others)
        self.exchanges = 0

    def exchange_numbers(self, numbers):
        self.exchanges += 1
        rows = [list(numbers), self.others.pop(0)]
        return rows if self.is_chief else rows[::-1]


class OneProcess:
    is_chief, is_spread = True, False


def test_one_process_asks_nobody():
    workers = Consensus(OneProcess())
    assert workers.poll(15, False) == (15, False)
    assert workers.poll(None, True) == (None, True)


@pytest.mark.parametrize("is_chief", [True, False])
def test_a_signal_to_any_worker_counts(is_chief):
    assert Consensus(Workers(is_chief, [0, 0, 1])).poll(15, False) == (15, False)
    assert Consensus(Workers(is_chief, [15, 0, 1])).poll(None, False) == (15, False)


def test_the_clock_of_the_chief_decides():
    assert Consensus(Workers(True, [0, 0, 1])).poll(None, True) == (None, True)
    assert Consensus(Workers(False, [0, 0, 1])).poll(None, True) == (None, False)
    assert Consensus(Workers(False, [0, 1, 1])).poll(None, False) == (None, True)


def test_the_chief_says_after_how_many_steps_workers_ask():
    """A signal waits until then, or for the end of the epoch."""
    group = Workers(False, [0, 0, 3], [0, 0, 5], [0, 0, 5])
    workers = Consensus(group)
    assert workers.poll(None, False) == (None, False)
    assert [workers.poll(15, False) for _ in range(3)] == [(None, False)] * 2 + [(15, False)]
    assert workers.poll(15, False, now=True) == (15, False)
    assert group.exchanges == 3


def test_all_workers_resume_from_what_the_chief_found(tmp_path):
    folder = CheckpointFolder(tmp_path, keep=1)
    assert Consensus(Workers(True, [-1, 0])).newest(folder) == (None, None)
    assert Consensus(Workers(False, [-1, 0])).newest(folder) == (None, None)
    with pytest.raises(ValueError, match="Expected a folder that all workers can read"):
        Consensus(Workers(False, [7, 0])).newest(folder)
