"""`keras-multigpu check-images`: what it reports and returns."""

import errno
import os
import re
import sys

import pytest
from helpers.picture_files import animation, encoded, picture

from keras_multigpu.commands import main
from keras_multigpu.data.from_directory import from_directory

JPEG = encoded(picture(), "JPEG")
PNG = encoded(picture())


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    (folder / "cats" / "old").mkdir(parents=True)
    (folder / "dogs").mkdir()
    (folder / "cats" / "1.jpg").write_bytes(JPEG)
    (folder / "cats" / "2.JPEG").write_bytes(JPEG)
    (folder / "cats" / "old" / "3.png").write_bytes(PNG)
    (folder / "dogs" / "4.gif").write_bytes(animation("GIF"))
    (folder / "dogs" / "5.bmp").write_bytes(encoded(picture(), "BMP"))
    (folder / "dogs" / "6.webp").write_bytes(encoded(picture(), "WEBP"))
    (folder / "labels.csv").write_text("1.jpg,cat")
    return folder


def damage(photos):
    (photos / "cats" / "a.jpg").write_bytes(JPEG[:1000])
    (photos / "cats" / "old" / "b.png").write_bytes(b"")
    (photos / "dogs" / "c.gif").symlink_to("nowhere")


LISTED = """\
Damaged:
  cats/a.jpg: it is truncated: its end is missing after 1,000 bytes
  cats/old/b.png: it is empty
  dogs/c.gif: it does not exist, or not any more

"""


def test_a_folder_without_damage_exits_with_zero(photos, capfd):
    assert main(["check-images", str(photos)]) == 0
    output = capfd.readouterr()
    assert output.out == f"{photos}: 6 images checked, 0 damaged.\n"
    assert output.err == ""


def test_damaged_images_are_listed_and_exit_with_one(photos, capfd):
    damage(photos)
    assert main(["check-images", str(photos)]) == 1
    output = capfd.readouterr()
    assert output.out == LISTED + (f"{photos}: 9 images checked, 3 damaged.\n")
    assert output.err == ""


def test_messages_of_libraries_do_not_appear_in_the_report(photos, capfd):
    """The JPEG library writes to standard error."""
    (photos / "cats" / "torn.png").write_bytes(PNG[:1000] + bytes(30) + PNG[1030:])
    tables = JPEG.index(b"\xff\xc4") + 5
    (photos / "cats" / "wrong.jpg").write_bytes(JPEG[:tables] + b"\xff" * 16 + JPEG[tables + 16 :])
    assert main(["check-images", str(photos)]) == 1
    output = capfd.readouterr()
    assert re.search(r"  cats/torn.png: (OpenCV|TensorFlow) cannot decode ", output.out)
    assert re.search(r"  cats/wrong.jpg: (OpenCV|TensorFlow) cannot decode ", output.out)
    assert output.err == ""


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.ENOMEM])
def test_images_that_cannot_be_read_now_are_not_damaged(number, photos, capfd, monkeypatch):
    """For example all images, with too many open files."""
    damage(photos)
    opened = os.open

    def fails(path, *arguments, **more):
        if str(path).endswith(".png"):
            raise OSError(number, os.strerror(number))
        return opened(path, *arguments, **more)

    monkeypatch.setattr(os, "open", fails)
    assert main(["check-images", str(photos)]) == 2
    listed = f"Not checked, and maybe intact:\n  cats/old/3.png: {os.strerror(number)}\n"
    output = capfd.readouterr().out
    assert listed in output
    assert "7 images checked, 2 damaged, 2 not checked" in output


@pytest.mark.parametrize(
    ("folder", "message"),
    [
        ("nowhere", "The path does not exist."),
        ("photos/labels.csv", "The path is a file."),
        ("~/empty", "There are no images in the folder."),
    ],
)
def test_unusable_folders_are_refused_at_once(folder, message, photos, monkeypatch, capfd):
    """With exit code 2, before the first image is checked."""
    monkeypatch.chdir(photos.parent)
    monkeypatch.setenv("HOME", str(photos.parent))
    (photos.parent / "empty").mkdir()
    assert main(["check-images", folder]) == 2
    error = capfd.readouterr().err
    assert message in error and "Expected" in error and "Received: " in error


def test_the_progress_is_shown_on_a_terminal(photos, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["check-images", str(photos)]) == 0
    assert "6/6" in capsys.readouterr().out


def test_the_same_files_are_checked_that_training_reads(tmp_path, capsys):
    """Otherwise damage would go unseen. Both take a name like ".jpg" for an image."""
    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / ".jpg").write_bytes(b"no image")
    assert len(from_directory(tmp_path).file_paths) == 1
    assert main(["check-images", str(tmp_path)]) == 1
    assert "cats/.jpg: it is not a JPEG" in capsys.readouterr().out
