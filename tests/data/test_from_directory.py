"""Compares with Keras on real files of 4 x 4 pixels, each of its own color."""

import os

import keras
import numpy as np
import pytest
from helpers.small_image_files import content, write_image, write_images, write_two_classes

from keras_multigpu.data import from_directory

SMALL = {"image_size": (4, 4), "global_batch_size": 4}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Three classes of 3, 4 and 2 images, with all kinds of obstacles."""
    folder = tmp_path_factory.mktemp("photos")
    write_images(
        folder,
        [
            "b dogs/1.png",
            "b dogs/deep/er/2.PNG",
            "b dogs/deep-sea/2.png",
            "B cats/10.png",
            "B cats/9.png",
            "B cats/.hidden.png",
            "B cats/.folder/3.png",
            "ö/x.png",
            "ö/y.Png",
            ".not_a_class/no.png",
        ],
    )
    (folder / "ö" / "notes.txt").write_text("no image")
    (folder / "ö" / "folder.png").mkdir()
    write_image(folder / "ö" / "folder.png" / "z.png", 77)
    return folder


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory):
    return write_two_classes(tmp_path_factory.mktemp("two_classes"))


def of_keras(folder, **arguments):
    return keras.utils.image_dataset_from_directory(
        folder, image_size=(4, 4), batch_size=4, verbose=False, **arguments
    )


def ours(folder, **arguments):
    return from_directory(folder, **SMALL, verbose=False, **arguments)


CHOICES = [
    {"label_mode": "int"},
    {"label_mode": "categorical"},
    {"label_mode": None},
    {"label_mode": "binary"},
    {"class_names": ["ö", "B cats"]},
    {"labels": None},
    {"labels": [2, 1, 0, 2, 1, 0, 2, 1, 0, 2, 1]},
]


@pytest.mark.parametrize("arguments", CHOICES, ids=str)
def test_images_labels_and_order_match_keras(photos, two_classes, arguments):
    folder = two_classes if arguments.get("label_mode") == "binary" else photos
    batches = ours(folder, shuffle=False, **arguments)
    dataset = of_keras(folder, shuffle=False, **arguments)
    for part, expected in zip(content(batches.epoch(0)), content(dataset), strict=True):
        np.testing.assert_array_equal(part, expected)
    assert batches.class_names == dataset.class_names
    expected_spec = dataset.element_spec
    if isinstance(expected_spec, tuple):
        label, expected_label = batches.epoch(0).element_spec[1], expected_spec[1]
        assert label.dtype == expected_label.dtype
        assert label.shape[1:] == expected_label.shape[1:]


def test_links_are_followed_as_in_keras(tmp_path):
    """A class that is a link, a linked folder in a class, and a linked file."""
    write_images(tmp_path / "elsewhere", ["a.png", "b.png", "deep/c.png"])
    write_images(tmp_path / "photos", ["cat/d.png", "dog/e.png"])
    os.symlink(tmp_path / "elsewhere", tmp_path / "photos" / "zebra")
    os.symlink(tmp_path / "elsewhere" / "deep", tmp_path / "photos" / "cat" / "linked")
    os.symlink(tmp_path / "elsewhere" / "a.png", tmp_path / "photos" / "dog" / "linked.png")
    batches = ours(tmp_path / "photos", shuffle=False)
    dataset = of_keras(tmp_path / "photos", shuffle=False)
    for part, expected in zip(content(batches.epoch(0)), content(dataset), strict=True):
        np.testing.assert_array_equal(part, expected)
    assert batches.class_counts == {"cat": 1, "dog": 2, "zebra": 3}


def test_a_link_to_its_own_folder_is_not_followed_and_a_broken_one_is_damage(tmp_path):
    """`os.walk`, and so Keras, would follow the first until the path is too long."""
    write_images(tmp_path, ["cat/a.png", "dog/b.png"])
    os.symlink(tmp_path / "cat", tmp_path / "cat" / "again")
    os.symlink(tmp_path / "nowhere", tmp_path / "dog" / "broken.png")
    batches = ours(tmp_path, on_error="skip")
    assert batches.class_counts == {"cat": 1, "dog": 2}
    with pytest.warns(UserWarning, match="1 damaged example: .*broken.png"):
        assert len(content(batches.epoch(0))[0]) == 2


# What `Batches` offers.


def test_evaluation_crops_the_center(tmp_path):
    folder = write_two_classes(tmp_path / "photos")
    random = from_directory(folder, image_size=(2, 3), resize="random_crop", verbose=False)
    center = from_directory(folder, image_size=(2, 3), resize="crop", shuffle=False, verbose=False)
    expected, _ = content(center.epoch(0))
    np.testing.assert_array_equal(content(random.evaluation().epoch(0))[0], expected)
    first, second = (content(part.evaluation().epoch(0))[0] for part in random.split(0.5))
    assert {image.tobytes() for image in (*first, *second)} == {x.tobytes() for x in expected}


def test_file_paths_belong_to_the_examples(two_classes):
    batches = from_directory(two_classes, **SMALL, verbose=False)
    assert batches.file_paths == of_keras(two_classes, shuffle=False).file_paths
    train, validation = batches.split(0.4)
    assert sorted(train.file_paths + validation.file_paths) == sorted(batches.file_paths)


# What is printed.


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ({}, "Found 30 files belonging to 2 classes.\n"),
        ({"labels": None}, "Found 30 files.\n"),
        ({"verbose": False}, ""),
    ],
)
def test_it_prints_what_keras_prints(two_classes, capsys, caplog, monkeypatch, arguments, lines):
    from_directory(two_classes, **SMALL, **arguments)
    assert capsys.readouterr().out == lines
    if arguments.get("verbose", True):
        keras.utils.image_dataset_from_directory(two_classes, seed=1, **arguments)
        assert capsys.readouterr().out == lines
    # A log gets it where interactive logging is off.
    monkeypatch.setattr(keras.config, "is_interactive_logging_enabled", lambda: False)
    with caplog.at_level("INFO", logger="keras_multigpu"):
        from_directory(two_classes, **SMALL, **arguments)
    assert capsys.readouterr().out == ""
    assert "".join(f"{line}\n" for line in caplog.messages) == lines


# Mistakes.


def test_keras_defaults_are_accepted(two_classes):
    batches = from_directory(
        two_classes, **SMALL, data_format="channels_last", format="tf", seed=None
    )
    assert batches.num_examples == 30


def test_images_beside_the_class_folders_give_a_warning(tmp_path):
    write_images(tmp_path, ["cat/1.png", "dog/2.png", "forgotten.png"])
    with pytest.warns(UserWarning, match="1 images lie directly in .* belong to no class") as given:
        assert from_directory(tmp_path, **SMALL).num_examples == 2
    assert given[0].filename == __file__


def test_classes_without_images_give_a_warning(tmp_path):
    write_images(tmp_path, ["cat/1.png", "dog/2.png"])
    (tmp_path / "cow").mkdir()
    (tmp_path / "cow" / "3.tif").write_bytes(b"II*")
    with pytest.warns(UserWarning, match="1 of 3 class folders .* no images: cow. They") as given:
        assert from_directory(tmp_path, **SMALL).class_names == ["cat", "cow", "dog"]
    assert given[0].filename == __file__
    # Nothing is missing without classes, or without this one.
    assert from_directory(tmp_path, labels=None, **SMALL).num_examples == 2
    assert from_directory(tmp_path, class_names=["cat", "dog"], **SMALL).num_examples == 2


def test_a_folder_that_cannot_be_read_is_an_error(tmp_path, monkeypatch):
    """No image is left out silently."""
    write_images(tmp_path, ["cat/1.png", "dog/2.png"])
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("dog"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)
    with pytest.raises(ValueError, match="A folder cannot be read: Permission denied.*dog"):
        from_directory(tmp_path)
