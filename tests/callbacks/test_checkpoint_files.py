"""Checkpoints as files: what is written comes back, and what is damaged is noticed."""

import errno
import logging
import os
import resource
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

from keras_multigpu.callbacks import checkpoint_files
from keras_multigpu.callbacks.background_writer import BackgroundWriter
from keras_multigpu.callbacks.checkpoint_files import CheckpointFolder
from keras_multigpu.callbacks.checkpoint_format import NAME
from keras_multigpu.callbacks.checkpoint_format import Damaged
from keras_multigpu.callbacks.checkpoint_format import Encoded
from keras_multigpu.callbacks.checkpoint_format import decoded

TREE = {
    "empty": {},
    "kind": "a word that the format uses itself",
    "numbers": [1, 2.5, float("inf"), True, None, 2**70],
    "pair": ("é", [("nested",)]),
    3: {None: "keys that are no texts"},
    "array": np.arange(6, dtype=np.int64).reshape(2, 3)[:, ::-1],
    "half": np.float16([0.1, -2]),
    "brain": np.array([1.5, 3.25], ml_dtypes.bfloat16),
    "flags": np.array([True, False]),
    "texts": np.array(["a", "bcd"]),
    "nothing": np.zeros((0, 4), np.float32),
    "scalar": np.float32(0.1),
    "zero_d": np.array(7, np.uint32),
}


def written(path, tree):
    """A file with a tree."""
    path.write_bytes(b"".join(Encoded(tree).parts()))
    return path


def folder(path, keep=2):
    """An open folder of checkpoints."""
    opened = CheckpointFolder(path, keep)
    opened.open()
    return opened


def assert_same(one, other):
    """Types and values."""
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    elif isinstance(one, (np.ndarray, np.generic)):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
    else:
        assert one == other


def test_a_tree_comes_back_as_it_was(tmp_path):
    """Values, types, shapes and structure."""
    assert_same(decoded(written(tmp_path / "a", TREE)), TREE)


def test_changes_after_encoding_do_not_matter():
    """Lists and dicts that go on growing while a thread writes."""
    tree = {"losses": [1.0]}
    encoded = Encoded(tree)
    tree["losses"].append(2.0)
    assert b'"losses": [1.0]}' in b"".join(encoded.parts())


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        ({"a": [object()]}, r"the state\['a'\]\[0\] is a object"),
        ({"a": np.array([None])}, r"the state\['a'\] is an array of object"),
        ({(object(),): 1}, r"a key of the state\[0\] is a object"),
    ],
)
def test_what_cannot_be_saved_is_named(value, phrase):
    """With the way to it."""
    with pytest.raises(TypeError, match=phrase):
        Encoded(value)


def test_every_damaged_byte_is_noticed(tmp_path):
    """A flipped bit anywhere, and a file that ends too early."""
    path = written(tmp_path / "a", {"array": np.arange(9.0)})
    content = path.read_bytes()
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(Damaged):
            decoded(path)
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(Damaged):
            decoded(path)


def test_the_last_ones_are_kept(tmp_path):
    """Numbers go on; other files stay."""
    (tmp_path / "notes.txt").write_text("mine")
    files = folder(tmp_path, keep=3)
    for number in range(5):
        assert files.write(Encoded(number)).name == f"checkpoint-{number + 1:06}.kmg"
    assert [decoded(path) for path in files.checkpoints()] == [2, 3, 4]
    files.close()
    files = folder(tmp_path, keep=1)
    assert files.newest()[1] == 4
    files.write(Encoded("next"))
    assert [path.name for path in files.checkpoints()] == ["checkpoint-000006.kmg"]
    assert (tmp_path / "notes.txt").exists()
    files.close()


def test_a_damaged_one_is_set_aside_and_the_one_before_is_taken(tmp_path, caplog):
    """It is named in the log, kept, and its number is not used again."""
    files = folder(tmp_path)
    for number in range(2):
        files.write(Encoded(number))
    newest = files.checkpoints()[-1]
    newest.write_bytes(newest.read_bytes()[:-1])
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        path, content = files.newest()
    assert (path.name, content) == ("checkpoint-000001.kmg", 0)
    assert "checkpoint-000002.kmg is damaged: its checksum" in caplog.text
    assert (tmp_path / "checkpoint-000002.kmg.damaged").exists()
    assert files.write(Encoded(2)).name == "checkpoint-000003.kmg"
    files.close()


