"""Files at addresses such as gs://, through fsspec, behave like files on a disk."""

import os
import shutil
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
from helpers.buckets import bucket, in_flight
from helpers.small_image_files import content, numbers_and_more, write_csv, write_images
from test_from_records import parsed, write_tfrecords

import keras_multigpu as kmg

NAMES = [f"{kind}/{'deep/' * (i % 2)}{i:02}.png" for i in range(16) for kind in ("cat", "dog")]
SETTINGS = {"image_size": 4, "global_batch_size": 8, "seed": 3, "verbose": False}
PATIENCE = 120


@pytest.fixture
def storage(tmp_path):
    with bucket(tmp_path) as made:
        yield made


@pytest.fixture
def photos(tmp_path):
    write_images(tmp_path / "photos", NAMES)
    return tmp_path / "photos"


def assert_same(one, other):
    for left, right in zip(content(one), content(other), strict=True):
        np.testing.assert_array_equal(left, right)


def of(path, **settings):
    return kmg.data.from_directory(path, **{**SETTINGS, **settings})


def identity(batches, exact=False):
    return batches.reading().source.identity(exact)


def test_a_folder_gives_the_batches_of_a_local_one(photos, storage):
    local, remote = of(photos), of("bucket://photos/")
    assert remote.file_paths[0] == "bucket://photos/cat/00.png"
    for arguments in ((0,), (1, 13)):
        assert_same(remote.epoch(*arguments), local.epoch(*arguments))
    # A checkpoint of one resumes with the others.
    assert identity(remote) == identity(local) == identity(of(f"file://{photos}"))
    storage.reads.clear()
    list(remote.epoch(0, 0, (1, 2)))
    assert len(storage.reads) == len(set(storage.reads)) == 16


def test_files_of_a_batch_are_fetched_together(photos, storage):
    """On any number of cores: no file is returned before all 32 are requested."""
    batches = of("bucket://photos", global_batch_size=32)
    storage.fail = in_flight(32, PATIENCE)
    assert len(content(batches.epoch(0))[1]) == 32


def test_with_a_cache_folder_each_file_is_fetched_once(photos, storage, tmp_path):
    cache = {"cache": str(tmp_path / "cache")}
    expected = content(of(photos).epoch(2))
    for run in range(2):  # The second run uses the first one's cache.
        batches = of("bucket://photos", **cache)
        list(batches.epoch(0))
        np.testing.assert_array_equal(content(batches.epoch(2))[0], expected[0])
        assert len(storage.reads) == len(NAMES), run
    write_images(tmp_path, ["x", "photos/cat/00.png"])
    os.utime(photos / "cat/00.png", (1, 1))
    changed = of("bucket://photos", shuffle=False, **cache)
    assert content(changed.epoch(0))[0][0, 0, 0, 0] == 1
    assert len(storage.reads) == 2 * len(NAMES)


def test_a_storage_without_versions_gets_no_cache_folder(photos, storage, tmp_path, monkeypatch):
    monkeypatch.setattr("keras_multigpu.data.addresses._VERSIONS", ())
    with pytest.raises(ValueError, match="cannot tell whether a file has changed.*bucket://photos"):
        list(of("bucket://photos", cache=str(tmp_path / "cache")).epoch(0))


def test_tables_lists_and_masks_are_read_from_addresses(tmp_path, storage):
    names = [f"{i}.png" for i in range(5)]
    write_images(tmp_path, [*names, *[f"masks/{name}" for name in names]])
    write_csv(tmp_path / "table.csv", ["path", "label"], zip(names, "ababa", strict=True))
    settings = {"image_size": 4, "global_batch_size": 3}
    table = kmg.data.from_files("bucket://table.csv", **settings)
    local = kmg.data.from_files(tmp_path / "table.csv", **settings)
    assert_same(table.epoch(0), local.epoch(0))
    assert identity(table) == identity(local)
    grey = [tmp_path / "masks" / name for name in names]
    for path in grey:
        write_grey(path)
    masks = [f"masks/{name}" for name in names]
    for resize in ("stretch", "random_crop"):
        pair = [
            kmg.data.from_files(names, masks, task="mask", root=root, resize=resize, **settings)
            for root in ("bucket://", tmp_path)
        ]
        assert_same(*(batches.epoch(0) for batches in pair))
    mixed = kmg.data.from_files(["bucket://1.png", str(tmp_path / "1.png")], **settings)
    assert numbers_and_more(mixed.epoch(0)) == [[1, 1]]
    assert identity(mixed, exact=True)["files"] != identity(mixed)["files"]


