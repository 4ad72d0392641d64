"""What `keras_multigpu.augmentation` offers, and that each of it is explained."""

import inspect
from pathlib import Path

from keras_multigpu import augmentation

PAGE = Path(__file__).parents[2] / "docs" / "api" / "augmentation.md"
NAMES = [
    "AugMix",
    "AugmentationLayer",
    "CutMix",
    "Draws",
    "Function",
    "KerasCVLayer",
    "KerasLayer",
    "MixUp",
    "MixUpOrCutMix",
    "RandAugment",
    "RandomColor",
    "RandomErasing",
    "RandomGaussianBlur",
    "RandomGeometry",
    "Sequence",
    "TrivialAugment",
    "gallery",
    "recipe",
]


def public_objects():
    """The classes and functions of the part, by name."""
    found = {name: getattr(augmentation, name) for name in vars(augmentation) if name[0] != "_"}
    # `gallery` is a module before the function of that name is imported.
    return {name: one for name, one in found.items() if not inspect.ismodule(one)}


def test_the_public_names_are_these():
    """A name is added or removed on purpose: here, in the docs and in CHANGELOG.md."""
    assert sorted(public_objects()) == NAMES


def test_each_has_a_docstring_and_a_place_on_the_page():
    """What cannot be looked up does not exist."""
    page = PAGE.read_text(encoding="utf-8")
    for name, one in public_objects().items():
        assert one.__doc__, name
        assert f"::: {one.__module__}.{name}\n" in page, name


def test_each_layer_has_a_picture():
    """Drawn while the page is built, under the name of the layer's file."""
    page = PAGE.read_text(encoding="utf-8")
    without = {"AugmentationLayer", "Function", "KerasCVLayer", "KerasLayer", "Sequence"}
    for name, one in public_objects().items():
        if inspect.isclass(one) and issubclass(one, augmentation.AugmentationLayer):
            file = one.__module__.rpartition(".")[2]
            assert name in without or f"(images/{file}.webp)" in page, name
