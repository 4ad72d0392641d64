"""What each source promises: the table of the documentation, cell by cell, and that it resumes."""

import itertools
import re
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.reused_models import reused
from helpers.stopped_runs import StopAt, Stopped

import keras_multigpu as kmg
from keras_multigpu.callbacks import ResumableCheckpoint

tfds = pytest.importorskip("tensorflow_datasets")
pytest.importorskip("cv2")
tfds_builder = pytest.importorskip("helpers.tfds_builder")

PAGE = Path(__file__).parents[2] / "docs" / "guarantees" / "which_promise.md"
COLUMNS = ("shuffle", "start", "parts", "cache", "damage")
COUNT = 23
X = np.broadcast_to(np.arange(COUNT, dtype=np.uint8)[:, None, None, None], (COUNT, 8, 6, 3))
Y = np.arange(COUNT) % 3
LEGACY = tf.keras.preprocessing.image  # noqa: TID251 (its flows are one of the sources)


def table():
    text = re.sub(r"\[(.*?)\]\(.*?\)", r"\1", PAGE.read_text())  # Links read as their text.
    lines = [line for line in text.splitlines() if line.startswith("| `from_")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {
        source: dict(zip(COLUMNS, cells, strict=True))
        for sources, *cells in rows
        for source in sources.split("; ")
    }


class Own(LEGACY.ImageDataGenerator):
    """A generator that cannot be translated."""

    def standardize(self, x):
        return x


class Halves(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[index::2], Y[index::2]


def generated():
    for start in range(0, COUNT, 7):
        yield X[start : start + 7], Y[start : start + 7]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    kinds = "files", "array_record", "tfrecord", "records"
    places = {kind: tmp_path_factory.mktemp(kind) for kind in kinds}
    with tf.io.TFRecordWriter(str(places["records"] / "all.tfrecord")) as writer:
        for image, label in zip(X, Y, strict=True):
            writer.write(bytes([label]) + image.tobytes())
    for number, image in enumerate(X):
        path = places["files"] / "abc"[number % 3] / f"{number:02}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(tf.io.encode_png(image).numpy())
    tfds.disable_progress_bar()
    for kind in ("array_record", "tfrecord"):
        tfds_builder.Spots(data_dir=places[kind], file_format=kind).download_and_prepare()
    return places


def flow(generator, places):
    return generator.flow_from_directory(
        places["files"], target_size=(8, 6), class_mode="sparse", batch_size=5
    )


SOURCES = {
    "`from_directory`": lambda places, **settings: kmg.data.from_directory(
        places["files"], image_size=(8, 6), verbose=False, **settings
    ),
    "`from_files`": lambda places, **settings: kmg.data.from_files(
        sorted(places["files"].rglob("*.png")), Y, image_size=(8, 6), **settings
    ),
    "`from_arrays`": lambda places, **settings: kmg.data.from_arrays(X, Y, **settings),
    "`from_source`": lambda places, **settings: kmg.data.from_source(
        [*zip(X, Y, strict=True)], version="1", **settings
    ),
    "`from_records`": lambda places, **settings: kmg.data.from_records(
        places["records"],
        lambda record: (np.frombuffer(record[1:], np.uint8).reshape(8, 6, 3), record[0]),
        **settings,
    ),
    "`from_tfds`, `array_record`": lambda places, **settings: kmg.data.from_tfds(
        "spots", "train", data_dir=places["array_record"], **settings
    ),
    "`from_tfds`, TFRecord": lambda places, **settings: kmg.data.from_tfds(
        "spots", "train", data_dir=places["tfrecord"], **settings
    ),
    "`from_flow`, translated": lambda places, **settings: kmg.data.from_flow(
        flow(LEGACY.ImageDataGenerator(), places), **settings
    ),
    "`from_flow`, as the flow itself runs": lambda places, **settings: kmg.data.from_flow(
        flow(Own(), places), **settings
    ),
    "`from_flow`, a `PyDataset`": lambda places, **settings: kmg.data.from_flow(
        Halves(), **settings
    ),
    "`from_flow`, a generator": lambda places, **settings: kmg.data.from_flow(
        generated, **settings
    ),
    "`from_dataset`": lambda places, **settings: kmg.data.from_dataset(
        tf.data.Dataset.from_tensor_slices((X, Y)), **settings
    ),
}


def numbers(dataset):
    return [x[:, 0, 0, 0].numpy().astype(int).tolist() for x, *_ in dataset]


def joined(batches):
    return list(itertools.chain(*batches))


@pytest.fixture(params=SOURCES)
def row(request, places):
    make = SOURCES[request.param]
    return table()[request.param], lambda **settings: make(
        places, **{"global_batch_size": 4, "seed": 1, **settings}
    )


def refuses(make, **settings):
    try:
        next(iter(make(**settings).epoch(0)))
    except ValueError:
        return True
    return False


def test_each_source_has_a_row():
    assert table().keys() == SOURCES.keys()
    sources = {name for name in kmg.data.__all__ if name.startswith("from_")}
    assert {row.split("`")[1] for row in SOURCES} == sources, f"{PAGE.name} and SOURCES have all"


@pytest.mark.slow
def test_each_source_keeps_the_order_it_promises(row):
    """Every example once, shuffled as the table says, from any position, and the same in shares."""
    cells, make = row
    batches = make()
    epochs = [numbers(batches.epoch(number)) for number in (0, 1)]
    assert [sorted(joined(epoch)) for epoch in epochs] == [list(range(COUNT))] * 2

    source = joined(numbers(batches.evaluation().epoch(0)))
    order = kmg.data.from_arrays(np.arange(COUNT), seed=1, global_batch_size=COUNT)
    full = np.array(source)[next(iter(order.epoch(1)))].tolist()
    assert (joined(epochs[1]) == full) is (cells["shuffle"] == "full")
    assert (joined(epochs[1]) == source) is (cells["shuffle"] == "none")
    assert (epochs[0] == epochs[1]) is (cells["shuffle"] == "none")
    if cells["cache"] == "memory, folder":
        assert numbers(make(cache="memory").epoch(1)) == epochs[1]
    if "batches" not in cells["shuffle"]:  # There are too few orders of two.
        other = joined(numbers(make(seed=2).epoch(1)))
        assert (other == joined(epochs[1])) is (cells["shuffle"] == "none")

    tf.random.set_seed(5)  # What the whole program draws from does not matter.
    assert joined(numbers(make().epoch(1, start=9))) == joined(epochs[1])[9:]
    shares = [numbers(batches.epoch(1, shard=(share, 3))) for share in range(3)]
    assert [joined(parts) for parts in zip(*shares, strict=True)] == epochs[1]


@pytest.mark.slow
def test_each_source_offers_what_its_row_says(row, tmp_path):
    cells, make = row
    assert (cells["start"] == "directly") is (cells["shuffle"] == "full")
    for part in (lambda batches: batches.split(0.3), lambda batches: batches.take(5)):
        if cells["parts"] == "no":
            with pytest.raises(ValueError, match="was called on a stream"):
                part(make())
        else:
            part(make())
    for balance in ("class_weight", "oversample"):
        assert refuses(make, balance=balance) is (cells["parts"] == "no")
    assert cells["cache"] in ("memory, folder", "without augmentation", "no")
    assert refuses(make, cache="memory") is (cells["cache"] == "no")
    assert refuses(make, cache=tmp_path / "cache") is (cells["cache"] == "no")
    assert refuses(make, on_error="skip") is (cells["damage"] == "raise only")


def test_augmentation_of_a_flow_is_not_cached(places, tmp_path):
    moving = flow(LEGACY.ImageDataGenerator(horizontal_flip=True), places)
    for cache in ("memory", tmp_path):
        assert refuses(kmg.data.from_flow, flow=moving, cache=cache)


@reused
def classifier():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((8, 6, 3)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(3, activation="softmax")])
    model = kmg.distribute(model, kmg.strategy("one_device", devices=["CPU:0"]))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def trained(data, folder, *callbacks):
    model = classifier()
    checkpoint = ResumableCheckpoint(folder, every_steps=1)
    model.fit(data, epochs=2, verbose=0, callbacks=[*callbacks, checkpoint])
    return [weight.numpy() for weight in model.variables]


# One of each kind: the others start at a position in the same way.
@pytest.mark.parametrize("source", ["`from_files`", "`from_dataset`"])
@pytest.mark.slow
def test_training_resumes_from_every_source(source, places, tmp_path):
    """The run stops in its second epoch; each epoch has its own order."""

    def data():
        return SOURCES[source](places, global_batch_size=5, seed=4)

    whole = trained(data(), tmp_path / "whole")
    with pytest.raises(Stopped):
        trained(data(), tmp_path / "run", StopAt(1, 2, "on_train_batch_begin"))
    for one, other in zip(whole, trained(data(), tmp_path / "run"), strict=True):
        np.testing.assert_array_equal(one, other)
