"""Wrapped layers of Keras: what they draw, which targets follow, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.foreign_layers import (
    HEIGHT,
    WIDTH,
    bright,
    changed_alone_and_together,
    pictures,
)

from keras_multigpu.augmentation.wrapping.keras_layer import KerasLayer

KERAS = keras.layers

# All image layers of Keras, except those that mix examples and AugMix.
LAYERS = {
    "RandomZoom": lambda: KERAS.RandomZoom((-0.2, 0.1), fill_mode="constant"),
    "CenterCrop": lambda: KERAS.CenterCrop(24, 28),
    "MaxNumBoundingBoxes": lambda: KERAS.MaxNumBoundingBoxes(2),
    "AutoContrast": lambda: KERAS.AutoContrast(),
    "ContrastLimitedAdaptiveHistogramEqualization": lambda: (
        KERAS.ContrastLimitedAdaptiveHistogramEqualization()
    ),
    "Equalization": lambda: KERAS.Equalization(),
    "GaussianNoise": lambda: KERAS.GaussianNoise(1.0),
    "Normalization": lambda: KERAS.Normalization(mean=0.5, variance=0.9),
    "RandAugment": lambda: KERAS.RandAugment(),
    "RandomBrightness": lambda: KERAS.RandomBrightness(0.1),
    "RandomColorDegeneration": lambda: KERAS.RandomColorDegeneration(0.2),
    "RandomColorJitter": lambda: KERAS.RandomColorJitter(brightness_factor=0.1, hue_factor=0.1),
    "RandomContrast": lambda: KERAS.RandomContrast(0.2),
    "RandomCrop": lambda: KERAS.RandomCrop(24, 28),
    "RandomElasticTransform": lambda: KERAS.RandomElasticTransform(0.9, scale=(0.5, 1.0)),
    "RandomErasing": lambda: KERAS.RandomErasing(0.9, fill_value=20.0),
    "RandomFlip": lambda: KERAS.RandomFlip(),
    "RandomGaussianBlur": lambda: KERAS.RandomGaussianBlur(1.0),
    "RandomGrayscale": lambda: KERAS.RandomGrayscale(0.5),
    "RandomHue": lambda: KERAS.RandomHue(0.3),
    "RandomInvert": lambda: KERAS.RandomInvert(0.5),
    "RandomPerspective": lambda: KERAS.RandomPerspective(1.0, 0.2),
    "RandomPosterization": lambda: KERAS.RandomPosterization(4),
    "RandomRotation": lambda: KERAS.RandomRotation(0.2, fill_mode="constant"),
    "RandomSaturation": lambda: KERAS.RandomSaturation(0.5),
    "RandomSharpness": lambda: KERAS.RandomSharpness(0.5),
    "RandomShear": lambda: KERAS.RandomShear((0.1, 0.3), 0.3, fill_mode="constant"),
    "RandomTranslation": lambda: KERAS.RandomTranslation(0.1, 0.1, fill_mode="constant"),
    "Rescaling": lambda: KERAS.Rescaling(1.0),
    "Resizing": lambda: KERAS.Resizing(20, 30),
    "Solarization": lambda: KERAS.Solarization(0.5, 0.5),
}

NO_BOXES = {"RandAugment", "RandomCrop", "RandomElasticTransform", "RandomShear"}
NO_MASKS = {"RandomElasticTransform"}
# Their brightness no longer tells where the bright rectangle is.
BRIGHTNESS_CHANGES = {"RandAugment", "RandomErasing", "RandomInvert", "Solarization"}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.in_test_all("all layers take the same path", after=3)
@pytest.mark.slow
def test_each_layer_draws_for_each_image_and_targets_follow(name):
    layer = KerasLayer(LAYERS[name]())
    layer.bounding_box_format = "xywh"
    images, masks, boxes = pictures(3)
    data = {"images": images.astype(np.uint8), "labels": np.arange(3)}
    if name not in NO_MASKS | {"RandAugment"}:
        data["segmentation_masks"] = [masks, (masks // 7).astype(np.uint8)]
    if name not in NO_BOXES:
        boxes[..., 2:] -= boxes[..., :2]
        data["bounding_boxes"] = {"boxes": boxes, "labels": np.full((3, 1), 3)}
    changed = changed_alone_and_together(layer, data)
    rectangles = bright(changed["images"])
    if "segmentation_masks" in changed:
        first, second = changed["segmentation_masks"]
        assert (first.dtype, second.dtype) == (np.int32, np.uint8)
        np.testing.assert_array_equal(first, 7 * second)
        assert set(np.unique(first)) == {0, 7}
        wrong = np.mean(rectangles != (first[..., 0] == 7))
        assert name in BRIGHTNESS_CHANGES or wrong < 0.03
    if "bounding_boxes" in changed:
        found = changed["bounding_boxes"]
        assert found["labels"].dtype == np.int64
        assert found["labels"][:, 0].tolist() == [3] * 3
        if name in BRIGHTNESS_CHANGES:
            np.testing.assert_array_equal(found["boxes"], boxes)
            return
        for rectangle, (x, y, width, height) in zip(rectangles, found["boxes"][:, 0], strict=True):
            rows, columns = np.nonzero(rectangle)
            around = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
            # Interpolation blurs the border.
            np.testing.assert_allclose([x, y, x + width, y + height], around, atol=1.5)


@pytest.mark.parametrize("name", sorted(NO_BOXES))
def test_boxes_are_refused_at_construction(name):
    with pytest.raises(ValueError, match=f"{name} cannot change `bounding_boxes`"):
        KerasLayer(LAYERS[name](), bounding_box_format="xyxy")


def test_masks_are_refused_where_they_cannot_follow():
    layer = KerasLayer(LAYERS["RandomElasticTransform"]())
    images, masks, _ = pictures(1)
    with pytest.raises(ValueError, match="RandomElasticTransform cannot change `segm"):
        layer({"images": images, "segmentation_masks": masks})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KERAS.MixUp(), "MixUp mixes the examples of a batch"),
        (lambda: KERAS.Pipeline([KERAS.CutMix()]), "CutMix mixes the examples of a batch"),
        (lambda: KERAS.AugMix(), "AugMix draws its operations once"),
    ],
)
def test_layers_are_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        KerasLayer(make())


def test_a_layer_of_images_only_refuses_boxes_unless_pixels_stay():
    """It is assumed to move pixels otherwise."""
    with pytest.raises(ValueError, match="it takes images only.*moves_pixels=False"):
        KerasLayer(KERAS.Dropout(0.5), bounding_box_format="xyxy")
    namesake = type("Rescaling", (KERAS.Layer,), {"call": lambda self, x: x[:, ::-1]})()
    with pytest.raises(ValueError, match="it takes images only"):
        KerasLayer(namesake, bounding_box_format="xyxy")
    layer = KerasLayer(KERAS.Dropout(0.5), moves_pixels=False)
    masks = np.ones((1, HEIGHT, WIDTH, 1), np.int32)
    changed = layer({"images": pictures(1)[0], "segmentation_masks": masks})
    np.testing.assert_array_equal(changed["segmentation_masks"], masks)


@pytest.mark.parametrize("name", ["Equalization", "RandomElasticTransform", "RandomFlip"])
def test_an_empty_batch_stays_empty(name):
    """In Keras, two of these layers fail on an empty batch, which a replica may get."""
    layer = KerasLayer(LAYERS[name]())
    assert layer(pictures(0)[0]).shape == (0, HEIGHT, WIDTH, 3)


def test_in_a_model_the_seed_of_this_layer_decides():
    images = np.random.default_rng(0).uniform(0, 255, (8, 6, 5, 3)).astype(np.float32)
    runs = [KerasLayer(KERAS.RandomFlip(seed=own), seed=3)(images) for own in (1, 2)]
    np.testing.assert_array_equal(*runs)
    assert np.any(runs[0] != images)
    other = KerasLayer(KERAS.RandomFlip(seed=1), seed=4)
    assert np.any(other(images) != runs[0])
    np.testing.assert_array_equal(other(images, training=False), images)


# Keras reads the weights it saves in a way that NumPy 2 warns about.
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_weights_of_wrapped_layers_are_used_and_saved(tmp_path):
    normalization = KERAS.Normalization()
    normalization.adapt(tf.constant([[[[1.0], [3.0]]]]))
    inputs = keras.Input((2, 2, 1))
    model = keras.Model(inputs, KerasLayer(normalization)(inputs))
    images = np.array([[[[1.0], [3.0]], [[5.0], [2.0]]]], np.float32)
    np.testing.assert_allclose(model(images), images - 2, atol=1e-5)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(again(images), images - 2, atol=1e-5)


@pytest.mark.slow
def test_a_layer_is_restored_from_its_config():
    layer = KerasLayer(KERAS.RandomZoom(0.2), moves_pixels=True, seed=5, bounding_box_format="xywh")
    config = keras.saving.serialize_keras_object(layer)
    again = keras.saving.deserialize_keras_object(config)
    assert again.get_config() == layer.get_config()
    assert again.title == "RandomZoom"
