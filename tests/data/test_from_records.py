"""`from_records`: TFRecord files in any order, through an index that is made once."""

import gzip
import os
import shutil
import sys

import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.data.sources import shards as module

COUNT = 23
X = np.random.default_rng(0).normal(size=(COUNT, 4)).astype(np.float32)
Y = np.arange(COUNT) % 3
SETTINGS = {"global_batch_size": 5, "seed": 3}
SHARDS = ((0, 8), (8, 8), (8, 16), (16, COUNT))
"""The examples of each; one is empty."""


def write_tfrecords(folder):
    for number, (low, high) in enumerate(SHARDS):
        with tf.io.TFRecordWriter(str(folder / f"data.tfrecord-{number:05}-of-00004")) as writer:
            for x, y in zip(X[low:high], Y[low:high], strict=True):
                features = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=x)),
                    "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[y])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())


KNOWN = {"x": tf.io.FixedLenFeature([4], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


def parsed(record):
    found = tf.io.parse_single_example(record, KNOWN)
    return found["x"], found["y"]


@pytest.fixture
def shards(tmp_path):
    """A folder of shards, and a traced function that makes examples."""
    write_tfrecords(tmp_path)
    return tmp_path, tf.function(parsed)


def rows(dataset):
    return [[part.numpy().tolist() for part in batch] for batch in dataset]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    """The user's cache folder."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def indices_in(cache):
    return {path: path.stat().st_mtime_ns for path in cache.rglob("*.index.npz")}


def test_the_index_is_made_once(shards, monkeypatch, cache):
    """A later run finds it, and rebuilds one that is damaged or belongs to another shard."""
    folder, example = shards
    files = sorted(folder.iterdir())
    before = rows(kmg.data.from_records(folder, example, **SETTINGS).epoch(0))
    # Nothing is written beside the shards, where the user did not ask for it.
    assert sorted(folder.iterdir()) == files
    stored = indices_in(cache)
    assert len(stored) == len(SHARDS)
    made, of = [], module.find_records
    monkeypatch.setattr(module, "find_records", lambda *file: made.append(file) or of(*file))
    assert rows(kmg.data.from_records(folder, example, **SETTINGS).epoch(0)) == before
    assert (made, indices_in(cache)) == ([], stored)
    first, second, third, _ = stored
    first.write_bytes(b"PK\x03\x04 but no more")
    second.write_bytes(third.read_bytes())
    assert rows(kmg.data.from_records(folder, example, **SETTINGS).epoch(0)) == before
    assert len(made) == 2


def test_a_shard_that_was_replaced_is_noticed(tmp_path):
    """Before a run by its first bytes, even at equal size and time; during a run by its records."""
    path = tmp_path / "a.tfrecord"

    def write(*records):
        with tf.io.TFRecordWriter(str(path)) as writer:
            for record in records:
                writer.write(record)
        os.utime(path, (1, 1))

    def read():
        made = kmg.data.from_records(path, lambda record: record, shuffle=False)
        return made, lambda: [batch.numpy().tolist() for batch in made.epoch(0)]

    write(b"one", b"three")
    assert read()[1]() == [[b"one", b"three"]]
    write(b"three", b"one")
    assert read()[1]() == [[b"three", b"one"]]
    _, again = read()
    write(b"twelve", b"no")
    with pytest.raises(tf.errors.OpError, match="record 0 of .*a.tfrecord.*has changed since"):
        again()


def test_without_a_cache_folder_indices_are_made_again(shards, cache, caplog):
    folder, example = shards
    (cache / "keras_multigpu").write_text("no folder")
    assert len(kmg.data.from_records(folder, example, **SETTINGS)) == 5
    assert "4 of 4 indices could not be stored" in caplog.text


def damaged(path, place, bits=1):
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)


def skipped(folder, example, count):
    """The number of examples, the number read, and the quarantine sorted by shard."""
    made = kmg.data.from_records(folder, example, on_error="skip", shuffle=False, **SETTINGS)
    with pytest.warns(UserWarning, match=f"skipped {count} damaged"):
        batches = rows(made.epoch(0))
    quarantine = sorted(made.quarantine, key=lambda one: (one.name.split(" of ")[-1], one.name))
    return made.num_examples, sum(len(y) for _, y in batches), quarantine


def test_damage_in_a_tfrecord_file_is_named(tmp_path):
    write_tfrecords(tmp_path)
    first, _, second, third = sorted(tmp_path.iterdir())
    length = first.stat().st_size // 8
    damaged(first, 3 * length + 30)
    with pytest.raises(tf.errors.OpError, match="record 3 of .*00000-of-00004.*checksum differs"):
        list(kmg.data.from_records(tmp_path, parsed).epoch(0))
    damaged(second, 5 * length + 2)  # The length of a record; what follows it is lost.
    third.write_bytes(third.read_bytes()[:-10])
    count, read, quarantine = skipped(tmp_path, parsed, 3)
    assert (count, read) == (COUNT - 2, COUNT - 2 - 3)
    assert [cause for _, cause in quarantine] == [
        "its checksum differs",
        f"its length is damaged, so {3 * length - 12} bytes after it are lost",
        "its shard ends within it, or has changed since it was indexed",
    ]
    assert [name.split(" of ")[0] for name, _ in quarantine] == ["record 3", "record 5", "record 6"]


def test_patterns_and_lists_are_read_and_wrong_paths_are_named(tmp_path):
    write_tfrecords(tmp_path)
    pattern = str(tmp_path / "data.tfrecord-0000[02]*")
    first, empty, _, last = sorted(tmp_path.iterdir())

    def read(paths):
        return kmg.data.from_records(paths, parsed)

    assert read([last, pattern]).num_examples == 7 + 8 + 8
    assert rows(read([last, pattern]).evaluation().epoch(0))[0][1][:2] == Y[16:18].tolist()
    (tmp_path / "notes.txt").write_text("no shard")
    os.mkfifo(tmp_path / "pipe")
    for paths, error, message in (
        (tmp_path / "pipe", OSError, "The shard .*pipe cannot be read: Illegal seek"),
        ([pattern, first], ValueError, "1 shards are named twice"),
        (tmp_path / "none", FileNotFoundError, "The shard .*none cannot be read"),
        (str(tmp_path / "none-*.tfrecord"), ValueError, "There are no shards"),
        (3, ValueError, "`paths` is not a path"),
        (tmp_path / "notes.txt", ValueError, "not a TFRecord file.*`from_source`"),
        (empty, ValueError, "There are no examples in data.tfrecord-00001"),
    ):
        with pytest.raises(error, match=message):
            read(paths)
    packed = tmp_path / "data.tfrecord.gz"
    packed.write_bytes(gzip.compress(first.read_bytes()))
    with pytest.raises(ValueError, match="data.tfrecord.gz is compressed"):
        read(packed)
    (tmp_path / "packed").mkdir()
    with pytest.raises(ValueError, match="is compressed"):
        read(packed.rename(tmp_path / "packed" / packed.name).parent)


def test_the_identity_depends_on_the_files_not_on_their_folder(tmp_path):
    """A cache alone tells folders apart."""
    (tmp_path / "one").mkdir()
    write_tfrecords(tmp_path / "one")

    def of(folder, exact=False):
        source = kmg.data.from_records(folder, parsed).reading().source
        return source.identity(exact)

    shutil.copytree(tmp_path / "one", tmp_path / "other")
    assert of(tmp_path / "one") == of(tmp_path / "other")
    assert of(tmp_path / "one", True) != of(tmp_path / "other", True)
    last = max((tmp_path / "other").glob("data*"))
    last.write_bytes(2 * last.read_bytes())
    assert of(tmp_path / "one")["shards"] != of(tmp_path / "other")["shards"]


def test_checksums_equal_tensorflows(tmp_path):
    path = tmp_path / "a.tfrecord"
    for size in (0, 1, 3, 2048, 30_000):
        content = np.random.default_rng(size).bytes(size)
        with tf.io.TFRecordWriter(str(path)) as writer:
            writer.write(content)
        written = path.read_bytes()
        assert module.masked_crc(content) == int.from_bytes(written[-4:], "little")
        assert module.masked_crc(written[:8]) == int.from_bytes(written[8:12], "little")


def test_without_google_crc32c_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(ImportError, match="google-crc32c is not installed.*pip install google-crc"):
        kmg.data.from_records(tmp_path)
