"""Checkpoint files: what is written is read back, and damage is noticed."""

import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile

import ml_dtypes
import numpy as np
import pytest
from fsspec.core import url_to_fs
from fsspec.implementations.memory import MemoryFileSystem
from helpers.processes_left import PATIENCE, start_process

from keras_multigpu.callbacks import ResumableCheckpoint
from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder
from keras_multigpu.callbacks.resumable_checkpoint.format import DamagedFile, Encoded
from keras_multigpu.callbacks.resumable_checkpoint.format import decode as decoded_file

TREE = {
    "empty": {},
    "kind": "a word that the format uses itself",
    "numbers": [1, 2.5, float("inf"), True, None, 2**70],
    "pair": ("é", [("nested",)]),
    3: {None: "keys that are not texts"},
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
    with path.open("wb") as file:
        Encoded(tree).write_to(file)
    return path


def decoded(path):
    with path.open("rb") as file:
        return decoded_file(file)


@pytest.fixture
def opened():
    """A function that opens a folder of checkpoints, which is closed after the test."""
    with contextlib.ExitStack() as stack:

        def opened(path, keep=2):
            files = CheckpointFolder(path, keep)
            files.open()
            stack.callback(files.close)
            return files

        yield opened


class Place:
    """A folder or a bucket, seen from outside."""

    def __init__(self, path):
        self.path = path
        self._system, self._root = url_to_fs(str(path))

    def names(self):
        return sorted(name.rpartition("/")[2] for name in self._system.ls(self._root, detail=False))

    def read(self, name):
        return self._system.cat_file(f"{self._root}/{name}")

    def write(self, name, content):
        self._system.pipe_file(f"{self._root}/{name}", content)


@pytest.fixture(params=["folder", "bucket"])
def place(request, tmp_path):
    if request.param == "folder":
        return Place(tmp_path)
    MemoryFileSystem.store.clear()
    return Place("memory://runs/photos")


def assert_same(one, other):
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


def test_a_tree_is_read_as_it_was_written(tmp_path):
    assert_same(decoded(written(tmp_path / "a", TREE)), TREE)


def test_numpy_can_open_a_checkpoint(tmp_path):
    path = written(tmp_path / "a.kmg", {"model": {"weights/0": np.arange(3)}, "epoch": 7})
    with np.load(path) as arrays:
        np.testing.assert_array_equal(arrays["model.weights.0.0"], [0, 1, 2])
        assert json.loads(arrays["tree.json"])["tree"]["epoch"] == 7


def test_changes_after_encoding_do_not_matter(tmp_path):
    tree = {"losses": [1.0]}
    encoded = Encoded(tree)
    tree["losses"].append(2.0)
    with (tmp_path / "a").open("wb") as file:
        encoded.write_to(file)
    assert decoded(tmp_path / "a") == {"losses": [1.0]}


@pytest.mark.parametrize(
    ("value", "phrase"),
    [
        ({"a": [object()]}, r"the state\['a'\]\[0\] is a object"),
        ({"a": np.array([None])}, r"the state\['a'\] is an array of object"),
        ({(object(),): 1}, r"a key of the state\[0\] is a object"),
    ],
)
def test_what_cannot_be_saved_is_named(value, phrase):
    with pytest.raises(TypeError, match=phrase):
        Encoded(value)


def test_every_damaged_byte_is_noticed(tmp_path):
    """A flipped bit anywhere that matters, and a truncated file."""
    tree = {"array": np.arange(9.0)}
    path = written(tmp_path / "a", tree)
    content = path.read_bytes()
    harmless = 0
    for place, bit in itertools.product(range(len(content)), (1, 16, 128)):
        damaged = bytearray(content)
        damaged[place] ^= bit
        path.write_bytes(damaged)
        try:
            assert_same(decoded(path), tree)  # Dates of parts, and the like.
            harmless += 1
        except DamagedFile:
            pass
    assert harmless < len(content), "Of three flips for each byte."
    for length in range(0, len(content), 7):
        path.write_bytes(content[:length])
        with pytest.raises(DamagedFile):
            decoded(path)


def test_the_newest_checkpoints_are_kept(opened, place):
    place.write("notes.txt", b"mine")
    files = opened(place.path, keep=3)
    assert [files.write(Encoded(number)) for number in range(5)] == [1, 2, 3, 4, 5]
    assert [files.read(number) for number in (3, 4, 5)] == [2, 3, 4]
    files.close()
    files = opened(place.path, keep=1)
    assert files.newest() == (5, 4)
    files.write(Encoded("next"))
    assert place.names() == ["checkpoint-000006.kmg", "lock", "notes.txt"]


def test_a_damaged_one_is_set_aside_and_the_one_before_is_taken(opened, place, caplog):
    """The damaged file is logged and kept, and its number is not used again."""
    files = opened(place.path)
    for number in range(2):
        files.write(Encoded(number))
    place.write("checkpoint-000002.kmg", place.read("checkpoint-000002.kmg")[:-1])
    assert files.newest() == (1, 0)
    assert "checkpoint-000002.kmg is damaged: BadZipFile" in caplog.text
    assert "checkpoint-000002.kmg.damaged" in place.names()
    assert files.write(Encoded(2)) == 3


def test_training_does_not_start_over_if_all_are_damaged(opened, place):
    """It is an error. Only the next run starts over, and nothing is deleted."""
    files = opened(place.path)
    for number in range(2):
        files.write(Encoded(number))
        place.write(f"checkpoint-{number + 1:06}.kmg", b"?")
    with pytest.raises(ValueError, match="All checkpoints .* damaged.*000001.*000002"):
        files.newest()
    assert files.newest() is None
    assert sum(name.endswith(".damaged") for name in place.names()) == 2


def crafted(path, header, **members):
    """A file of the right kind with anything in it."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tree.json", header if isinstance(header, str) else json.dumps(header))
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return path


def test_another_format_is_refused(opened, place, tmp_path):
    """It is not treated as damaged, or an older checkpoint would replace it."""
    files = opened(place.path)
    path = crafted(tmp_path / "other", {"format": 12, "tree": None})
    place.write("checkpoint-000001.kmg", path.read_bytes())
    with pytest.raises(ValueError, match=r"Another version .* has format 12\. Expected format 2"):
        files.newest()
    assert "checkpoint-000001.kmg" in place.names()


ARRAY = {"kind": "array", "name": "a.npy"}


def header_of(shape, dtype="<f8"):
    """The beginning of an array in NumPy's format."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}}}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    ("tree", "members"),
    [
        ('{"format": 2, "tree": ' + "[" * 100_000 + "]" * 100_000 + "}", {}),
        ("[]", {}),
        ({"format": 2}, {}),
        ({"format": 2, "tree": ARRAY}, {}),
        ({"format": 2, "tree": {**ARRAY, "name": "../../etc/passwd"}}, {"a": b""}),
        ({"format": 2, "tree": {"kind": "dict", "keys": [[]], "items": [1]}}, {}),
        ({"format": 2, "tree": {"kind": "unheard of"}}, {}),
        ({"format": 2, "tree": ARRAY}, {"a": header_of((10**15,))}),
        ({"format": 2, "tree": ARRAY}, {"a": header_of((-3,))}),
        ({"format": 2, "tree": ARRAY}, {"a": header_of((1,)) + bytes(16)}),
        ({"format": 2, "tree": ARRAY}, {"a": header_of((1,), "|O") + bytes(8)}),
        ({"format": 2, "tree": {**ARRAY, "dtype": "float128"}}, {"a": header_of((1,)) + bytes(8)}),
        ({"format": 2, "tree": {**ARRAY, "dtype": "O"}}, {"a": header_of((1,)) + bytes(8)}),
        ({"format": 2, "tree": {**ARRAY, "dtype": "V8"}}, {"a": header_of((1,), "|V0") + b""}),
        ({"format": 2, "tree": {**ARRAY, "dtype": {"a": 1}}}, {"a": header_of((1,)) + bytes(8)}),
        ({"format": 2, "tree": {**ARRAY, "name": 5}}, {}),
        # Each mention of the array would take its size in memory.
        ({"format": 2, "tree": [ARRAY] * 2}, {"a": header_of((1,)) + bytes(8)}),
    ],
    ids=range(17),
)
def test_crafted_files_are_damaged(tmp_path, tree, members):
    """Too deep, too large, too short, or of an unknown kind."""
    with pytest.raises(DamagedFile):
        decoded(crafted(tmp_path / "a", tree, **members))


