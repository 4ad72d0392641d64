"""What `from_directory` prints, and what it says about mistakes."""

import os

import keras
import pytest
from helpers.small_image_files import write_images, write_two_classes

from keras_multigpu.data.files.scanning import images_in
from keras_multigpu.data.from_directory import from_directory

SMALL = {"image_size": (4, 4), "global_batch_size": 4}


@pytest.fixture(scope="module")
def two_classes(tmp_path_factory):
    return write_two_classes(tmp_path_factory.mktemp("two_classes"))


# What Keras says.


@pytest.mark.parametrize(
    ("arguments", "lines"),
    [
        ({}, "Found 30 files belonging to 2 classes.\n"),
        ({"labels": None}, "Found 30 files.\n"),
        (
            {"validation_split": 0.2, "subset": "training"},
            "Found 30 files belonging to 2 classes.\nUsing 24 files for training.\n",
        ),
        ({"verbose": False}, ""),
    ],
)
def test_it_prints_what_keras_prints(two_classes, capsys, arguments, lines):
    from_directory(two_classes, **SMALL, **arguments)
    assert capsys.readouterr().out == lines
    if arguments.get("verbose", True):
        keras.utils.image_dataset_from_directory(two_classes, seed=1, **arguments)
        assert capsys.readouterr().out == lines


def test_it_logs_where_keras_is_told_not_to_print(two_classes, capsys, caplog):
    keras.config.disable_interactive_logging()
    try:
        with caplog.at_level("INFO", logger="keras_multigpu"):
            from_directory(two_classes, **SMALL)
    finally:
        keras.config.enable_interactive_logging()
    assert capsys.readouterr().out == ""
    assert caplog.messages == ["Found 30 files belonging to 2 classes."]


# Mistakes.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": [0, 1]}, "`labels` has 2 entries, and there are 30 images"),
        ({"labels": (224, 224)}, "image_size="),
        ({"labels": [0.5] * 30}, "not class numbers.*from_files"),
        ({"labels": [-1] * 30}, "not class numbers"),
        ({"labels": "infered"}, "`labels` has an unknown value"),
        ({"label_mode": "one_hot"}, "`label_mode` has an unknown value"),
        ({"label_mode": "binary", "class_names": ["dog"]}, "There are 1 classes.*exactly two"),
        ({"labels": [0, 1, 2] * 10, "label_mode": "binary"}, "There are 3 classes.*exactly two"),
        ({"class_names": ["cat", "cow"]}, "no subfolders of the folder: .'cow'.*'cat', 'dog'"),
        ({"class_names": ["cat", "cat"]}, "a name twice"),
        ({"class_names": []}, "is empty"),
        ({"class_names": ["cat"], "labels": None}, "not used as classes"),
        ({"validation_split": 0.2}, "do not fit together"),
        ({"subset": "both"}, "do not fit together"),
        ({"validation_split": 2, "subset": "both"}, "do not fit together"),
        ({"validation_split": 0.2, "subset": "test"}, "`subset` has an unknown value"),
        ({"validation_split": 0.01, "subset": "both"}, "validation part would be empty"),
        ({"validation_split": 0.2, "subset": "both", "seed": "a"}, "`seed` is not an integer"),
        ({"data_format": "channels_first"}, "`data_format` has a value that.*channels last"),
        ({"format": "grain"}, "`format` has a value that"),
        ({"crop_to_aspect_ratio": True}, '`crop_to_aspect_ratio` has a value.*resize="crop"'),
        ({"color_mode": "bgr"}, "color_mode"),
        ({"image_size": "large"}, "image_size"),
    ],
)
def test_mistakes_are_named(two_classes, arguments, message):
    with pytest.raises(ValueError, match=f"(?s){message}.*Received: "):
        from_directory(two_classes, verbose=False, **arguments)


def test_what_keras_asks_for_by_default_is_no_mistake(two_classes):
    batches = from_directory(
        two_classes, **SMALL, data_format="channels_last", format="tf", seed=None
    )
    assert batches.num_examples == 30


def test_images_without_class_folders_are_explained(tmp_path):
    write_images(tmp_path, ["1.png", "2.png"])
    with pytest.raises(ValueError, match="holds 2 images, but none in subfolders.*labels=None"):
        from_directory(tmp_path)
    assert from_directory(tmp_path, **SMALL, labels=None).num_examples == 2


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
    # Without classes, and without that one, there is nothing to say.
    assert from_directory(tmp_path, labels=None, **SMALL).num_examples == 2
    assert from_directory(tmp_path, class_names=["cat", "dog"], **SMALL).num_examples == 2


def test_the_home_folder_can_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_images(tmp_path, ["photos/cat/1.png"])
    assert from_directory("~/photos", **SMALL).file_paths == [str(tmp_path / "photos/cat/1.png")]


def test_folders_without_images_are_explained(tmp_path):
    (tmp_path / "file.txt").write_text("no folder")
    with pytest.raises(ValueError, match="no subfolders"):
        from_directory(tmp_path)
    with pytest.raises(ValueError, match="no images in the folder"):
        from_directory(tmp_path, labels=None)
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="no images in the 1 class folders"):
        from_directory(tmp_path)
    with pytest.raises(ValueError, match="The path does not exist"):
        from_directory(tmp_path / "photo")
    with pytest.raises(ValueError, match="The path is a file.*from_files"):
        from_directory(tmp_path / "file.txt")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_cannot_be_read_is_no_empty_class(tmp_path):
    write_images(tmp_path, ["cat/1.png", "dog/2.png"])
    (tmp_path / "dog").chmod(0)
    with pytest.raises(ValueError, match="A folder cannot be read: Permission denied"):
        from_directory(tmp_path)


def test_a_folder_that_vanishes_during_the_scan_is_no_empty_class(tmp_path):
    with pytest.raises(ValueError, match="A folder cannot be read: No such file"):
        images_in(str(tmp_path), ["gone"], follow_links=False)