def test_if_all_are_damaged_nothing_begins_anew_by_itself(tmp_path):
    """An error first. Then the folder is as good as new, and nothing was deleted."""
    files = folder(tmp_path)
    for number in range(2):
        files.write(Encoded(number)).write_bytes(b"?")
    with pytest.raises(ValueError, match="All checkpoints .* damaged.*000001.*000002"):
        files.newest()
    assert files.newest() is None
    assert len(list(tmp_path.glob("*.damaged"))) == 2
    files.close()


def test_a_newer_format_is_refused(tmp_path):
    """It is not taken for a damaged one, which an older one could stand in for."""
    import hashlib

    files = folder(tmp_path)
    body = NAME + b"12\nwhatever comes then"
    path = tmp_path / "checkpoint-000001.kmg"
    path.write_bytes(body + hashlib.sha256(body).digest())
    with pytest.raises(ValueError, match=r"later version .* has format 12\. Expected format 1 "):
        files.newest()
    assert path.exists()
    files.close()


def test_half_written_files_are_removed(tmp_path):
    """What a kill has left."""
    (tmp_path / "checkpoint-000004.kmg.partial").write_bytes(b"half")
    files = folder(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]
    files.close()


def test_a_folder_has_one_run_in_a_process(tmp_path):
    """The second is refused, until the first one is over."""
    first = folder(tmp_path)
    with pytest.raises(ValueError, match="Another run .* this process"):
        folder(tmp_path / "." / "x" / "..")
    first.close()
    folder(tmp_path).close()


def test_a_folder_has_one_run_in_all_processes(tmp_path):
    """The error names the process. When that is killed, the folder is free."""
    program = (
        "import fcntl, os, sys, time\n"
        f"lock = os.open({str(tmp_path / 'lock')!r}, os.O_RDWR | os.O_CREAT)\n"
        "fcntl.lockf(lock, fcntl.LOCK_EX)\n"
        "os.write(lock, b'process 7 on there')\n"
        "print('locked', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"locked\n"
    with pytest.raises(ValueError, match="Another run .*: process 7 on there. Expected"):
        folder(tmp_path)
    other.kill()
    other.communicate()
    files = folder(tmp_path)
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")
    files.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    """A file stands in its place."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written: .*Received: folder='.*file'"):
        folder(tmp_path / "file")


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 256 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("Only root can make a file system.")
    yield place
    subprocess.run(["umount", place], check=True)


def test_a_full_disk_is_an_error_and_nothing_is_lost(tiny_disk):
    """The checkpoints before are still there, and there is no half one."""
    files = folder(tiny_disk)
    files.write(Encoded("before"))
    with pytest.raises(OSError, match="No space left on device.*room for 1.0 MB.*still there") as e:
        files.write(Encoded(np.zeros(1_000_000, np.uint8)))
    assert e.value.errno == errno.ENOSPC
    assert not list(tiny_disk.glob("*.partial"))
    assert files.newest()[1] == "before"
    files.close()


def test_a_read_only_disk_is_named(tiny_disk):
    """When the folder is opened, long before anything is to be saved."""
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], check=True)
    with pytest.raises(OSError, match="cannot be written: Read-only file system") as error:
        folder(tiny_disk / "run")
    assert error.value.errno == errno.EROFS


def test_an_error_of_the_writing_thread_is_raised(tmp_path):
    """At the next occasion, once."""
    files = folder(tmp_path)
    writer = BackgroundWriter(files)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        writer.write(Encoded(np.zeros(9999)))
        with pytest.raises(OSError, match="cannot be written: File too large"):
            writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    writer.raise_error()
    writer.write(Encoded("small"))
    assert writer.close() is None
    assert files.newest()[1] == "small"
    files.close()


def test_without_locks_it_still_works(tmp_path, monkeypatch, caplog):
    """On systems without `fcntl` two runs are not noticed, and a line says so."""
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with caplog.at_level(logging.INFO, "keras_multigpu"):
        folder(tmp_path).close()
    assert "two runs in one folder are not noticed" in caplog.text
    assert checkpoint_files.number_of(tmp_path / "checkpoint-x.kmg") == 0
