"""`augmentation.recipe`: documented lists of layers."""

import numpy as np
import pytest

import keras_multigpu as kmg
from keras_multigpu.augmentation import recipe

LAYERS = {
    "light": ["RandomGeometry"],
    "standard": ["RandomGeometry", "RandomColor"],
    "strong": ["RandomGeometry", "RandAugment", "RandomErasing"],
    "imagenet": ["RandomGeometry", "TrivialAugment", "RandomErasing"],
}

MIXES = ("strong", "imagenet")

IMAGES = np.random.default_rng(0).integers(0, 256, (4, 12, 16, 3), dtype=np.uint8)
ONE_HOT = np.eye(3, dtype=np.float32)[[0, 1, 2, 0]]


def titles(made):
    return [layer.title for layer in made.layers]


@pytest.mark.parametrize("name", LAYERS)
def test_a_recipe_is_its_list_of_layers(name):
    made = recipe(name)
    assert isinstance(made, kmg.augmentation.Sequence)
    assert titles(made) == LAYERS[name]
    mixed = [*LAYERS[name], "Mix"] if name in MIXES else None
    assert mixed is None or titles(recipe(name, num_classes=3)) == mixed


@pytest.mark.parametrize("name", LAYERS)
def test_a_recipe_resizes_images(name):
    made = recipe(name, size=(8, 6))
    assert made(IMAGES).shape == (4, 8, 6, 3)
    assert made(IMAGES, training=False).shape == (4, 8, 6, 3)
    np.testing.assert_array_equal(recipe(name)(IMAGES, training=False), IMAGES)


@pytest.mark.parametrize("name", LAYERS)
def test_a_recipe_takes_floats_up_to_one(name):
    """The same draws change floats and integers alike, up to rounding."""
    integers, floats = recipe(name), recipe(name, value_range=(0, 1))
    seeds = np.arange(8, dtype=np.int32).reshape(4, 2)
    drawn = integers.draw(seeds, IMAGES.shape[1:])
    expected = np.asarray(integers.apply(IMAGES, drawn)) / 255
    drawn = floats.draw(seeds, IMAGES.shape[1:])
    found = np.asarray(floats.apply(IMAGES.astype(np.float32) / 255, drawn))
    # Policies round to 256 levels, and one level more can cross a threshold.
    assert np.mean(np.abs(found - expected) > 2 / 255) < 0.02


@pytest.mark.parametrize("name", MIXES)
def test_mixing_makes_soft_labels(name):
    made = recipe(name, num_classes=3, seed=1)
    data = {"images": IMAGES, "labels": np.array([0, 1, 2, 0])}
    labels = np.asarray(made(data)["labels"])
    np.testing.assert_allclose(labels.sum(axis=1), 1, rtol=1e-6)
    assert ((labels > 0).sum(axis=1) == 2).any()
    np.testing.assert_array_equal(made(data, training=False)["labels"], ONE_HOT)


@pytest.mark.parametrize("name", LAYERS)
def test_boxes_and_masks_follow(name):
    made = recipe(name, bounding_box_format="xyxy")
    boxes = {"boxes": np.full((4, 1, 4), (2, 2, 9, 9), np.float32), "labels": np.zeros((4, 1))}
    masks = np.ones((4, 12, 16, 1), np.int32)
    data = {"images": IMAGES, "bounding_boxes": boxes, "segmentation_masks": masks}
    changed = made(data)
    assert changed["bounding_boxes"]["boxes"].shape == (4, 1, 4)
    assert set(np.unique(changed["segmentation_masks"])) <= {0, 1}
    if name in MIXES:
        with pytest.raises(ValueError, match="Mix cannot change `bounding_boxes`"):
            recipe(name, num_classes=3, bounding_box_format="xyxy")


def test_shifts_of_the_light_recipe_uncover_black():
    """White images stay white except for black edges of at most an eighth of their side."""
    white = np.full((20, 16, 16, 1), 255, np.uint8)
    changed = np.asarray(recipe("light", seed=3)(white))
    assert (changed[:, 2:-2, 2:-2] == 255).all()
    assert (changed.reshape(20, -1).min(axis=1) < 255).mean() > 0.9
    negative = recipe("light", value_range=(-1, 1)).layers[0]
    assert negative.fill_value == -1
