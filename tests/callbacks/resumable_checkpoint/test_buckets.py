"""Checkpoints in a bucket: a connection that is lost at any moment loses nothing.

`test_checkpoint_files.py` tries damage and names there, too.
"""

import contextlib
import importlib.abc
import sys

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from helpers.interrupted_runs import (
    assert_same_values,
    batches,
    checkpoint_in,
    fit,
    network,
    values_of,
)
from helpers.stopped_runs import StopAt, Stopped
from test_ending import Workers

from keras_multigpu.callbacks import ResumableCheckpoint
from keras_multigpu.callbacks.resumable_checkpoint import resumable_checkpoint
from keras_multigpu.callbacks.resumable_checkpoint.ending import Consensus
from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder
from keras_multigpu.callbacks.resumable_checkpoint.format import Encoded


class Distant(MemoryFileSystem):
    """A storage in memory behind a network, whose connection is lost in some of its calls.

    An upload that is cut off leaves half an object behind, which object stores would not show.
    """

    protocol = "distant"
    store: dict = {}
    pseudo_dirs = [""]
    lost: list = []
    """For each upload and download to come, whether the connection is lost in the middle."""

    @classmethod
    def _strip_protocol(cls, path):
        return MemoryFileSystem._strip_protocol(str(path).replace("distant://", "memory://"))

    def put_file(self, local, remote, **arguments):
        if self.lost and self.lost.pop(0):
            with open(local, "rb") as file:
                content = file.read()
            self.pipe_file(remote, content[: len(content) // 2])
            self.lose()
        super().put_file(local, remote, **arguments)

    def get_file(self, remote, local, **arguments):
        if self.lost and self.lost.pop(0):
            self.lose()
        super().get_file(remote, local, **arguments)

    def lose(self):
        # Like gcsfs's errors, it is no `OSError`.
        raise RuntimeError("The connection was reset.")


ADDRESS = "distant://bucket/run"


@pytest.fixture
def bucket():
    fsspec.register_implementation("distant", Distant, clobber=True)
    Distant.store, Distant.pseudo_dirs, Distant.lost = {}, [""], []
    return Distant


@pytest.fixture
def files(bucket):
    files = CheckpointFolder(ADDRESS, keep=2)
    files.open()
    yield files
    files.close()


def names(bucket):
    return sorted(name.rpartition("/")[2] for name in bucket.store)


def test_a_connection_lost_while_writing_loses_nothing(bucket, files):
    """What is half there is replaced by the next save, and counts as no checkpoint."""
    for number in range(2):
        files.write(Encoded(number))
    bucket.lost = [True, True, False]
    for _ in range(2):
        with pytest.raises(ConnectionError, match="cannot be written: .* reset.*Check network"):
            files.write(Encoded("lost"))
    assert files.newest() == (2, 1), "The half one is set aside by the next run."
    assert files.write(Encoded("next")) == 3
    assert files.newest() == (3, "next")
    assert [name for name in names(bucket) if name.endswith("kmg")] == [
        "checkpoint-000002.kmg",
        "checkpoint-000003.kmg",
    ]


def test_a_connection_lost_while_reading_is_no_damage(bucket, files):
    files.write(Encoded(1))
    bucket.lost = [True]
    with pytest.raises(ConnectionError, match="newest checkpoint cannot be read: .* reset"):
        files.newest()
    assert files.newest() == (1, 1)


def test_the_run_that_started_last_has_the_bucket(bucket, files):
    """As nothing says whether the earlier one was killed; one that lives ends at its next save."""
    files.write(Encoded("earlier"))
    lock = f"{Distant._strip_protocol(ADDRESS)}/lock"
    own = Distant().cat_file(lock)
    Distant().pipe_file(lock, b"process 7 on there, run 12345678")
    with pytest.raises(ValueError, match="Another run .*: process 7 on there, run 12345678"):
        files.write(Encoded("too late"))
    Distant().pipe_file(lock, own)
    assert files.newest() == (1, "earlier")


def test_workers_read_what_the_chief_found_and_never_write(files):
    files.write(Encoded({"epoch": 3}))
    place, content = Consensus(Workers(False, [1, 0])).newest(files)
    assert (place, content) == (f"{ADDRESS}/checkpoint-000001.kmg", {"epoch": 3})
    assert not Consensus(Workers(False)).take_over(files)


def test_training_goes_on_while_the_bucket_is_out_of_reach(bucket, caplog):
    """The next save tries again; a run that is killed meanwhile resumes, and ends the same."""
    fit(whole := network(1), batches(), [], checkpoint_in("memory://whole/run"))
    bucket.lost = [False, False, True, True, False]
    with pytest.raises(Stopped):
        fit(network(1), batches(), [StopAt(1, 2)], checkpoint_in(ADDRESS))
    assert caplog.text.count("Training continues.") == 2
    resumed = checkpoint_in(ADDRESS)
    fit(model := network(1), batches(), [], resumed)
    assert resumed.resumed_from.startswith(f"{ADDRESS}/checkpoint-00000")
    assert_same_values(values_of(whole), values_of(model))


def test_the_last_save_is_tried_again_and_then_an_error(bucket, monkeypatch, caplog):
    """A run that ends with the error ends well when it is repeated."""
    monkeypatch.setattr(resumable_checkpoint, "LAST_WAITS", (0, 0))
    bucket.lost = [False] * 13 + [True] * 3  # Twelve steps, and the ends of two epochs.
    with pytest.raises(ConnectionError, match="cannot be written"):
        fit(network(1), batches(), [], checkpoint_in(ADDRESS), epochs=2)
    bucket.lost = [False] * 3 + [True] * 2
    history = fit(network(1), batches(), [], checkpoint_in(ADDRESS, every_steps=None), epochs=3)
    assert history.epoch == [0, 1, 2]
    assert caplog.text.count("It is tried again in 0 s.") == 4


def test_a_local_address_is_a_folder(tmp_path):
    assert ResumableCheckpoint(f"file://{tmp_path}/run").folder == tmp_path / "run"


def test_a_missing_package_is_named(monkeypatch):
    class Missing(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "fsspec":
                raise ImportError("No module named 'fsspec'")

    for name in [each for each in sys.modules if each.partition(".")[0] == "fsspec"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with contextlib.closing(CheckpointFolder("gs://bucket/run", keep=2)) as files:
        with pytest.raises(ImportError, match="package is missing.*Expected fsspec.*pip install"):
            files.open()
