"""`from_records`: TFRecord and tar shards in any order, through an index that is made once."""

import gzip
import io
import os
import shutil
import tarfile

import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.data.items import checksums
from keras_multigpu.data.items.shard import TarSamples, TFRecords

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


def add(archive, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))


def write_tars(folder):
    for number, (low, high) in enumerate(SHARDS):
        with tarfile.open(folder / f"data-{number}.tar", "w") as archive:
            for index in range(low, high):
                add(archive, f"part/{index:03}.x.npy", X[index].tobytes())
                add(archive, f"part/{index:03}.CLS", str(Y[index]).encode())


KNOWN = {"x": tf.io.FixedLenFeature([4], tf.float32), "y": tf.io.FixedLenFeature([], tf.int64)}


def parsed(record):
    found = tf.io.parse_single_example(record, KNOWN)
    return found["x"], found["y"]


def of_sample(sample):
    assert sample["__key__"].startswith("part/0")
    return np.frombuffer(sample["x.npy"], np.float32), int(sample["cls"])


FORMATS = {
    "tfrecord": (write_tfrecords, parsed),
    "tfrecord, traced": (write_tfrecords, tf.function(parsed)),
    "tar": (write_tars, of_sample),
}


@pytest.fixture(params=FORMATS)
def shards(request, tmp_path):
    """A folder of shards, and the function that makes examples."""
    write, example = FORMATS[request.param]
    write(tmp_path)
    return tmp_path, example


def rows(dataset):
    return [[part.numpy().tolist() for part in batch] for batch in dataset]


def test_the_batches_equal_those_of_the_same_arrays(shards):
    folder, example = shards
    made = kmg.data.from_records(folder, example, **SETTINGS)
    arrays = kmg.data.from_arrays(X, Y, **SETTINGS)
    assert made.epoch(0).element_spec == arrays.epoch(0).element_spec
    assert rows(made.epochs(0).take(15)) == rows(arrays.epochs(0).take(15))
    for arguments in ((1, 8), (2, 3, (0, 2)), (2, 3, (1, 2))):
        assert rows(made.epoch(*arguments)) == rows(arrays.epoch(*arguments))
    assert made.class_counts == arrays.class_counts


def indices_in(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob(".*.index.npz")}


def test_the_index_is_made_once(shards, monkeypatch):
    """A later run finds it, and rebuilds one that is damaged or belongs to another shard."""
    folder, example = shards
    before = rows(kmg.data.from_records(folder, example, **SETTINGS).epoch(0))
    stored = indices_in(folder)
    assert len(stored) == len(SHARDS)
    made = []
    for kind in (TFRecords, TarSamples):
        of = kind.index_of
        index_of = staticmethod(lambda file, size, of=of: made.append(size) or of(file, size))
        monkeypatch.setattr(kind, "index_of", index_of)
    assert rows(kmg.data.from_records(folder, example, **SETTINGS).epoch(0)) == before
    assert (made, indices_in(folder)) == ([], stored)
    names = sorted(stored)
    (folder / names[0]).write_bytes(b"PK\x03\x04 but no more")
    (folder / names[1]).write_bytes((folder / names[2]).read_bytes())
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


def test_indices_are_stored_beside_the_shards_or_in_index_dir(shards, tmp_path_factory, caplog):
    folder, example = shards
    for path in [*folder.iterdir()]:
        (folder / f".{path.name}.index.npz").mkdir()  # Nothing can be written there.
    assert len(kmg.data.from_records(folder, example, **SETTINGS)) == 5
    assert "4 of 4 indices could not be stored" in caplog.text
    caplog.clear()
    elsewhere = tmp_path_factory.mktemp("indices") / "of these"
    for place in (elsewhere, folder):
        for _ in range(2):
            kmg.data.from_records(folder, example, index_dir=place)
        assert caplog.text == ""
    assert len([*elsewhere.iterdir()]) == 4


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


