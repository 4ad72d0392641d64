"""Caches in a folder, which processes share and which outlive them."""

import contextlib
import errno
import logging
import multiprocessing
import os
import resource
import shutil
import signal
import tempfile
import time
from collections import namedtuple
from pathlib import Path

import numpy as np
import pytest
from caching_processes import read
from helpers.processes_left import PATIENCE
from numbered_examples import Numbers, fill, numbers_of

from keras_multigpu.data import Batches


def test_other_settings_get_their_own_cache(tmp_path):
    for source in (Numbers(10), Numbers(10, settings="grey"), Numbers(9)):
        fill(source, tmp_path)
        assert len(source.read_ones) == source.num_examples
    assert len(list(tmp_path.glob("*.cache"))) == 3
    again = Numbers(10)
    fill(again, tmp_path)
    assert again.read_ones == []


def file_of(where):
    (path,) = where.glob("*.cache")
    return path


HEADER = len("keras_multigpu cache 0123456789abcdef\n")


def cached_in(path, count):
    sums = path.read_bytes()[HEADER : HEADER + 4 * count]
    return np.count_nonzero(np.frombuffer(sums, np.uint32))


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def longer(path):
    path.write_bytes(path.read_bytes() + b"0")


def foreign(path):
    path.write_bytes(path.read_bytes().replace(b"keras", b"KERAS"))


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def link(path):
    """It is not followed: another file would be written."""
    path.rename(path.parent / "elsewhere")
    (path.parent / "elsewhere").chmod(0o444)
    path.symlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("damage", [cut, longer, foreign, pipe, link])
def test_a_damaged_file_is_rebuilt(tmp_path, damage, caplog):
    fill(Numbers(10), tmp_path, 5 if damage is link else None)
    damage(path := file_of(tmp_path))
    others = [one.read_bytes() for one in tmp_path.glob("elsewhere")]
    again = Numbers(10)
    with caplog.at_level(logging.INFO, "keras_multigpu"):
        batches = Batches(again, global_batch_size=10, shuffle=False, cache=tmp_path)
        assert numbers_of(batches.epoch(0)) == list(range(10))
    assert len(again.read_ones) == 10 and not path.is_symlink()
    assert [one.read_bytes() for one in tmp_path.glob("elsewhere")] == others
    (line,) = caplog.messages
    assert "is damaged and is rebuilt" in line


def change_a_byte(path, place):
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


# Ten checksums of four bytes, then the examples: four bytes of pixels, and four of the class.
@pytest.mark.parametrize(
    "place", [4 * 7, 4 * 10 + 8 * 7, 4 * 10 + 8 * 7 + 4], ids=["checksum", "image", "class"]
)
def test_a_cache_with_a_changed_byte_is_rebuilt(tmp_path, place, caplog):
    fill(Numbers(10), tmp_path)
    change_a_byte(file_of(tmp_path), HEADER + place)
    # Some in the first epoch, and all for the cache, before the second.
    for is_damaged in (True, False):
        again = Numbers(10)
        batches = Batches(again, global_batch_size=4, shuffle=False, cache=tmp_path)
        for epoch in range(2):
            for x, y in batches.epoch(epoch):
                np.testing.assert_array_equal(y, x[:, 0, 0, 0] % 3)
        assert {*again.read_ones} == ({*range(10)} if is_damaged else set())
    (line,) = caplog.messages
    assert line.endswith("is damaged and is rebuilt.")


def cut_off(path):
    os.truncate(path, HEADER + 500)


def emptied(path):
    size = path.stat().st_size
    cut_off(path)
    os.truncate(path, size)


@pytest.mark.parametrize("change", [cut_off, emptied])
def test_changing_a_file_during_reading_kills_no_process(tmp_path, change, caplog):
    """With a memory-mapped file, reading beyond the cut would end the process."""
    source = Numbers(100)
    batches = Batches(source, global_batch_size=5, cache=tmp_path)
    assert sorted(numbers_of(batches.epoch(0))) == list(range(100))
    change(file_of(tmp_path))
    for epoch in (1, 2, 3):
        source.read_ones.clear()
        assert sorted(numbers_of(batches.epoch(epoch))) == list(range(100))
    assert not source.read_ones
    assert "is damaged" in caplog.messages[0]


