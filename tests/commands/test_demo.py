"""`keras-multigpu demo`: what it prints and draws."""

import sys

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.commands import demo as command
from keras_multigpu.commands import demo_digits, main
from keras_multigpu.commands.demo import (
    CASES,
    Result,
    ours_is_one_device,
    picture_of,
    row,
)
from keras_multigpu.commands.demo_digits import draw_digits

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.slow
def test_a_small_demo_matches_one_device(tmp_path, monkeypatch, capsys):
    """With a hundred digits, an epoch, and the fastest comparison, drawn twice."""
    monkeypatch.setattr(demo_digits, "COUNT", 130)
    monkeypatch.setattr(command, "EPOCHS", 1)
    monkeypatch.setattr(command, "CASES", CASES[2:] * 2)
    before = tf.config.optimizer.get_experimental_options()
    try:
        assert main(["demo", "--folder", str(tmp_path)]) == 0
    finally:
        tf.config.optimizer.set_experimental_options(before)
    printed = capsys.readouterr().out
    head, title, one, ours, *_ = [line.split() for line in printed.splitlines()[2:]]
    assert head == ["final", "loss", "accuracy", "weights", "differ", "by"]
    assert " ".join(title).startswith("dense net with BatchNorm, 97 digits")
    assert (one[:2], one[-1]) == (["one", "device"], "-")
    assert (ours[:3], float(ours[-1]) < 1e-4) == (["two", "replicas,", "keras_multigpu"], True)
    assert (tmp_path / "distance_from_one_device.png").read_bytes().startswith(PNG)


def test_the_same_digits_are_drawn_each_time():
    images, kinds = draw_digits()
    assert (images.shape, np.bincount(kinds).tolist()) == ((1800, 8, 8, 1), [180] * 10)
    assert 0 <= images.min() and images.max() <= 255
    np.testing.assert_array_equal(images, draw_digits()[0])


def test_without_matplotlib_a_line_replaces_the_picture(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install matplotlib" in picture_of({}, tmp_path / "distance_from_one_device.png")
    assert list(tmp_path.iterdir()) == []


ONE = Result([2.0, 0.5], 0.9, np.array([1.0, -4.0]))
SAME = Result([2.0, 0.5], 0.9, np.array([1.0, -4.0]))
OTHER = Result([2.0, 0.75], 0.8, np.array([1.0, -3.0]))
CRASHED = Result([2.0], None, np.zeros(0), "InvalidArgumentError")


@pytest.mark.parametrize(("ours", "kept"), [(SAME, True), (OTHER, False), (CRASHED, False)])
def test_the_demo_admits_a_broken_promise(ours, kept):
    results = {"one": [ONE] * 3, "ours": [SAME, ours, SAME], "stock": [OTHER] * 3}
    assert ours_is_one_device(results) is kept


def test_a_row_shows_differences_and_crashes():
    assert row(ONE, ONE, True).split() == ["0.5000", "90.0%", "-"]
    assert row(OTHER, ONE, False).split() == ["0.7500", "80.0%", "2e-01"]
    assert row(CRASHED, ONE, False) == "failed in epoch 2: InvalidArgumentError"
