"""`keras-multigpu pack`: a folder of images in large files, exactly, whatever is killed."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import tensorflow as tf
from helpers.processes_left import PATIENCE, start_process
from helpers.small_image_files import content, write_image, write_images

import keras_multigpu as kmg
from keras_multigpu.commands import main

pytest.importorskip("array_record")

SETTINGS = {"image_size": (6, 5), "global_batch_size": 4, "seed": 3, "verbose": False}
NAMES = ["a b/1.png", "a/2.png", "a/deep/3.PNG", "b/.4.png", "b/5.jpg", ".no/6.png", "7.png"]


@pytest.fixture
def photos(tmp_path):
    """Classes whose folders sort in another way than their files, an empty one, and more."""
    write_images(tmp_path / "photos", NAMES)
    write_image(tmp_path / "photos/b/8.jpg", 200, tf.io.encode_jpeg)
    (tmp_path / "photos/c").mkdir()
    (tmp_path / "photos/notes.txt").write_text("no image")
    return tmp_path / "photos"


def pack(*words):
    return main(["pack", *map(str, words)])


def same(one, other):
    for left, right in zip(content(one), content(other), strict=True):
        np.testing.assert_array_equal(left, right)


def identity(batches, exact=False):
    return batches.reading().source.identity(exact)


@pytest.mark.filterwarnings("ignore:.* images lie directly", "ignore:1 of 4 class folders")
@pytest.mark.parametrize("shards", [[], ["--shards", 3], ["--shards", 12]], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"labels": None},
        {"class_names": ["b", "a"], "label_mode": "categorical"},
        {"resize": "random_crop", "color_mode": "grayscale"},
        {"labels": [3, 1, 0, 0, 2, 1, 0, 1]},
    ],
    ids=str,
)
def test_a_packed_folder_gives_the_batches_of_the_folder(
    photos, tmp_path, settings, shards, capsys
):
    """In every epoch and share; a run on one resumes on the other."""
    out = tmp_path / "out.array_record"
    assert pack(photos, out, *shards) == 0
    assert "8 images" in capsys.readouterr().out
    folder, packed = (
        kmg.data.from_directory(path, **SETTINGS, **settings) for path in (photos, out)
    )
    assert packed.class_counts == folder.class_counts
    for arguments in ((0,), (2, 3), (1, 0, (1, 2))):
        same(packed.epoch(*arguments), folder.epoch(*arguments))
    same(packed.evaluation().epoch(0), folder.evaluation().epoch(0))
    assert identity(packed) == identity(folder)
    assert [path.removeprefix(f"{out}/") for path in packed.file_paths] == [
        path.removeprefix(f"{photos}/") for path in folder.file_paths
    ]


def test_from_records_gives_the_bytes_of_each_file(tmp_path):
    write_images(tmp_path / "photos", ["cat/1.png", "dog/2.png", "dog/3.png"])
    out = tmp_path / "out.array_record"
    pack(tmp_path / "photos", out, "--shards", 2)
    made = kmg.data.from_records(out, shuffle=False)
    assert (made.class_names, made.class_counts) == (["cat", "dog"], {"cat": 1, "dog": 2})
    (batch,) = made.epoch(0)
    assert batch["path"].numpy().tolist() == [b"cat/1.png", b"dog/2.png", b"dog/3.png"]
    assert batch["label"].numpy().tolist() == [0, 1, 1]
    files = [(tmp_path / "photos" / path.decode()).read_bytes() for path in batch["path"].numpy()]
    assert batch["image"].numpy().tolist() == files
    decoded = kmg.data.from_records(
        out, lambda item: (tf.io.decode_png(item["image"]), item["label"])
    )
    assert decoded.epoch(0).element_spec[0].shape == (None, 4, 4, 3)
    assert [part.num_examples for part in made.split(0.34)] == [2, 1]


def test_a_cache_notices_other_files(photos, tmp_path):
    out = tmp_path / "out.array_record"
    pack(photos, out)
    batches = kmg.data.from_directory(out, labels=None, cache=tmp_path / "cache", **SETTINGS)
    same(batches.epoch(1), kmg.data.from_directory(photos, labels=None, **SETTINGS).epoch(1))
    before = identity(batches, exact=True)
    out.unlink()
    pack(photos, out)
    after = kmg.data.from_directory(out, labels=None, **SETTINGS)
    assert kmg.data.from_records(out).class_names is None, "some images are in no class"
    assert identity(after, exact=True) != before


def test_a_damaged_record_is_named(photos, tmp_path):
    out = tmp_path / "out.array_record"
    pack(photos, out)
    image = (photos / "a/2.png").read_bytes()
    packed = bytearray(out.read_bytes())
    packed[packed.find(image) + 20] ^= 1
    out.write_bytes(packed)
    batches = kmg.data.from_directory(out, labels=None, on_error="skip", **SETTINGS)
    with pytest.warns(
        UserWarning, match=r"1 damaged example: .*out.array_record/a/2.png \(its rec"
    ):
        assert len(content(batches.epoch(0))[0]) == 7


def mistakes():
    def cut(tmp_path, out):
        out.write_bytes(out.read_bytes()[:1000])
        kmg.data.from_directory(out)

    def lost(tmp_path, out):
        pack(tmp_path / "photos", tmp_path / "two.array_record", "--shards", 2)
        (tmp_path / "two.array_record-00001-of-00002").unlink()
        kmg.data.from_directory(tmp_path / "two.array_record")

    def unpackaged(tmp_path, out):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "array_record.python", None)
            kmg.data.from_directory(out)

    return [
        (cut, ValueError, "no packed folder, or it is damaged.*`keras-multigpu pack`"),
        (lost, ValueError, "has . of 8 images, .*Run `keras-multigpu pack` again"),
        (unpackaged, ImportError, "array_record is not installed.*pip install array_record"),
    ]


@pytest.mark.parametrize(("call", "kind", "text"), mistakes())
def test_what_cannot_be_read_is_named(call, kind, text, photos, tmp_path):
    pack(photos, tmp_path / "out.array_record")
    with pytest.raises(kind, match=text):
        call(tmp_path, tmp_path / "out.array_record")


def test_what_cannot_be_packed_is_named(photos, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "out.array_record"
    pack(photos, out)
    write_image(photos / "a/9.png", 9)
    for words, text in (
        ((photos, tmp_path / "out.records"), "ends in .array_record"),
        ((tmp_path / "empty", out), "There are no images in the folder"),
        ((tmp_path / "none", out), "The path does not exist"),
        ((photos, out), "out.array_record is there already, with other images"),
        ((photos, out, "--shards", 2), "is there already"),
    ):
        capsys.readouterr()
        assert pack(*words) == 2
        assert text in capsys.readouterr().err
    (photos / "a/broken.png").symlink_to("nowhere")
    assert pack(photos, tmp_path / "other.array_record") == 2
    assert "broken.png" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("[!.]*.array_record*")] == ["out.array_record"]


SLOWLY = """
import sys, time
from keras_multigpu.commands import main
from keras_multigpu.data.sources.file_table import FileTable
contents = FileTable.contents
def slowly(self, indices):
    for call in contents(self, indices):
        time.sleep(0.02)
        yield call
