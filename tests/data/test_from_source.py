"""`from_source`: the batches of `from_arrays`, from any object with numbered items."""

import collections
import json
import os
import random
import sys
import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.naps import with_naps
from helpers.processes_left import ended_process, python_path
from test_from_records import COUNT, X, Y, parsed, write_tfrecords

import keras_multigpu as kmg
from keras_multigpu.identities import changes

SETTINGS = {"global_batch_size": 5, "seed": 3}


class Numbered:
    """A minimal source, like a map-style `Dataset` of PyTorch."""

    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        # A Python integer, never negative.
        assert type(index) is int and 0 <= index < COUNT
        return X[index], Y[index]


class Several(Numbered):
    """Also reads several items at once, given a list of Python integers."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


def hugging_face():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})


def table():
    pandas = pytest.importorskip("pandas")
    columns = {name: X[:, number] for number, name in enumerate("abcd")}
    return pandas.DataFrame({**columns, "y": Y}).to_dict("records")


def array_record(folder):
    records = pytest.importorskip("array_record.python")
    from array_record.python import array_record_data_source, array_record_module

    assert records is not None
    path = str(folder / "data.array_record")
    writer = array_record_module.ArrayRecordWriter(path, "group_size:1")
    for x, y in zip(X, Y, strict=True):
        writer.write(x.tobytes() + bytes([y]))
    writer.close()
    return array_record_data_source.ArrayRecordDataSource(path)


def of_bytes(record):
    return np.frombuffer(record[:16], np.float32), record[16]


def identify_dict(item):
    return item["x"], item["y"]


def source(make, example=None):
    return lambda folder, **settings: kmg.data.from_source(make(folder), example, **settings)


def records(folder, **settings):
    write_tfrecords(folder)
    return kmg.data.from_records(folder, tf.function(parsed), **settings)


SOURCES = {
    "least": source(lambda _: Numbered()),
    "several": source(lambda _: Several()),
    "list": source(lambda _: list(zip(X, Y, strict=True))),
    "tensors": source(lambda _: Numbered(), lambda item: tuple(map(tf.constant, item))),
    "traced": source(lambda _: Numbered(), tf.function(lambda item: (item[0] + 0, item[1]))),
    "hugging face": source(lambda _: hugging_face(), identify_dict),
    "pandas": source(
        lambda _: table(), lambda row: (np.float32([row[each] for each in "abcd"]), row["y"])
    ),
    "array_record": source(array_record, of_bytes),
    "TFRecord": records,
}


def rows(dataset):
    return [[part.numpy().tolist() for part in batch] for batch in dataset]


@pytest.mark.parametrize("name", SOURCES)
def test_the_batches_equal_those_of_the_same_arrays(name, tmp_path):
    """In three epochs, from the middle of an epoch, and in the parts of two workers."""
    made = SOURCES[name](tmp_path, **SETTINGS)
    arrays = kmg.data.from_arrays(X, Y, **SETTINGS)
    assert made.epoch(0).element_spec == arrays.epoch(0).element_spec
    assert (rows(made.epochs(0).take(15))) == rows(arrays.epochs(0).take(15))
    for arguments in ((1, 8), (2, 3, (0, 2)), (2, 3, (1, 2))):
        assert rows(made.epoch(*arguments)) == rows(arrays.epoch(*arguments))
    assert made.class_counts == arrays.class_counts == {"0": 8, "1": 8, "2": 7}
    for one, other in zip(made.split(0.3), arrays.split(0.3), strict=True):
        assert rows(one.epoch(0)) == rows(other.epoch(0))


def test_a_worker_reads_only_its_own_part():
    asked = []

    def example(index):
        asked.append(index)
        return index

    made = kmg.data.from_source(range(COUNT), example, **SETTINGS)
    del asked[:]  # Item 0 says what the examples look like.
    part = sum((batch.numpy().tolist() for batch in made.epoch(1, shard=(1, 2))), [])
    assert sorted(asked) == sorted(part) and COUNT // 2 - 3 < len(part) <= COUNT // 2


def test_items_may_hold_images_texts_lists_and_weights():
    image = pytest.importorskip("PIL.Image").fromarray(np.full((4, 6, 3), 7, np.uint8))

    def example(index):
        x = {"image": image, "text": f"word {index}", "list": [index, 2, 3]}
        return x, (index, [0.5]), index

    ((x, y, weight),) = kmg.data.from_source(range(3), example, shuffle=False).epoch(0)
    assert (x["image"].dtype, x["image"].shape) == (tf.uint8, (3, 4, 6, 3))
    assert x["text"].numpy().tolist() == [b"word 0", b"word 1", b"word 2"]
    assert x["list"].numpy().tolist() == [[0, 2, 3], [1, 2, 3], [2, 2, 3]]
    assert (y[0].dtype, y[1].dtype, weight.dtype) == (tf.int64, tf.float32, tf.float32)
    assert weight.numpy().tolist() == [0, 1, 2]


@with_naps
def test_threads_read_slow_items_concurrently(nap):
    def slow(index):
        time.sleep(nap)
        return index

    def seconds(threads):
        made = kmg.data.from_source(range(16), slow, threads=threads, global_batch_size=8)
        began = time.monotonic()
        assert sorted(sum((batch.numpy().tolist() for batch in made.epoch(0)), [])) == [*range(16)]
        return time.monotonic() - began

    assert seconds(8) < seconds(1) / 2


def test_with_threads_1_one_thread_reads_all_items():
    """And always the same one, as a database connection requires."""
    seen, inside = set(), []

    def example(index):
        inside.append(index)
        alone = len(inside) == 1
        time.sleep(0.001)
        inside.remove(index)
        seen.add((threading.get_ident(), alone))
        return index

    made = kmg.data.from_source(range(COUNT), example, threads=1, global_batch_size=4)
    for epoch in range(2):
        list(made.epoch(epoch))
    assert [alone for _, alone in seen] == [True]


class Damaged(Several):
    def __getitem__(self, index):
        if index == 4:
            raise OSError("image file is truncated")
        return None if index == 7 else super().__getitem__(index)


@pytest.mark.parametrize("kind", [Damaged, type("Single", (Damaged,), {"__getitems__": None})])
def test_a_damaged_item_is_named_by_its_number(kind):
    made = kmg.data.from_source(kind(), shuffle=False, **SETTINGS)
    with pytest.raises(tf.errors.OpError, match="item 4 of .* cannot be read: OSError: image file"):
        list(made.epoch(0))
    made = kmg.data.from_source(kind(), on_error="skip", shuffle=False, **SETTINGS)
    with pytest.warns(UserWarning, match="Epoch 1 skipped 2 damaged examples: item 4 of"):
        batches = rows(made.epoch(0))
    assert [len(y) for _, y in batches] == [4, 4, 5, 5, 3]
    assert [cause for _, cause in sorted(made.quarantine)][1] == "it is None"
    with pytest.raises(ValueError, match=r"item 4 .*its class is needed; pass `labels`"):
        made.split(0.5)
    named = kmg.data.from_source(kind(), on_error="skip", labels=Y, class_names="abc", **SETTINGS)
    assert named.split(0.5)[0].class_counts == {"a": 4, "b": 4, "c": 3}


def test_the_first_item_may_be_damaged():
    items = [None, None, 5, 6]
    with pytest.raises(ValueError, match="item 0 of list cannot be read: it is None"):
        kmg.data.from_source(items)
    made = kmg.data.from_source(items, on_error="skip", shuffle=False)
    with pytest.warns(UserWarning, match="skipped 2 damaged"):
        assert [batch.numpy().tolist() for batch in made.epoch(0)] == [[5, 6]]
    with pytest.raises(ValueError, match="item 15 of list"):
        kmg.data.from_source([None] * 20 + [1], on_error="skip")


@pytest.mark.parametrize(
    ("items", "message"),
    [
        ([[1, 2], [1]], r"its shape is \(1,\) instead of \(2,\)"),
        ([1, 2.5], "its values are float64, which int64 cannot hold"),
        ([np.uint8(1), 300], "its values are int64, which uint8 cannot hold"),
        (["a", 1], "it is a number instead of a text"),
        ([1, "1"], "it is a text instead of a number"),
        (["a", object()], "it is neither a number nor a text"),
        ([(1, 2), 1], r"it is \('int64\[\]', 'None', 'None'\)"),
        ([{"a": 1}, {"b": 1}], r"it is \({'b': 'int64"),
    ],
)
def test_items_that_differ_are_refused_even_if_damage_is_skipped(items, message):
    made = kmg.data.from_source(items, on_error="skip", shuffle=False)
    with pytest.raises(
        tf.errors.OpError, match=f"item 1 of list differs from item 0 of list: {message}"
    ):
        list(made.epoch(0))


def test_a_source_that_changes_its_length_is_named():
    items = [1, 2, 3]
    made = kmg.data.from_source(items, shuffle=False)
    items.append(4)
    with pytest.raises(tf.errors.OpError, match="list had 3 items and now has 4"):
        list(made.epoch(0))


def test_random_items_are_noticed_and_not_cached():
    draws = np.random.default_rng(0)
    with pytest.warns(UserWarning, match="item 0 of range differs each time.*`augment`"):
        made = kmg.data.from_source(range(3), lambda index: draws.normal())
    with pytest.raises(ValueError, match="drawn again"):
        made.with_(cache="memory")


def test_a_cache_folder_needs_a_version(tmp_path):
    """With a version, each item is read once."""
    counts = collections.Counter()

    def example(index):
        counts[index] += 1
        return index

    made = kmg.data.from_source(range(5), example, version="1", cache=tmp_path)
    for epoch in range(2):
        assert sorted(next(iter(made.epoch(epoch))).numpy().tolist()) == [0, 1, 2, 3, 4]
    assert max(counts.values()) <= 3  # Item 0 is read for its shape, too.
    with pytest.raises(ValueError, match="cannot tell whether range has changed.*`version`"):
        kmg.data.from_source(range(5), cache=tmp_path)


def test_the_identity_changes_with_version_length_and_function():

    def of(source=range(5), example=None, **settings):
        made = kmg.data.from_source(source, example, **settings)
        return json.loads(json.dumps(made.reading().identity()))

    before = of(example=lambda index: index + 1)
    assert of(example=lambda index: index + 1) == before
    assert set(changes(before, of(example=lambda index: index + 2))) == {"source.example.code"}
    assert set(changes(of(), of(version="2"))) == {"source.version"}
    assert set(changes(of(), of(range(6)))) == {"source.examples"}


@pytest.mark.slow
def test_reading_numpy_data_initializes_no_device():
    """The CPU can still be split into devices afterwards."""
    code = (
        "import keras_multigpu as kmg\n"
        "kmg.data.from_source([1, 2])\n"
        "assert len(kmg.strategy(devices=2).extended.worker_devices) == 2\n"
    )
    environment = {**os.environ, "PYTHONPATH": python_path()}
    ended = ended_process([sys.executable, "-c", code], env=environment)
    assert ended.returncode == 0, ended.stderr


class Drawn:
    """Items from the generators of the whole process."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.random.random(2) + random.random()  # noqa: NPY002


class DrawnBatches(Drawn, keras.utils.PyDataset):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: kmg.data.from_source(Drawn()),
        lambda: kmg.data.from_flow(DrawnBatches()),
        lambda: kmg.data.from_flow(lambda: iter([Drawn()[0]])),
    ],
)
@pytest.mark.filterwarnings("ignore:item 0 of Drawn differs each time")
def test_looking_at_the_first_example_draws_nothing_from_the_process(make):
    states = []
    for _ in range(2):
        states.append(repr((random.getstate(), np.random.get_state())))  # noqa: NPY002
        make()
    assert states[0] == states[1]
