"""Whatever file names contain, printing them cannot control a terminal."""

import ast
import logging
import warnings
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers.picture_files import encoded, picture

import keras_multigpu as kmg
from keras_multigpu.checks import printable, problem
from keras_multigpu.commands import main
from keras_multigpu.data.pipeline.damage import DamagedExample
from keras_multigpu.data.preview import make_cells

PACKAGE = Path(kmg.__file__).parent
HOSTILE = "a\x1b]0;owned\x07\x1b[2J\r\nb\u202e\x9b"
"""Sets a terminal's title, clears its screen, ends lines, and makes text run backwards."""

SHOWN = r"a\x1b]0;owned\x07\x1b[2J\r\nb\u202e\x9b"


@pytest.fixture
def photos(tmp_path):
    """A folder, two classes and a damaged file with hostile names."""
    folder = tmp_path / HOSTILE
    for name in (f"{HOSTILE}1", f"{HOSTILE}2"):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{HOSTILE}.png").write_bytes(encoded(picture(8, 8)))
    (folder / name / f"{HOSTILE}damaged.png").write_bytes(b"no image")
    (folder / f"{HOSTILE}.png").write_bytes(encoded(picture(8, 8)))
    return folder


def test_a_name_is_shown_as_python_writes_it():
    assert printable(HOSTILE) == SHOWN
    assert printable("Ünïcode photos/1.jpg") == "Ünïcode photos/1.jpg"
    assert printable("\udcff") == r"\udcff"


def test_an_error_takes_one_line_except_for_arrays():
    text = problem(f"{HOSTILE} came.", "Expected that.", "Do this.", x=np.eye(2), path=HOSTILE)
    assert text == (
        f"{SHOWN} came. Expected that. Do this. Received: "
        f"x=array([[1., 0.],\n       [0., 1.]]), path={HOSTILE!r}"
    )


def test_names_in_data_are_printed_safely_everywhere(photos, tmp_path, capfd, caplog):
    """In warnings, logs, output, representations, errors and titles."""
    caplog.set_level(logging.INFO, "keras_multigpu")
    said = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        whole = kmg.data.from_directory(photos, image_size=(8, 8), on_error="skip")
        list(whole.epoch(0))
        cache = tmp_path / f"{HOSTILE}cache"
        whole.with_(cache=cache).epoch(0)
        next(cache.glob("*.cache")).write_bytes(b"")
        again = kmg.data.from_directory(photos, image_size=(8, 8), on_error="skip")
        again.with_(cache=cache).epoch(0)
    said += [str(warning.message) for warning in caught]
    said += [repr(whole), repr(whole.quarantine)]
    cells = make_cells(tf.zeros((2, 8, 8, 3)), np.array([0, 1]), whole.class_names)
    said += [cell.text for cell in cells]
    said += [str(DamagedExample(f"its mask {HOSTILE}: it is empty", HOSTILE))]
    assert len(said) >= 7 and "is damaged and is rebuilt" in caplog.text
    output = capfd.readouterr()
    lines = [*said, *caplog.messages, *output.out.splitlines(), *output.err.splitlines()]
    assert [line for line in lines if not line.isprintable()] == []
    assert sum(SHOWN in line for line in lines) >= 8
    # Values for programs keep the name as it is.
    assert whole.quarantine[0].name == str(photos / f"{HOSTILE}2" / f"{HOSTILE}damaged.png")


def test_check_images_prints_names_safely(photos, tmp_path, capfd):
    assert main(["check-images", str(photos)]) == 1
    assert main(["check-images", str(tmp_path / f"{HOSTILE}nowhere")]) == 2
    output = capfd.readouterr()
    lines = [*output.out.split("\n"), *output.err.split("\n")]
    assert all(line.isprintable() for line in lines)
    assert sum(SHOWN in line for line in lines) == 3


def test_only_checks_warns_and_makes_the_logger():
    """`checks.warn` and the logger's filter are what makes names safe."""
    calls = [
        (path.name, node.lineno)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("warnings.warn", "logging.getLogger")
        and [ast.unparse(argument) for argument in node.args] != ["'keras_multigpu'"]
    ]
    assert [name for name, _ in calls] == ["checks.py"]