def test_a_compressed_archive_is_damaged(tmp_path):
    with zipfile.ZipFile(tmp_path / "a", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tree.json", bytes(10**6))
    with pytest.raises(DamagedFile, match="longer than the file"):
        decoded(tmp_path / "a")


def test_parts_that_share_bytes_are_damaged(tmp_path):
    """A hundred names for one array would become a hundred arrays in memory."""
    content = header_of((100,)) + bytes(800)
    tree = {"format": 2, "tree": [{**ARRAY, "name": f"a{n}.npy"} for n in range(100)]}
    path = crafted(tmp_path / "a", tree, **{f"a{n}": content for n in range(100)})
    with zipfile.ZipFile(path, "a") as archive:
        first = archive.getinfo("a0.npy")
        for part in archive.filelist[2:]:
            part.header_offset = first.header_offset
        archive.comment = b"changed"
    kept = path.read_bytes()
    start = first.header_offset + 30 + len("a0.npy") + len(content)
    with zipfile.ZipFile(path) as archive:
        end = archive.start_dir
    path.write_bytes(kept[:start] + kept[end:])
    with pytest.raises(DamagedFile, match="longer than the file"):
        decoded(path)


@pytest.mark.parametrize("name", ["lock", "checkpoint-000001.kmg"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder"])
def test_a_link_a_pipe_or_a_folder_is_refused(opened, tmp_path, name, kind):
    (tmp_path / "mine").write_text("precious")
    place = tmp_path / "run" / name
    place.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "link":
        place.symlink_to(tmp_path / "mine")
    else:
        place.mkdir()
    with pytest.raises(ValueError, match=f"{name} is a link, a pipe or a folder"):
        opened(tmp_path / "run").newest()
    assert (tmp_path / "mine").read_text() == "precious"


def test_a_link_where_a_file_will_be_written_is_not_followed(opened, tmp_path):
    (tmp_path / "mine").write_text("precious")
    files = opened(tmp_path / "run")
    (tmp_path / "run" / "checkpoint-000001.kmg").symlink_to(tmp_path / "mine")
    (tmp_path / "run" / "checkpoint-000002.kmg.partial").symlink_to(tmp_path / "mine")
    assert files.write(Encoded(1)) == 3
    (tmp_path / "run" / "checkpoint-000004.kmg.partial").symlink_to(tmp_path / "mine")
    files.write(Encoded(2))
    assert (tmp_path / "mine").read_text() == "precious"


def test_other_names_are_left_alone(opened, place, caplog):
    names = ["checkpoint-\u00b2.kmg", "checkpoint-best.kmg", "checkpoint-.kmg"]
    names.append(f"checkpoint-{'9' * 200}.kmg")  # The next number would be too long for a name.
    for name in names:
        place.write(name, b"mine")
    files = opened(place.path, keep=1)
    assert files.newest() is None
    for number in range(3):
        files.write(Encoded(number))
    assert all(place.read(name) == b"mine" for name in names)
    assert all(f"{name} has no number, and is ignored" in caplog.text for name in names)


def test_half_written_files_are_removed(opened, tmp_path):
    (tmp_path / "checkpoint-000004.kmg.partial").write_bytes(b"half")
    opened(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock"]


def test_a_folder_has_one_run_in_a_process(opened, place):
    first = opened(place.path)
    again = place.path if isinstance(place.path, str) else place.path / "." / "x" / ".."
    with pytest.raises(ValueError, match="Another run .* this process"):
        opened(again)
    first.close()
    opened(place.path).close()


def test_a_folder_has_one_run_in_all_processes(opened, tmp_path):
    """The error names the process. When that is killed, the folder is free."""
    program = (
        "import fcntl, os, sys, time\n"
        f"lock = os.open({str(tmp_path / 'lock')!r}, os.O_RDWR | os.O_CREAT)\n"
        "fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "os.write(lock, b'process 7 on there')\n"
        "print('locked', flush=True); time.sleep(60)"
    )
    other = start_process([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"locked\n"
    with pytest.raises(ValueError, match="Another run .*: process 7 on there. Expected"):
        opened(tmp_path)
    other.kill()
    other.communicate(timeout=PATIENCE)
    opened(tmp_path)
    assert (tmp_path / "lock").read_text().startswith(f"process {os.getpid()} on ")


def is_free(path):
    """Whether another process could lock the folder."""
    with open(path / "lock", "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_copy_of_the_folder_does_not_lose_the_lock(opened, tmp_path):
    """A backup made by the training process opens and closes the lock."""
    files = opened(tmp_path / "run")
    files.write(Encoded(1))
    shutil.copytree(tmp_path / "run", tmp_path / "backup")
    assert not is_free(tmp_path / "run")
    files.close()
    assert is_free(tmp_path / "run")
    assert opened(tmp_path / "backup").newest() == (1, 1)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_process_that_lives_longer_does_not_keep_the_lock(opened, tmp_path):
    """For example Keras's workers for a `PyDataset`."""
    files = opened(tmp_path)
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.write(writer, b"?")
        time.sleep(PATIENCE)
        os._exit(0)
    os.read(reader, 1)
    files.close()
    found = is_free(tmp_path)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    os.close(writer)
    assert found


def test_a_folder_that_cannot_be_made_is_named(opened, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="cannot be written: .*Received: folder='.*file'"):
        opened(tmp_path / "file")


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of 256 kB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", place],
        capture_output=True,
        timeout=PATIENCE,
    )
    if mounted.returncode:
        pytest.skip("Only root can make a file system.")
    yield place
    subprocess.run(["umount", place], timeout=PATIENCE, check=True)


def test_a_full_disk_is_an_error_and_nothing_is_lost(tiny_disk, opened):
    """Earlier checkpoints remain, and no half-written file."""
    files = opened(tiny_disk)
    files.write(Encoded("before"))
    with pytest.raises(OSError, match="No space left.*1.0 MB of free space.*still there") as e:
        files.write(Encoded(np.zeros(1_000_000, np.uint8)))
    assert e.value.errno == errno.ENOSPC
    assert not list(tiny_disk.glob("*.partial"))
    assert files.newest() == (1, "before")


def test_a_read_only_disk_is_named(tiny_disk, opened):
    """When the folder is opened, long before the first save."""
    subprocess.run(["mount", "-o", "remount,ro", tiny_disk], timeout=PATIENCE, check=True)
    with pytest.raises(OSError, match="cannot be written: Read-only file system") as error:
        opened(tiny_disk / "run")
    assert error.value.errno == errno.EROFS


def test_without_locks_it_still_works(opened, tmp_path, monkeypatch, caplog):
    """Two runs in one folder are not detected then, and the log warns."""

    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with caplog.at_level(logging.INFO, "keras_multigpu"):
        opened(tmp_path).close()
    assert "two processes in one folder are not detected" in caplog.text


def test_the_home_folder_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert ResumableCheckpoint("~/run").folder == tmp_path / "run"