FileTable.contents = slowly
sys.exit(main(["pack", *sys.argv[1:]]))
"""


@pytest.fixture
def many(tmp_path):
    write_images(tmp_path / "photos", [f"{'ab'[i % 2]}/{i:03}.png" for i in range(120)])
    return tmp_path / "photos", tmp_path / "new" / "out.array_record"


def started(many):
    command = [sys.executable, "-c", SLOWLY, *map(str, many), "--shards", "20"]
    return start_process(command, stdout=subprocess.DEVNULL)


def shards_in(out):
    return {path: path.stat().st_mtime_ns for path in out.parent.glob(f"{out.name}-*")}


@pytest.mark.slow
def test_a_kill_loses_no_complete_file_and_leaves_no_damaged_one(many):
    photos, out = many
    process = started(many)
    while len(shards_in(out)) < 5:
        assert process.poll() is None
        time.sleep(0.005)
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL
    before = shards_in(out)
    assert 5 <= len(before) < 20
    with pytest.raises(ValueError, match="Run `keras-multigpu pack` again"):
        kmg.data.from_directory(out, verbose=False)
    assert pack(photos, out, "--shards", 20) == 0
    after = shards_in(out)
    assert len(after) == 20 and before.items() <= after.items()
    assert len(os.listdir(out.parent)) == 20, "no partial file is left"
    same(*(kmg.data.from_directory(path, **SETTINGS).epoch(0) for path in (photos, out)))


@pytest.mark.slow
def test_processes_share_the_work_and_replace_one_that_is_killed(many):
    photos, out = many
    processes = [started(many) for _ in range(3)]
    while len(shards_in(out)) < 3:
        time.sleep(0.005)
    processes[0].kill()
    early = shards_in(out)
    assert [process.wait(PATIENCE) for process in processes] == [-signal.SIGKILL, 0, 0]
    assert early.items() <= shards_in(out).items(), "each file is written once"
    assert len(os.listdir(out.parent)) == 20
    folder = kmg.data.from_directory(photos, **SETTINGS)
    packed = kmg.data.from_directory(out, **SETTINGS)
    for workers in (2, 4):
        for worker in range(workers):
            same(*(one.epoch(1, shard=(worker, workers)) for one in (folder, packed)))