def test_damage_in_a_tar_archive_is_named(tmp_path):
    write_tars(tmp_path)
    first, empty, second, third = sorted(tmp_path.iterdir())
    damaged(first, 7 * 2048 + 100)  # The header of the last sample's first file.
    # One ends within the content of a file, the other within the padding after it.
    third.write_bytes(third.read_bytes()[: 2048 * 3 + 512 + 8])
    with tarfile.open(empty, "w") as archive:
        add(archive, "part/098.x.npy", X[0].tobytes())
        add(archive, "part/098.cls", b"1")
    empty.write_bytes(empty.read_bytes()[: 1024 + 512 + 9])
    with tarfile.open(second, "a") as archive:
        add(archive, "part/099.x.npy", b"")
    count, read, quarantine = skipped(tmp_path, of_sample, 5)
    assert (count, read) == (8 + 2 + 9 + 5, 7 + 1 + 8 + 3)
    lost = "its archive is damaged or cut off from here on"
    assert [cause[:46] for _, cause in quarantine] == [
        lost,
        lost,
        "`example` raised KeyError: 'cls' (the item has __key__, x.npy)"[:46],
        "its archive ends within it, or has changed since"[:46],
        lost,
    ]
    assert f"sample 3 (part/019) of {third}" == quarantine[3].name


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_archives_of_every_format_are_read(kind, tmp_path):
    """Long and non-ASCII names, folders and links; files without an extension are left out."""
    names = ["a.x", "a.y.z", "déjà/vu.x", f"{'folder/' * 20}b.x", "c", ".d.x", f"{'n' * 90}.x"]
    if kind != tarfile.USTAR_FORMAT:
        names += [f"{'e' * 200}.x", "f.x"]
    with tarfile.open(tmp_path / "a.tar", "w", format=kind) as archive:
        for name in names:
            add(archive, name, name.encode() * 100)
        for type_ in (tarfile.DIRTYPE, tarfile.SYMTYPE):
            other = tarfile.TarInfo("folder.x")
            other.type, other.linkname = type_, "a.x"
            archive.addfile(other)
        add(archive, "last.x", b"")
    seen = []
    made = kmg.data.from_records(
        tmp_path / "a.tar", lambda sample: seen.append(sample) or 1, shuffle=False, threads=1
    )
    del seen[:]
    list(made.epoch(0))
    found = [
        (f"{sample['__key__']}.{ending}", content)
        for sample in seen
        for ending, content in sample.items()
        if ending != "__key__"
    ]
    expected = [(name, name.encode() * 100) for name in names if name not in ("c", ".d.x")]
    assert found == [*expected, ("last.x", b"")]
    assert [*seen[0]] == ["__key__", "x", "y.z"]


def test_patterns_and_lists_are_read_and_wrong_paths_are_named(tmp_path):
    write_tars(tmp_path)
    pattern = str(tmp_path / "data-[02]*.tar")
    last = tmp_path / "data-3.tar"

    def read(paths):
        return kmg.data.from_records(paths, of_sample)

    assert read([last, pattern]).num_examples == 7 + 8 + 8
    assert rows(read([last, pattern]).evaluation().epoch(0))[0][1][:2] == Y[16:18].tolist()
    (tmp_path / "notes.txt").write_text("no shard")
    write_tfrecords(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    for paths, error, message in (
        (tmp_path / "pipe", OSError, "The shard .*pipe cannot be read: Illegal seek"),
        ([pattern, tmp_path / "data-0.tar"], ValueError, "1 shards are named twice"),
        (tmp_path, ValueError, "Some shards are TFRecord files and others tar archives"),
        (tmp_path / "none", FileNotFoundError, "The shard .*none cannot be read"),
        (str(tmp_path / "none-*.tar"), ValueError, "There are no shards"),
        (3, ValueError, "`paths` is not a path"),
        (tmp_path / "notes.txt", ValueError, "neither a TFRecord file nor a tar archive"),
        (tmp_path / "data-1.tar", ValueError, "There are no examples in data-1.tar"),
    ):
        with pytest.raises(error, match=message):
            read(paths)
    packed = tmp_path / "data-0.tar.gz"
    packed.write_bytes(gzip.compress((tmp_path / "data-0.tar").read_bytes()))
    with pytest.raises(ValueError, match="data-0.tar.gz is compressed"):
        read(packed)
    (tmp_path / "packed").mkdir()
    with pytest.raises(ValueError, match="is compressed"):
        read(packed.rename(tmp_path / "packed" / packed.name).parent)
    with tarfile.open(last, "a") as archive:
        add(archive, "part/030.x", b"")
        add(archive, "part/030.X", b"")
    with pytest.raises(ValueError, match="Two files of a tar archive have the name 'part/030.X'"):
        read(last)


def test_the_identity_depends_on_the_files_not_on_their_folder(tmp_path):
    """A cache alone tells folders apart."""
    (tmp_path / "one").mkdir()
    write_tars(tmp_path / "one")

    def of(folder, exact=False):
        source = kmg.data.from_records(folder, of_sample).reading().source
        return source.identity(exact)

    shutil.copytree(tmp_path / "one", tmp_path / "other")
    assert of(tmp_path / "one") == of(tmp_path / "other")
    assert of(tmp_path / "one", True) != of(tmp_path / "other", True)
    with tarfile.open(tmp_path / "other" / "data-2.tar", "a") as archive:
        add(archive, "part/050.x.npy", X[0].tobytes() * 1000)
    assert of(tmp_path / "one")["shards"] != of(tmp_path / "other")["shards"]


@pytest.mark.parametrize("library", ["numpy", "google-crc32c"])
def test_checksums_equal_tensorflows(library, tmp_path, monkeypatch):
    if library == "numpy":
        monkeypatch.setattr(checksums, "native_crc", lambda: None)
    else:
        pytest.importorskip("google_crc32c")
    path = tmp_path / "a.tfrecord"
    for size in (0, 1, 3, 4, 5, 2047, 2048, 2049, 30_000):
        content = np.random.default_rng(size).bytes(size)
        with tf.io.TFRecordWriter(str(path)) as writer:
            writer.write(content)
        written = path.read_bytes()
        assert checksums.masked_crc(content) == int.from_bytes(written[-4:], "little")
        assert checksums.masked_crc(written[:8]) == int.from_bytes(written[8:12], "little")
