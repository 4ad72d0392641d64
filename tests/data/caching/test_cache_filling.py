"""How caches are filled, and what is seen of it."""

import logging
import sys

import pytest

from keras_multigpu.data.caching import filling as cache_filling
from keras_multigpu.data.caching.filling import Piece, in_pieces, shown
from keras_multigpu.writing import size_text


def test_sizes_are_said_in_short():
    sizes = [0, 80, 1024, 1536 * 2**20, 226.4 * 2**20, 3000 * 2**40]
    texts = ["0 bytes", "80 bytes", "1.0 KiB", "1.5 GiB", "226 MiB", "3,000 TiB"]
    assert [size_text(size) for size in sizes] == texts


def pieces_of_ten():
    return iter([Piece(low, low + 10, []) for low in range(0, 100, 10)])


def test_short_work_is_quiet(capsys, caplog, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with caplog.at_level(logging.INFO, "keras_multigpu"):
        assert len(list(shown(pieces_of_ten(), 100, "Caching."))) == 10
    assert caplog.messages == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_long_work_shows_how_far_it_is(capsys, caplog, monkeypatch, terminal):
    monkeypatch.setattr(cache_filling, "QUIET_SECONDS", 0)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    with caplog.at_level(logging.INFO, "keras_multigpu"):
        assert len(list(shown(pieces_of_ten(), 100, "Caching."))) == 10
    assert caplog.messages == ["Caching.", "Cached 100 examples in 0 s."]
    out = capsys.readouterr().out
    assert ("100/100" in out) == terminal


def test_pieces_that_are_not_wanted_any_more_are_not_read():
    read = []
    pieces = in_pieces(lambda low, high: read.append(low) or [], 1_000_000, 1)
    assert next(pieces) == (0, 256, [])
    pieces.close()
    assert len(read) < 100
