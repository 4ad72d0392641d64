"""`Batches.identity` holds what decides the examples and their order, and nothing else."""

import json
import os
import shutil

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.small_image_files import write_two_classes

import keras_multigpu as kmg
from keras_multigpu.identities import changes

X = np.arange(24, dtype=np.float32).reshape(12, 2)


def identity(batches):
    return json.loads(json.dumps(batches.reading().identity()))


def of_arrays(x=X, y=None, **settings):
    return identity(kmg.data.from_arrays(x, np.arange(12) % 3 if y is None else y, **settings))


def rotation(strength):
    return keras.layers.RandomRotation(strength)


@pytest.mark.parametrize(
    ("changed", "place"),
    [
        ({}, None),
        ({"cache": "memory"}, None),
        ({"on_error": "skip"}, None),
        ({"augment": rotation(0.1)}, None),
        ({"augment": rotation(0.9)}, "augment.factor"),
        ({"augment": [rotation(0.1), lambda x: x + 1]}, "augment"),
        ({"augment": kmg.augmentation.RandomGeometry(rotation=0.1)}, "augment"),
        ({"x": X + 1}, "source.arrays[0].digest"),
        ({"x": X[:, ::-1]}, "source.arrays[0].digest"),
        ({"y": np.arange(12) % 2}, "source.arrays[1].digest"),
        ({"seed": 3}, "seed"),
        ({"shuffle": False}, "shuffle"),
        ({"balance": "oversample"}, "balance"),
        ({"remainder": "drop"}, "remainder"),
    ],
    ids=str,
)
def test_the_identity_changes_with_settings_and_arrays(changed, place):
    before = of_arrays(augment=rotation(0.1))
    found = changes(before, of_arrays(**{"augment": rotation(0.1), **changed}))
    assert not found if place is None else all(key.startswith(place) for key in found) and found


def test_each_part_of_a_source_has_its_own_identity():
    batches = kmg.data.from_arrays(X)
    first, second = batches.split(0.5)
    assert identity(first) == identity(kmg.data.from_arrays(X).split(0.5)[0])
    assert identity(first) != identity(second)
    assert identity(batches.take(5)) != identity(batches)


@pytest.fixture
def folder(tmp_path):
    """Two classes with two images each."""
    for name in ("a/1.png", "a/2.png", "b/1.png", "b/2.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(tf.io.encode_png(np.zeros((4, 4, 3), np.uint8)).numpy())
    return tmp_path / "photos"


def of_folder(folder, **settings):
    settings = {"image_size": (4, 4), "verbose": False, **settings}
    return identity(kmg.data.from_directory(folder, **settings))


def test_files_are_identified_by_name_and_size(folder, tmp_path):
    before = of_folder(folder)
    shutil.copytree(folder, tmp_path / "elsewhere" / "copied", copy_function=shutil.copy)
    assert of_folder(tmp_path / "elsewhere" / "copied") == before
    (folder / "b" / "2.png").rename(folder / "b" / "3.png")
    assert set(changes(before, of_folder(folder))) == {"source.files"}
    (folder / "b" / "3.png").rename(folder / "b" / "2.png")
    assert of_folder(folder) == before
    exact = str(directory(folder).reading().source.identity(exact=True))
    os.utime(folder / "a" / "1.png", (1, 1))
    assert str(directory(folder).reading().source.identity(exact=True)) != exact
    (folder / "a" / "1.png").write_bytes((folder / "a" / "1.png").read_bytes() + b"more")
    assert set(changes(before, of_folder(folder))) == {"source.files"}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return write_two_classes(tmp_path_factory.mktemp("two classes"))


def directory(place, **changes):
    return kmg.data.from_directory(place, **{"image_size": (4, 6), "verbose": False, **changes})


def files(place, labels=(0, 1) * 15, **changes):
    paths = sorted(place.rglob("*.png"))
    return kmg.data.from_files(paths, labels, **{"image_size": 4, **changes})


def flow(place, rescale=None, **changes):
    generator = tf.keras.preprocessing.image.ImageDataGenerator(rescale=rescale)  # noqa: TID251
    given = {"target_size": (4, 4), **changes}
    return kmg.data.from_flow(generator.flow_from_directory(place, **given))


DECODED = [
    {"image_size": (6, 4)},
    {"image_size": {0: 4, 2: (4, 6)}},
    {"image_size": {0: 4, 3: (4, 6)}},
    {"color_mode": "rgba"},
    {"color_mode": "grayscale"},
    {"interpolation": "nearest"},
    *({"resize": way} for way in ("crop", "pad", "random_crop")),
]
CHANGES = {
    directory: [
        {"label_mode": "categorical"},
        {"class_names": ["dog", "cat"]},
        {"class_names": ["dog"]},
        *DECODED,
    ],
    files: [
        {"labels": None},
        {"labels": (1, 0) * 15},
        {"labels": (0.5, 1) * 15, "task": "regression"},
        {"sample_weight": (0, 1) * 15},
        {"label_mode": "categorical"},
        *DECODED,
    ],
    flow: [{"rescale": 0.1}, {"target_size": (4, 6)}, {"class_mode": "sparse"}],
}


@pytest.mark.parametrize("make", CHANGES)
def test_each_argument_changes_the_identity(make, place):
    """Except the order."""

    def exact(**changes):
        return str(make(place, **changes).reading().source.identity(exact=True))

    before = exact()
    assert exact() == exact(shuffle=False, seed=4) == before
    others = {exact(**changes) for changes in CHANGES[make]}
    assert len(others | {before}) == len(CHANGES[make]) + 1


def shuffled(seed=9, **settings):
    """A dataset that shuffles itself, in a new order each time it is read."""
    dataset = tf.data.Dataset.range(12).shuffle(12, seed=seed, **settings)
    return dataset.map(lambda number: (number, number))


def batches_of(dataset, **settings):
    settings = {"batched": False, "global_batch_size": 5, "shuffle": False, **settings}
    return kmg.data.from_dataset(dataset, **settings)


def test_datasets_are_identified_by_how_they_were_made():
    """Not by their content, which is not read."""
    before = identity(batches_of(shuffled()))
    assert identity(batches_of(shuffled().prefetch(1))) == before
    assert identity(batches_of(shuffled(seed=8))) != before
    assert identity(batches_of(shuffled().repeat())) != before


def numbers(dataset, count):
    return [x.numpy().tolist() for x, _ in dataset.take(count)]


@pytest.mark.parametrize(
    ("dataset", "settings"),
    [
        (lambda: shuffled().batch(4).unbatch(), {}),
        (lambda: shuffled().cache().shuffle(12, seed=3), {"shuffle": True}),
    ],
    ids=["batched", "cached between"],
)
@pytest.mark.slow
def test_a_dataset_that_shuffles_resumes_with_the_same_examples(dataset, settings):
    """A new dataset, as in another process, starts in its second and third epoch."""
    whole = numbers(batches_of(dataset(), **settings).epochs(), 9)
    for place, batches in (((1, 0), whole[3:]), ((2, 5), whole[7:])):
        again = numbers(batches_of(dataset(), **settings).epochs(*place), len(batches))
        assert again == batches


@pytest.mark.slow
def test_epochs_read_one_by_one_equal_those_of_one_reading():
    """Epochs that this process has already read are not read again to reach the next one."""
    batches = batches_of(shuffled())
    whole = numbers(batches_of(shuffled()).epochs(), 9)
    assert [batch for epoch in range(3) for batch in numbers(batches.epoch(epoch), 9)] == whole
