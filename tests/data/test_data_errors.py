"""What the sources of data refuse, and what the error says."""

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from helpers.small_image_files import write_images, write_numbers, write_two_classes

import keras_multigpu as kmg

Slices = tf.data.Dataset.from_tensor_slices
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder of two classes, twelve numbered images, and what is no folder of images."""
    place = tmp_path_factory.mktemp("place")
    write_two_classes(place / "photos")
    (place / "numbers").mkdir()
    write_numbers(place / "numbers")
    write_images(place / "flat", ["1.png", "2.png"])
    for name in ("empty", "classes/cat"):
        (place / name).mkdir(parents=True)
    (place / "file.txt").write_text("no folder")
    (place / "zero.csv").symlink_to("/dev/zero")
    return place


def numbered(**settings):
    return kmg.data.from_arrays(np.arange(10)[:, None], np.arange(10) % 3, **settings)


def ten(**settings):
    return lambda place: numbered(**settings)


def of_ten(call):
    return lambda place: call(numbered())


def arrays(*given, **settings):
    return lambda place: kmg.data.from_arrays(*given, **settings)


def dataset(given, **settings):
    return lambda place: kmg.data.from_dataset(given, **settings)


def flow(given, **settings):
    return lambda place: kmg.data.from_flow(given, **settings)


def source(given, **settings):
    return lambda place: kmg.data.from_source(given, **settings)


def directory(name="photos", **settings):
    return lambda place: kmg.data.from_directory(place / name, **{"verbose": False, **settings})


def files(labels, **settings):
    """From three of the numbered images."""

    def call(place):
        paths = sorted((place / "numbers").glob("*.png"))[:3]
        return kmg.data.from_files(paths, labels, image_size=4, **settings)

    return call


def listed(make, labels=None, **settings):
    """From paths that a function makes from the folder."""
    return lambda place: kmg.data.from_files(make(place), labels, image_size=4, **settings)


def table(content, **settings):
    def call(place):
        path = place / "numbers" / "mistakes.csv"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return kmg.data.from_files(path, image_size=4, **settings)

    return call


def sized(image_size):
    return directory(image_size=image_size)


RAGGED = np.empty(2, object)
RAGGED[:] = [[1], [1, 2]]
NO_ORDER = "has no entries in a fixed order"
NO_LIST = "neither a list nor an existing.*`from_directory`"
NO_NUMBERS = "something other than numbers and texts"
SEVERAL = "may be batches or single examples.*Pass batched=True"
NO_SIZE = r"not a height and.*Expected `\(height, width\)`"
NO_SHARD, NO_PART = "`shard` is not a part", "fraction"
FEW = {"labels": [0, 1, 2], "class_names": ["a", "b"]}


class OneHot(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return np.array([index, index])


class Numbers(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.arange(3)


def images(**generator):
    flows = tf.keras.preprocessing.image  # noqa: TID251 (the flows are one of the sources)
    return flows.ImageDataGenerator(**generator).flow(np.zeros((3, 4, 4, 3)), np.zeros(3))


def generated():
    yield np.zeros((2, 1)), np.zeros(2)


def nothing():
    return iter(())


def number():
    return 5


def four_parts():
    yield 1, 2, 3, 4


SETTINGS = [
    (ten(global_batch_size=8, replica_batch_size=4), "Both `global_batch_size` and `rep"),
    (ten(global_batch_size=0), "`global_batch_size` is not a positive integer"),
    (ten(replica_batch_size=2.5), "`replica_batch_size` is not a positive integer"),
    (ten(remainder="crop"), "`remainder` has an unknown value"),
    (ten(balance="both"), "`balance` has an unknown value"),
    (ten(on_error="ignore"), "`on_error` has an unknown value"),
    (ten(seed=None), "`seed` is not an integer"),
    (ten(augment=3), "neither a layer nor a function"),
    (ten(augment=keras.layers.RandomFlip), r"RandomFlip is a class.*Pass `RandomFlip\("),
    (ten(augment=keras.Sequential([keras.layers.MixUp()])), "mixes the examples.*`keras_multigpu"),
    (ten(augment=keras.layers.CutMix()), "mixes the examples.*augmentation.Mix"),
    (ten(cache=True), "`cache` is neither .* nor a folder"),
    (ten(cache="a\0b"), "`cache` is neither .* nor a folder"),
    (of_ten(lambda ten: ten.epoch(-1)), "`epoch` is not"),
    (of_ten(lambda ten: ten.epochs(0, -5)), "`start` is not"),
    (of_ten(lambda ten: ten.epoch(0, 1.5)), "`start` is not"),
    (of_ten(lambda ten: ten.epoch(0, 11)), "past the end of the epoch, which has 10 examples"),
    (of_ten(lambda ten: ten.epoch(0, shard=(2, 2))), NO_SHARD),
    (of_ten(lambda ten: ten.epoch(0, shard=(-1, 2))), NO_SHARD),
    (of_ten(lambda ten: ten.epoch(0, shard=(0,))), NO_SHARD),
    (of_ten(lambda ten: ten.epoch(0, shard=1)), NO_SHARD),
    (of_ten(lambda ten: ten.epoch(0, shard=(0.0, 2))), NO_SHARD),
    (of_ten(lambda ten: ten.split(0)), NO_PART),
    (of_ten(lambda ten: ten.split(1)), NO_PART),
    (of_ten(lambda ten: ten.split("half")), NO_PART),
    (of_ten(lambda ten: ten.split(0.001)), NO_PART),
    (of_ten(lambda ten: ten.with_(global_batch_size=16, remainder="drop").epoch(0)), "do not fill"),
    (arrays(np.ones(3), np.ones(3) / 2, balance="oversample"), "`balance` needs classes"),
    (lambda place: source(np.ones((3, 2)), **FEW)(place).class_counts, "a name.*at least 3 "),
    (sized(None), NO_SIZE),
    (sized(0), NO_SIZE),
    (sized(2.5), NO_SIZE),
    (sized((224, 224, 3)), NO_SIZE),
    (sized((5.5, 5)), NO_SIZE),
    (sized("ab"), NO_SIZE),
    (sized({0: 8, 2: None}), NO_SIZE),
    (sized({1: 8}), "does not say which size each epoch has.*image_size={0: 128, 10: 224}"),
    (sized({0: 8, "2": 9}), "does not say which size each epoch has"),
    (directory(image_size={0: 4, 1: 8}, cache="memory"), "change their size with the epoch"),
    (directory(color_mode="bgr"), "`color_mode` has an unknown value. Expected one of 'grayscale'"),
    (
        directory(interpolation="cubic"),
        "`interpolation` has an unknown value. Expected one of 'bil",
    ),
    (
        directory(resize="center"),
        "`resize` has an unknown value. Expected one of 'stretch', 'crop'",
    ),
]
ARRAYS = [
    (arrays(np.zeros((3, 1)), np.zeros(4)), "different numbers of examples"),
    (arrays(np.zeros((0, 1))), "There are no examples"),
    (arrays(np.float32(1)), "A single number"),
    (arrays(tf.ragged.constant([[1], [1, 2]])), "other than texts.*Pad .*`from_dataset`"),
    (arrays(tf.sparse.eye(3)), "other than texts.*type='SparseTensor'"),
    (arrays(RAGGED), "other than texts.*Pad .* Received: shape=.2,., type='list'"),
    (arrays(np.zeros((2, 1)), RAGGED), "other than texts.*list"),
    (of_ten(lambda ten: kmg.data.from_arrays(ten)), "converted to an array.*: type='Batches'"),
    (arrays(np.array(["a", None])), "other than texts.*NoneType"),
    (arrays(pd.DataFrame({"a": [1, 2], "b": ["c", "d"]})), "other than texts.*int"),
    (arrays(np.zeros((2, 1)), {"a": np.array([1, 2], object)}), "texts.*asarray.array, float.*int"),
    (arrays(np.zeros((2, 1)), None, np.array(["a", "b"])), "other than numbers.*first=.'a'"),
    (dataset(Slices(np.arange(9)), balance="oversample"), "a stream.*Pass `class_weight` to `fit`"),
    (dataset(Slices(np.arange(9)), cache="memory"), "`cache` needs examples .* is a stream"),
    (dataset(Slices(np.arange(9)), on_error="skip"), "a dataset does not name its damaged"),
    (flow(Numbers(), steps=2), "a PyDataset that has a length"),
    (dataset(Slices(np.arange(9)), batched="yes"), "`batched` has an unknown value"),
    (dataset(Slices((np.arange(9),) * 4)), "has 4 parts"),
    (dataset(Slices(tf.sparse.eye(3))), "cannot be cut into shards.*tf.sparse.to_dense"),
    (dataset(tf.data.Dataset.from_tensors((np.zeros((9, 4)), np.eye(9)))), SEVERAL),
    (dataset(Slices((np.arange(9),)).batch(3).map(lambda x: (x, x, 1.0))), SEVERAL),
    (flow(generated()), r"Pass the function that makes it: `from_flow\(make\)`"),
    (flow(nothing), "The generator gave no batch"),
    (flow(four_parts), "A batch of the generator has 4 parts"),
    (flow(generated, steps=0), "`steps` is not a positive integer"),
    (flow(OneHot()), "pass `steps`"),
    (flow(images(), steps=3), "`steps` was given with a flow of images"),
    (flow(images(featurewise_center=True)), r"Call `generator.fit\(x\)`"),
    (flow(images(zca_whitening=True, featurewise_center=True)), r"Call `generator.fit\(x\)`"),
    (source([]), "There are no examples in list"),
    (source([(1, 2, 3, 4)]), "has 4 parts"),
    (source([(None, 1)]), "has no inputs"),
    (source([np.datetime64("2026-01-01")]), NO_NUMBERS),
    (source([object()]), NO_NUMBERS),
    (source([{"x": None}]), NO_NUMBERS),
    (source([1, 2], threads=0), "`threads` is not a positive integer"),
    (source([1, 2, 3], labels=[0, 1]), "`labels` is not one class for each item"),
    (
        source([{"x": 1, "label": 2}], example=lambda item: item["lable"]),
        r"item 0 of list.*`example` raised KeyError: 'lable' \(the item has x, l",
    ),
    (source(range(5), cache="folder"), "cannot tell whether range has changed.*`version`"),
]
FILES = [
    (directory(labels=[0, 1]), "`labels` has 2 entries, and there are 30 images"),
    (directory(labels=(224, 224)), "image_size="),
    (directory(labels=[0.5] * 30), "not class numbers.*0, 1, 2"),
    (directory(labels="infered"), "`labels` has an unknown value"),
    (directory(label_mode="one_hot"), "`label_mode` has an unknown value"),
    (directory(label_mode="binary", class_names=["dog"]), "There are 1 classes.*exactly two"),
    (directory(class_names=["cat", "cow"]), "no subfolders of the folder: .'cow'.*'cat', 'dog'"),
    (directory(class_names=["cat", "cat"]), "a name twice"),
    (directory(class_names=[]), "is empty"),
    (directory(class_names=["cat"], labels=None), "not used as classes"),
    (directory(validation_split=0.2), r"`validation_split` has a value.*batches.split\(0.2\)"),
    (directory(subset="both"), "`subset` has a value that"),
    (directory(data_format="channels_first"), "`data_format` has a value that.*channels last"),
    (directory(format="grain"), "`format` has a value that"),
    (directory(crop_to_aspect_ratio=True), '`crop_to_aspect_ratio` has a value.*resize="crop"'),
    (directory("flat"), "no images in the 0 class folders, and 2 beside them.*labels=None"),
    (directory("empty"), "no images in the 0 class folders"),
    (directory("empty", labels=None), "no images in the folder"),
    (directory("classes"), "no images in the 1 class folders"),
    (directory("photo"), "The path does not exist"),
    (directory("file.txt"), "The path is a file.*from_files"),
    (files([0, 1]), "`labels` and `paths` differ in length"),
    (files({"a": 1, "b": 2, "c": 3}), "The labels cannot be put into one array"),
    (files(["a", None, "b"]), "1 of 3 labels are missing, the first that of .*01.png"),
    (files(["a", "", "b"]), "1 of 3 labels are missing"),
    (files([0.5, NAN, 1], task="regression"), "1 of 3 labels are missing"),
    (
        files([0.5, 1, INF], task="regression"),
        "1 of 3 labels are infinite, .*02.png",
    ),
    (files([[1, 2], [3], [4]]), "The labels cannot be put into one array"),
    (files([0, -1, 1]), "not class numbers"),
    (files([0.5, 1, 1]), "not class numbers.*pass task="),
    (files([0, 1, 2], class_names=["a", "b"]), "There is a class 2, and 2 class names"),
    (files([0, 1, 2], label_mode="binary"), "There are 3 classes"),
    (files(["a", "b", "c"], class_names=["a", "b"]), "1 names among the labels are not classes"),
    (files(["a", "b", "a"], class_names=["a", "b", "a"]), "a name twice"),
    (files(["a", "b", "a"], task="regression"), "The labels are text"),
    (files([0, 1, 2], task="multi_label"), "do not mark for each class"),
    (files([0, 1, 2], task="mask"), "not paths"),
    (
        files([0.5, 1, 2], task="regression", label_mode="categorical"),
        "was given with labels for .regression",
    ),
    (files([0, 1, 2], task="classify"), "`task` has an unknown value"),
    (files([0, 1, 2], label_mode="onehot"), "`label_mode` has an unknown value"),
    (files([0, 1, 2], sample_weight=[1, 2]), "`sample_weight` and `paths` differ in length"),
    (
        files([0, 1, 2], sample_weight=[1, "x", 2]),
        "weights cannot be put into one array.*mix",
    ),
    (files([0, 1, 2], sample_weight=[1, INF, NAN]), "2 of 3 weights are infinite, .*01.png"),
    (files([0, 1, 2], sample_weight=["a", "b", "c"]), "The weights are text"),
    (
        files(["a.png", "b.png", "c.png"], task="mask"),
        "None of 3 files that were looked",
    ),
    (files({"a", "b", "c"}), f"`labels` {NO_ORDER}.*labels='set'"),
    (files(1), f"`labels` {NO_ORDER}"),
    (files("abc"), f"`labels` {NO_ORDER}"),
    # The order of texts in a set differs between processes, so labels would be mixed up.
    (listed(lambda place: {"a.png"}, [0]), f"`paths` {NO_ORDER}.*paths='set'"),
    (listed(lambda place: place / "numbers"), NO_LIST),
    (listed(lambda place: place / "numbers" / "00.png"), NO_LIST),
    (listed(lambda place: place / "table.csv"), NO_LIST),
    (listed(lambda place: place / "zero.csv"), NO_LIST),
    (listed(lambda place: []), "There are no examples in a list of files"),
    (listed(lambda place: ["a.png", None]), "Row 1 of `paths` holds no path"),
    (listed(lambda place: ["a.png", ""]), "Row 1 of `paths` holds no path"),
    (listed(lambda place: ["a.png", 7]), "Row 1 of `paths` holds no path"),
    (listed(lambda place: pd.DataFrame({"a": [None], "label": [1]})), "Row 0 of `a` holds no path"),
    (listed(lambda place: ["03.png"]), "None of 1 files that were looked for exists"),
    (table("path,path,label\n00.png,a,1\n"), "several columns, of the name 'path'"),
    (table("path,species\n00.png,1\n"), "no column, .* name 'label'.*label column as `labels`"),
    (table("path,label\n00.png,1,2\n"), "Line 2 has 3 fields"),
    (table("path,label\n00.png,1\n01.png,\n"), "1 of 2 labels are missing, .*01.png"),
    (table("path,label\n00.png," + "9" * 5000), "1 of 1 labels are infinite, .*00.png"),
    (table("path,a,b\n00.png,1,x\n", labels=["a", "b"]), "label columns do not hold numb"),
    (table("path,label\nx/00.png,1\n"), "None of 1 files.*`root`"),
    (table("path,label\n00.png,1\n", labels=[1]), "no column, or several columns, of the name 1"),
    (table("path,label\n00.png,1\n".encode("utf-16")), "row of line 1 cannot be read: 'utf-8' cod"),
    (table("path,label\n00.png,1\n".encode("utf-16-le")), "Line 3 has 1 fields"),
    (table("path,label\n00.png,Möwe\n".encode("latin-1")), "cannot be read: 'utf-8' codec can't"),
    (table(b'path,label\n00.png,1\n01.png,"' + b"2\n" * 70_000), "line 3 .*larger than field limi"),
]


@pytest.mark.parametrize(("call", "text"), [*SETTINGS, *ARRAYS, *FILES])
def test_a_mistake_is_named(call, text, place):
    with pytest.raises(ValueError, match=f"(?s){text}.*") as caught:
        call(place)
    assert "Received: " in str(caught.value) or "`example` raised" in str(caught.value)


TYPES = [
    (ten(sead=3), "`sead` is not an argument.*replica_batch_size"),
    (dataset(np.arange(9)), "not a `tf.data.Dataset`.*Use `from_arrays`"),
    (flow(np.zeros(3)), "Arrays belong to `from_arrays`"),
    (flow(tf.data.Dataset.range(3)), "a `tf.data.Dataset` to `from_dataset`"),
    (flow(number), "What the function returned cannot be iterated over"),
    (source({"x": np.ones(3)}), "one entry of a dict"),
    (source(pd.DataFrame({"x": [1, 2]})), r"table.to_dict\('records'\)"),
    (source(iter([1])), "Use `from_flow` for generators"),
    (source(tf.data.Dataset.range(3)), "`from_dataset` for a `tf.data.Dataset`"),
    (of_ten(lambda ten: kmg.data.from_source(ten)), "does not offer its items by number"),
    (of_ten(iter), r"Write `batches\.epoch\(0\)`"),
    # `batch_size` does not say whose.
    (directory("nowhere", batch_size=8), "Write global_batch_size=8.*Received: batch_size=8"),
    (listed(lambda place: ["a.png"], batch_size=8), "does not say whose.*: batch_size=8"),
    (arrays(np.ones(3), batch_size=8), "does not say whose.*: batch_size=8"),
    (lambda _: kmg.data.from_tfds("no", "train", batch_size=8), "does not say.*: batch_size=8"),
    (flow(generated, batch_size=8), "does not say whose.*: batch_size=8"),
    (dataset(tf.data.Dataset.range(3), batch_size=8), "does not say whose.*: batch_size=8"),
    (source([1], batch_size=8), "does not say whose.*: batch_size=8"),
]


@pytest.mark.parametrize(("call", "text"), TYPES)
def test_the_wrong_kind_of_thing_is_named(call, text, place):
    with pytest.raises(TypeError, match=text):
        call(place)
