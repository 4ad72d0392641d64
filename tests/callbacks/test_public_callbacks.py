"""What `keras_multigpu.callbacks` offers, and that each of it is explained."""

import inspect
from pathlib import Path

import keras
import pytest

from keras_multigpu import callbacks

ROOT = Path(__file__).parents[2]
NAMES: list[str] = [
    "BatchSizeFinder",
    "BatchSizeScaling",
    "GradientNoiseScale",
    "LearningRateFinder",
    "LearningRateWarmup",
    "NaNGuard",
    "RayReport",
    "ReplicaDriftCheck",
    "ReplicaMetrics",
    "ResumableCheckpoint",
    "ThroughputReport",
]


def public_classes():
    """The classes of the part, by name."""
    found = {name: getattr(callbacks, name) for name in vars(callbacks) if name[0] != "_"}
    return {name: one for name, one in found.items() if inspect.isclass(one)}


def test_the_public_names_are_these():
    """A name is added or removed on purpose: here, in the docs and in CHANGELOG.md."""
    # What others are written with.
    assert sorted(public_classes()) == sorted([*NAMES, "Probe", "RunCallback"])


@pytest.mark.parametrize("name", NAMES)
def test_each_is_a_callback_with_a_page_of_its_own(name):
    """What cannot be looked up does not exist."""
    one = getattr(callbacks, name)
    assert issubclass(one, keras.callbacks.Callback)
    assert one.__doc__
    room = one.__module__.split(".")[2]
    page = (ROOT / "docs" / "callbacks" / f"{room}.md").read_text(encoding="utf-8")
    assert f"::: {one.__module__}.{name}\n" in page
    assert "## Cost" in page, "What it costs is part of what it does."
