"""`from_tfds`: real builders, prepared in both kinds of formats without a network."""

import logging
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.processes_left import PATIENCE

from keras_multigpu.data import from_files, from_tfds

tfds = pytest.importorskip("tensorflow_datasets")
tfds_builder = pytest.importorskip("helpers.tfds_builder")

# One file with random access, one TFRecord file, and three TFRecord files.
KINDS = {"records": ("array_record", 1), "stream": ("tfrecord", 1), "files": ("tfrecord", 3)}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Both data sets, prepared in each of `KINDS`; their folders."""
    folders = {}
    tfds.disable_progress_bar()
    for kind, (file_format, files) in KINDS.items():
        folders[kind] = tmp_path_factory.mktemp(kind)
        for builder in (tfds_builder.Spots, tfds_builder.Photos):
            builder(data_dir=folders[kind], file_format=file_format).download_and_prepare(
                download_config=tfds.download.DownloadConfig(num_shards=files)
            )
    return folders


@pytest.fixture
def spots(prepared):
    """A function that makes batches of a prepared `Spots`."""

    def make(kind, split="train", **arguments):
        return from_tfds("spots", split, data_dir=prepared[kind], **arguments)

    return make


def numbers(dataset):
    return [
        (batch[0] if isinstance(batch, tuple) else batch)[:, 0, 0, 0].numpy().tolist()
        for batch in dataset
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_images_and_classes_come_from_the_builder(spots, kind):
    made = spots(kind, global_batch_size=23, shuffle=False)
    ((x, y),) = made.epoch(0)
    assert (x.dtype, x.shape) == (tf.uint8, (23, 8, 6, 3))
    assert (x.numpy() == x.numpy()[:, :1, :1, :1]).all()
    np.testing.assert_array_equal(y, x[:, 0, 0, 0].numpy() % 3)
    assert made.class_names == ["ant", "bee", "cow"]
    assert "23 examples from spots/1.0.0 train, 3 classes" in repr(made)


def test_random_access_offers_counts_balance_and_stratified_splits(spots):
    """Its labels are read on demand. Splits can also be cut and joined by their names."""
    parts = [spots("files", split) for split in ("train[:40%]", "train[40%:]", "train+test")]
    assert [part.num_examples for part in parts] == [9, 14, 30]
    made = spots("records", global_batch_size=6)
    assert "labels" not in vars(made.reading().source)
    numbers(made.epoch(0))
    assert "labels" not in vars(made.reading().source)
    assert made.class_counts == {"ant": 8, "bee": 8, "cow": 7}
    train, validation = made.split(0.25)
    assert list(validation.class_counts.values()) == [2, 2, 2]
    assert sorted(sum(numbers(train.epoch(0)) + numbers(validation.epoch(0)), [])) == list(
        range(23)
    )
    for _, y in made.with_(balance="oversample").epoch(0):
        assert np.bincount(y).tolist() == [2, 2, 2]


@pytest.mark.slow
def test_features_choose_inputs_targets_and_weights(spots, kind="records"):
    made = spots(
        kind,
        features=({"a": "number", "b": "box", "t": "text"}, ("label", "image"), "weight"),
        global_batch_size=23,
    )
    ((x, (label, image), weight),) = made.epoch(0)
    number = x["a"].numpy()
    np.testing.assert_array_equal(image[:, 0, 0, 0], number)
    np.testing.assert_array_equal(label, number % 3)
    np.testing.assert_array_equal(weight, number / 2)
    np.testing.assert_array_equal(x["b"]["corner"][:, 0], number)
    assert x["t"].numpy().tolist() == [f"text {i}".encode() for i in number]
    assert made.class_names is None


@pytest.mark.slow
def test_inputs_may_be_alone(prepared, kind="stream"):
    made = from_tfds(
        "photos",
        "train",
        features=({"image": "image", "number": "number"},),
        image_size=(4, 5),
        data_dir=prepared[kind],
        on_error="skip",
        global_batch_size=9,
    )
    with pytest.warns(UserWarning, match="1 damaged"):
        (x,) = made.epoch(0)
    assert x["image"].shape == (8, 4, 5, 3)
    assert sorted(x["number"].numpy().tolist()) == [0, 1, 2, 3, 4, 6, 7, 8]


@pytest.mark.slow
def test_damage_is_named(prepared, kind="stream"):
    made = from_tfds(
        "photos", "train", features=("image", "number"), image_size=(4, 4), data_dir=prepared[kind]
    )
    with pytest.raises(tf.errors.OpError, match="photos.*cannot be read: it is truncated"):
        list(made.epoch(0))
    made = made.with_(on_error="skip", global_batch_size=5)
    with pytest.warns(UserWarning, match="Epoch 1 skipped 1 damaged example: .*photos"):
        batches = list(made.epoch(0))
    assert sum(len(labels) for _, labels in batches) == 8
    assert [cause.split(":")[0] for _, cause in made.quarantine] == ["it is truncated"]


@pytest.mark.slow
def test_images_are_decoded_like_files(prepared, tmp_path, kind="records"):
    arguments = {"features": ("image", "number"), "data_dir": prepared[kind], "on_error": "skip"}
    made = from_tfds("photos", "train", image_size=(7, 9), color_mode="grayscale", **arguments)
    made = made.with_(global_batch_size=9, shuffle=False)
    with pytest.warns(UserWarning, match="1 damaged"):
        ((x, y),) = made.epoch(0)
    records = tfds.load(
        "photos",
        split="train",
        data_dir=prepared["stream"],
        decoders={"image": tfds.decode.SkipDecoding()},
    )
    contents = {int(e["number"]): e["image"].numpy() for e in records}
    paths = [tmp_path / f"{number}.image" for number in y.numpy()]
    for path, number in zip(paths, y.numpy().tolist(), strict=True):
        path.write_bytes(contents[number])
    files = from_files(paths, image_size=(7, 9), color_mode="grayscale", shuffle=False)
    np.testing.assert_array_equal(x, next(iter(files.epoch(0))))
    made = from_tfds("photos", "train[6:]", image_size=7, resize="random_crop", **arguments)
    first, again, second = (np.concatenate([x for x, _ in made.epoch(k)]) for k in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert (np.sort(first.ravel()) != np.sort(second.ravel())).any()


def test_missing_data_is_prepared_once(tmp_path):
    made = from_tfds("spots", "test", data_dir=tmp_path)
    assert made.take(3).num_examples == 3
    (info,) = tmp_path.glob("spots/1.0.0/dataset_info.json")
    written = info.stat().st_mtime_ns
    assert from_tfds("spots", "test", data_dir=tmp_path).take(3).num_examples == 3
    assert info.stat().st_mtime_ns == written


def test_a_builder_prepares_in_its_own_format(tmp_path):
    builder = tfds_builder.Spots(data_dir=tmp_path, file_format="tfrecord")
    with pytest.raises(ValueError, match="was called on a stream"):
        from_tfds(builder, "test").take(3)


@pytest.mark.slow
def test_only_one_process_prepares_the_data(tmp_path, monkeypatch, caplog):
    """Of two that start together, one generates the data and the other waits for it.

    They are threads here; `test_writing.py` shows that the lock holds between processes.
    """
    monkeypatch.setenv("TFDS_BUILDER_NOTES", str(tmp_path / "notes"))
    (tmp_path / "data").mkdir()
    begin = threading.Barrier(2)

    def prepare(_):
        begin.wait(PATIENCE)
        return from_tfds("spots", "train", data_dir=tmp_path / "data").num_examples

    with (
        ThreadPoolExecutor(2) as threads,
        caplog.at_level(logging.INFO, "keras_multigpu"),
    ):
        assert list(threads.map(prepare, range(2))) == [23, 23]
    # Once for each of the two splits.
    assert (tmp_path / "notes").read_text() == "generated\n" * 2
    assert caplog.text.count("Another process is preparing") == 1


@pytest.mark.slow
def test_an_image_folder_builder_is_read(tmp_path):
    for split, count in (("train", 5), ("val", 2)):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = np.full((5 + number, 6, 3), number * 10 + (name == "dog"))
                keras.utils.save_img(tmp_path / split / name / f"{number}.png", pixels, scale=False)
    builder = tfds.ImageFolder(str(tmp_path))
    made = from_tfds(builder, "train", image_size=(4, 4), global_batch_size=4)
    assert (made.num_examples, made.class_names) == (10, ["cat", "dog"])
    for shards in (1, 3):
        parts = [
            list(made.epoch(1, shard=(part, shards)).as_numpy_iterator()) for part in range(shards)
        ]
        pairs = [
            (int(image[0, 0, 0]), int(label))
            for part in parts
            for x, y in part
            for image, label in zip(x, y, strict=True)
        ]
        assert sorted(pairs) == [(10 * i + label, label) for i in range(5) for label in (0, 1)]
    assert numbers(made.epoch(0)) != numbers(made.epoch(1))
    (tmp_path / "train" / "cat" / "3.png").write_bytes(b"no image")
    with pytest.raises(tf.errors.OpError, match="3.png cannot be read"):
        list(made.epoch(0))
    with pytest.raises(ValueError, match="no such split.*train, val"):
        from_tfds(builder, "train[:50%]x", image_size=(4, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"split": "valid"}, "no such split. Expected one of train, test"),
        ({"split": "train[:x]"}, "no such split.*are written as"),
        ({"name_or_builder": "spotz"}, "(?s)no data set of this name: .*spotz"),
        ({"features": ("image", "lable")}, "no such feature. Expected one of image, label"),
        ({"features": "image"}, r"Expected \(x, y\)"),
        ({"features": ("words", "label")}, "The shape of the feature 'words' differs"),
        ({"name_or_builder": "photos"}, "photos does not say which.*image, number"),
        (
            {"name_or_builder": "photos", "features": ("image",)},
            "'image' differs.*image_size=",
        ),
        ({"features": ("number", "label"), "image_size": (4, 4)}, "no image to be resized"),
        ({"image_size": {0: 4, 1: 8}}, "`image_size` changes with the epoch"),
        ({"features": ("number", "label"), "resize": "random_crop"}, "no image to be resized"),
    ],
)
def test_wrong_arguments_are_named(prepared, arguments, message):
    usual = {"name_or_builder": "spots", "split": "train", "data_dir": prepared["records"]}
    with pytest.raises(ValueError, match=message):
        from_tfds(**{**usual, **arguments})


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="A builder was given together with"):
        from_tfds(tfds_builder.Spots(data_dir=tmp_path), "train", data_dir=tmp_path)
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(ImportError, match="Run `pip install tensorflow-datasets"):
        from_tfds("spots", "train", data_dir=tmp_path)
