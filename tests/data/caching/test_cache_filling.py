"""Filling a cache, and showing the progress."""

import logging
import sys
import time

import numpy as np
import pytest
from numbered_examples import Numbers

from keras_multigpu.data.caching import filling
from keras_multigpu.data.caching.filling import fill
from keras_multigpu.writing import size_text


def test_sizes_are_written_briefly():
    sizes = [0, 80, 1024, 1536 * 2**20, 226.4 * 2**20, 3000 * 2**40]
    texts = ["0 bytes", "80 bytes", "1.0 KiB", "1.5 GiB", "226 MiB", "3,000 TiB"]
    assert [size_text(size) for size in sizes] == texts


def fill_ten_pieces():
    fill(Numbers(100), np.arange(100), "here", lambda low, high: None)


def test_short_work_shows_no_progress(capsys, caplog, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with caplog.at_level(logging.INFO, "keras_multigpu"):
        fill_ten_pieces()
    assert caplog.messages == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_long_work_shows_its_progress(capsys, caplog, monkeypatch, terminal):
    monkeypatch.setattr(filling, "QUIET_SECONDS", 0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with caplog.at_level(logging.INFO, "keras_multigpu"):
        fill_ten_pieces()
    assert caplog.messages == [
        "Caching 100 examples of numbers here (800 bytes).",
        "Cached 100 examples in 0 s.",
    ]
    assert ("100/100" in capsys.readouterr().out) == terminal


def test_after_an_error_no_further_piece_is_read():
    read = []

    def fail(low, high):
        read.append(low)
        if low:
            time.sleep(0.1)  # Reading all of the others would take many seconds.
        else:
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match="the disk is gone"):
        fill(Numbers(100_000), np.arange(100_000), "here", fail)
    assert len(read) < 100_000 // filling.PIECE_EXAMPLES
