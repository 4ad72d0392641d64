"""Wrapped layers of keras-cv: they draw by seed, masks follow, and some are refused."""

import numpy as np
import pytest
from helpers.foreign_layers import HEIGHT, WIDTH, bright, changed_alone_and_together, pictures

import keras_multigpu as kmg
from keras_multigpu.augmentation import KerasCVLayer

keras_cv = pytest.importorskip("keras_cv")

CV = keras_cv.layers
RANGE = {"value_range": (0, 255)}

# Of each kind of layer of keras-cv one.
LAYERS = {
    "RandomFlip": lambda: CV.RandomFlip("horizontal_and_vertical"),
    "JitteredResize": lambda: CV.JitteredResize((24, 28), (0.9, 1.0), bounding_box_format="xywh"),
    "RandomChoice": lambda: CV.RandomChoice([CV.RandomFlip(), CV.RandomHue(0.5, **RANGE)]),
    "RandomCropAndResize": lambda: CV.RandomCropAndResize((24, 28), (0.9, 1.0), (0.9, 1.1)),
    "RandomRotation": lambda: CV.RandomRotation(0.1, fill_mode="constant"),
    "Rescaling": lambda: CV.Rescaling(0.5),
}

WITH_MASKS = {"JitteredResize", "RandomCropAndResize", "RandomFlip"}


@pytest.mark.parametrize("name", ["RandomFlip", "JitteredResize", "RandomChoice"])
@pytest.mark.slow
def test_each_layer_draws_for_each_image_and_masks_follow(name):
    images, masks, _ = pictures(3)
    data = {"images": images, "labels": np.arange(3)}
    if name in WITH_MASKS:
        data["segmentation_masks"] = masks
    changed = changed_alone_and_together(KerasCVLayer(LAYERS[name]()), data)
    if name in WITH_MASKS:
        masks = changed["segmentation_masks"]
        assert masks.dtype == np.int32
        assert set(np.unique(masks)) == {0, 7}
        wrong = np.mean(bright(changed["images"]) != (masks[..., 0] == 7))
        assert wrong < 0.04


def test_boxes_are_refused_unless_pixels_stay():
    with pytest.raises(ValueError, match="RandomFlip cannot change `bounding_boxes`"):
        KerasCVLayer(LAYERS["RandomFlip"](), bounding_box_format="xyxy")
    layer = KerasCVLayer(CV.GridMask(), moves_pixels=False, bounding_box_format="xyxy")
    images, masks, boxes = pictures(1)
    targets = {"boxes": boxes, "labels": np.ones((1, 1))}
    changed = layer({"images": images, "bounding_boxes": targets, "segmentation_masks": masks})
    np.testing.assert_array_equal(changed["bounding_boxes"]["boxes"], boxes)
    np.testing.assert_array_equal(changed["segmentation_masks"], masks)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CV.MixUp(), "MixUp mixes the examples"),
        (lambda: CV.RandomChoice([CV.CutMix()]), "CutMix mixes the examples"),
        (
            lambda: CV.RandomCutout(0.3, 0.3, fill_mode="gaussian_noise"),
            "RandomCutout draws from TensorFlow's global stream .RandomStandardNormal",
        ),
        (lambda: CV.RandomAspectRatio((0.8, 1.2)), "RandomAspectRatio gives each image another"),
    ],
)
def test_layers_are_refused_at_construction(make, message):
    """Layers that are not a function of one example and its seed, or change image sizes."""
    with pytest.raises(ValueError, match=message):
        KerasCVLayer(make())


def test_a_layer_by_itself_draws_as_in_a_sequence():
    flip, images = CV.RandomFlip(), np.tile(np.arange(6.0, dtype="f4")[:, None], (8, 5, 1, 3))
    one, other = (
        next(iter(kmg.data.from_arrays(images, augment=augment).epoch(0))).numpy()
        for augment in ([flip], kmg.augmentation.Sequence([flip]))
    )
    np.testing.assert_array_equal(one, other)
    assert 0 < (one != images).any((1, 2, 3)).sum() < 8


def test_masks_are_refused_where_they_cannot_follow():
    layer = KerasCVLayer(LAYERS["RandomRotation"]())
    with pytest.raises(ValueError, match="RandomRotation cannot change `segmentation_masks`"):
        layer.require_support("segmentation_masks")


def test_in_a_model_one_seed_decides_the_draws(name="RandomFlip"):
    """The batch may be empty; at inference nothing changes."""
    images = np.random.default_rng(0).uniform(0, 255, (8, 6, 5, 3)).astype(np.float32)
    first, again = (KerasCVLayer(LAYERS[name](), seed=3)(images) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != images)
    layer = KerasCVLayer(LAYERS[name](), seed=3)
    np.testing.assert_array_equal(layer(images, training=False), images)
    assert layer(images[:0]).shape == (0, 6, 5, 3)


def test_at_inference_images_are_resized_and_scaled():
    images = np.full((2, HEIGHT, WIDTH, 3), 20, np.float32)
    crop = KerasCVLayer(LAYERS["RandomCropAndResize"]())
    np.testing.assert_allclose(crop(images, training=False), np.full((2, 24, 28, 3), 20))
    scaled = KerasCVLayer(LAYERS["Rescaling"]())(images, training=False)
    np.testing.assert_allclose(scaled, images / 2)