def test_a_link_in_place_of_a_lock_is_named(tmp_path):
    fill(Numbers(10), tmp_path / "cache", 5)
    lock = next(tmp_path.glob("cache/*.lock"))
    lock.unlink()
    lock.symlink_to(tmp_path / "nowhere")
    with pytest.raises(OSError, match=r"cannot be written: Too many levels of symbolic links\."):
        fill(Numbers(10), tmp_path / "cache")
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_loses_nothing(tmp_path):
    """A limit on file sizes stands for the full disk."""
    source = Numbers(1000)
    fill(source, tmp_path, 10)
    path = file_of(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size - 8 * 300, before[1]))
    try:
        with pytest.raises(OSError, match=r"cannot be written: File too large\. Expected"):
            fill(source, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert cached_in(path, 1000) >= 300
    source.read_ones.clear()
    fill(source, tmp_path)
    assert len(source.read_ones) <= 700
    content = path.read_bytes()[HEADER + 4000 :]
    assert list(content[::8]) == [number % 256 for number in range(1000)]


def test_a_repaired_example_is_read_by_the_next_process(tmp_path):
    """A new source, like a new process, knows nothing of the earlier attempt."""
    fill(Numbers(10, damaged=[3]), tmp_path)
    repaired = Numbers(10)
    batches = Batches(repaired, global_batch_size=4, cache=tmp_path)
    assert sorted(numbers_of(batches.epoch(0))) == list(range(10))
    assert repaired.read_ones == [3]


def test_too_little_disk_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100, 21, 79))
    source = Numbers(10)
    # Ten examples: four bytes of pixels, and four of the class.
    with pytest.raises(OSError, match=r"take 80 bytes, and 79 bytes are free") as error:
        fill(source, tmp_path / "cache")
    assert error.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []
    assert source.read_ones == []
    monkeypatch.undo()
    fill(source, tmp_path / "cache")
    assert cached_in(file_of(tmp_path / "cache"), 10) == 10


def test_a_folder_that_is_a_file_is_named(tmp_path):
    path = tmp_path / "file"
    path.write_text("")
    with pytest.raises(OSError, match=r"cannot be written: .* Expected a folder .*file"):
        fill(Numbers(), path)


@contextlib.contextmanager
def without_rights():
    """Root may write all files; nobody may not."""
    root = os.geteuid() == 0
    if root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if root:
            os.setresuid(0, 0, 0)


def test_a_complete_cache_can_be_read_from_a_read_only_folder(caplog):
    with tempfile.TemporaryDirectory() as top:
        os.chmod(top, 0o755)
        folder = Path(top) / "cache"
        fill(Numbers(10, damaged=[9]), folder)
        for path in [folder, *folder.iterdir()]:
            path.chmod(0o555)
        again = Numbers(10, damaged=[9])
        batches = Batches(again, cache=folder, shuffle=False, on_error="skip")
        with without_rights(), pytest.warns(UserWarning, match="torn in two"):
            assert numbers_of(batches.epoch(0)) == [*range(9)]
        assert again.read_ones == [9], "only the damaged one is read again"
        assert "cannot be written: 1 of its examples" in caplog.text
        # A missing cache has to be written.
        folder.chmod(0o755)
        file_of(folder).rename(folder / "other")
        folder.chmod(0o555)
        said = "The cache cannot be written: Permission denied. Expected a folder"
        with without_rights(), pytest.raises(PermissionError, match=said):
            fill(Numbers(10), folder)


# Processes


@pytest.fixture(scope="module")
def context():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["keras_multigpu.data"])
    return context


@pytest.fixture
def start(context):
    started = []

    def start(folder, seconds=0.002):
        results, theirs = context.Pipe(duplex=False)
        process = context.Process(target=read, args=(folder, seconds, theirs))
        process.start()
        theirs.close()
        started.append((process, results))
        return process, results

    yield start
    for process, results in started:
        process.kill()
        process.join(PATIENCE)
        process.close()
        results.close()


CONTENT = ([*range(199)], [("example 199 of numbers", "torn in two")])


def result(process, results):
    """How many examples a process read; checks the content of the cache."""
    assert results.poll(PATIENCE)
    count, *content = results.recv()
    assert tuple(content) == CONTENT
    return count


@pytest.mark.slow
def test_processes_share_one_folder(tmp_path, start):
    """One fills it. The other waits, reads the same, and tries the damaged example again."""
    children = [start(tmp_path / "cache") for _ in range(2)]
    assert sorted(result(*child) for child in children) == [1, 200]


@pytest.mark.slow
def test_a_killed_process_leaves_its_work_and_no_lock(tmp_path, start):
    folder = tmp_path / "cache"
    killed, _ = start(folder, 0.02)
    while not (made := list(folder.glob("*.cache"))) or cached_in(made[0], 200) < 50:
        assert killed.is_alive()
        time.sleep(0.01)
    heir = start(folder)
    time.sleep(0.2)
    killed.kill()
    killed.join(PATIENCE)
    assert killed.exitcode == -signal.SIGKILL
    # The heir reads missing examples, including those that were read but not yet written.
    read_again = result(*heir)
    assert 0 < read_again <= 150
    assert cached_in(made[0], 200) == 199
