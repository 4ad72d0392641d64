"""Files are complete or missing, and only one process at a time fills a folder."""

import logging
import multiprocessing
import os

import pytest
from helpers.processes_left import PATIENCE

from keras_multigpu.writing import one_at_a_time, require_writable, size_text, write_whole


def test_a_file_is_replaced_once_it_is_complete(tmp_path):
    """Until then readers see the old file; afterwards no partial file is left."""
    path = tmp_path / "new" / "notes.txt"
    for text in ("one", "two"):
        with write_whole(path) as partial:
            partial.write_text(text)
            assert not path.exists() or path.read_text() == "one"
    assert path.read_text() == "two"
    assert list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), write_whole(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unwritable_path_is_refused_early(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"The file cannot be written: .*Received: path="):
        require_writable(tmp_path / "file" / "notes.txt")
    with pytest.raises(ValueError, match=r"The file cannot be written: .*Received: path="):
        require_writable(tmp_path / "a\0b")
    require_writable(tmp_path / "new" / "notes.txt")
    assert list((tmp_path / "new").iterdir()) == []


def test_a_link_in_place_of_the_unfinished_file_is_not_followed(tmp_path):
    path, other = tmp_path / "notes.txt", tmp_path / "other.txt"
    other.write_text("of somebody else")
    (tmp_path / f".notes.txt.{os.getpid()}").symlink_to(other)
    with write_whole(path) as partial:
        partial.write_text("mine")
    assert path.read_text() == "mine"
    assert other.read_text() == "of somebody else"


def hold(lock, held, wanted):
    """Hold a lock until another process wants it."""
    with one_at_a_time(lock, "holds it"):
        held.set()
        assert wanted.wait(PATIENCE)
        (lock.parent / "over").touch()


def test_a_lock_waits_for_another_process_and_logs_it(tmp_path, caplog, monkeypatch):
    caplog.set_level("INFO", "keras_multigpu")
    context = multiprocessing.get_context("spawn")
    held, wanted = context.Event(), context.Event()
    other = context.Process(target=hold, args=(tmp_path / "a" / "lock", held, wanted))
    other.start()
    assert held.wait(PATIENCE)

    def let_go(record):
        """Release the lock as soon as this process logs that it waits."""
        wanted.set()
        return True

    monkeypatch.setattr(logging.getLogger("keras_multigpu"), "filters", [let_go])
    with one_at_a_time(tmp_path / "a" / "lock", "fills the folder"):
        assert (tmp_path / "a" / "over").exists()
    assert caplog.messages == ["Another process fills the folder; waiting for it."]
    other.join(PATIENCE)
    assert other.exitcode == 0


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (2**40, "1.0 TiB")],
)
def test_sizes_are_written_with_binary_units(number, text):
    assert size_text(number) == text