def write_grey(path):
    import tensorflow as tf

    path.write_bytes(tf.io.encode_png(np.full((4, 4, 1), int(path.stem), np.uint8)).numpy())


def test_shards_are_read_and_nothing_is_written_beside_them(tmp_path, storage):
    (tmp_path / "shards").mkdir()
    write_tfrecords(tmp_path / "shards")
    shutil.copytree(tmp_path / "shards", tmp_path / "copy")
    settings = {"global_batch_size": 5, "seed": 3}
    local = kmg.data.from_records(tmp_path / "copy", parsed, **settings)
    for place in ("bucket://shards", "bucket://shards/data*", "bucket://shards/"):
        remote = kmg.data.from_records(place, parsed, **settings)
        assert_same(remote.epoch(1, 4), local.epoch(1, 4))
    assert identity(remote) == identity(local)
    files, copies = (sorted(os.listdir(tmp_path / name)) for name in ("shards", "copy"))
    assert files == copies
    single = kmg.data.from_records(f"bucket://shards/{files[0]}", parsed)
    assert single.num_examples == 8


def test_damage_is_named_by_its_address(photos, storage):
    batches = of("bucket://photos", on_error="skip")
    (photos / "cat/00.png").unlink()
    (photos / "cat/02.png").write_bytes(b"")
    (photos / "dog/04.png").write_bytes((photos / "dog/04.png").read_bytes()[:-20])
    with pytest.warns(UserWarning, match="3 damaged examples: bucket://photos/cat/00.png"):
        assert len(content(batches.epoch(0))[1]) == len(NAMES) - 3
    found = {Path(name).stem: cause for name, cause in batches.quarantine}
    assert found["00"] == "it does not exist, or not any more"
    assert found["02"] == "it is empty"
    assert found["04"].startswith("it is truncated")


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_an_unreachable_storage_is_not_damage(on_error, photos, storage, tmp_path):
    """No example is skipped: the run ends, and can be resumed later."""

    def gone(path):
        if path.endswith(("04.png", "data.tfrecord-00002-of-00004")):
            raise TimeoutError("no answer")

    write_tfrecords(tmp_path)
    shards = kmg.data.from_records("bucket://data*", parsed, on_error=on_error)
    batches = of("bucket://photos", on_error=on_error)
    storage.fail = staticmethod(gone)
    for one in (batches, shards):
        with pytest.raises(Exception, match="no answer") as error:
            list(one.epoch(0))
        assert isinstance(one.reading().failure_in(error.value), OSError)


def no_credentials(path):
    raise RuntimeError("Unable to locate\n  credentials")


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("bucket://none", ValueError, "There is nothing at the address.*address='bucket://none'"),
        ("bucket://photos/cat/00.png", ValueError, "The path is a file.*from_files"),
        ("bucket://secret", OSError, "RuntimeError: Unable to locate credentials.*FSSPEC_S3_ANON"),
        ("gss://bucket/photos", OSError, "Protocol not known: gss"),
        ("needs://bucket/photos", ImportError, "Install needs.*pip install gcsfs"),
        ("zip://photos::bucket://a.zip", ValueError, "a folder inside a file.*from_files"),
        (Path("gs://bucket/photos"), ValueError, "does not exist.*an address is passed as a text"),
    ],
)
def test_wrong_addresses_are_named_at_once(path, kind, message, photos, storage):
    secret = staticmethod(lambda path: path.endswith("secret") and no_credentials(path))
    storage.fail = secret
    fsspec.register_implementation("needs", "needs.Fs", errtxt="Install needs", clobber=True)
    with pytest.raises(kind, match=message):
        of(path)


def test_without_fsspec_the_error_says_what_to_install(photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match="A package is missing.*pip install gcsfs"):
        of("gs://bucket/photos")


def test_missing_files_at_addresses_are_named(photos, storage):
    with pytest.raises(ValueError, match="a folder on a local disk"):
        of("bucket://photos", cache="bucket://cache")
    with pytest.raises(ValueError, match="None of 1 files that were looked for"):
        kmg.data.from_files(["bucket://none.png"])
    with pytest.raises(ValueError, match="neither a list nor an existing table"):
        kmg.data.from_files("bucket://none.csv")
    with pytest.raises(ValueError, match="There is nothing at the address"):
        kmg.data.from_records("bucket://none.tfrecord")
    with pytest.raises(ValueError, match="There are no shards"):
        kmg.data.from_records("bucket://none-*.tfrecord")
