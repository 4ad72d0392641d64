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

from keras_multigpu.augmentation import KerasLayer

KERAS = keras.layers

# Of each kind of layer of Keras some.
LAYERS = {
    "RandomZoom": lambda: KERAS.RandomZoom((-0.2, 0.1), fill_mode="constant"),
    "CenterCrop": lambda: KERAS.CenterCrop(24, 28),
    "MaxNumBoundingBoxes": lambda: KERAS.MaxNumBoundingBoxes(2),
    "Equalization": lambda: KERAS.Equalization(),
    "RandAugment": lambda: KERAS.RandAugment(),
    "RandomCrop": lambda: KERAS.RandomCrop(24, 28),
    "RandomElasticTransform": lambda: KERAS.RandomElasticTransform(0.9, scale=(0.5, 1.0)),
    "RandomErasing": lambda: KERAS.RandomErasing(0.9, fill_value=20.0),
    "RandomFlip": lambda: KERAS.RandomFlip(),
    "RandomShear": lambda: KERAS.RandomShear((0.1, 0.3), 0.3, fill_mode="constant"),
}

NO_BOXES = {"RandAugment", "RandomCrop", "RandomElasticTransform", "RandomShear"}


@pytest.mark.parametrize("name", ["RandomZoom", "CenterCrop", "MaxNumBoundingBoxes"])
@pytest.mark.slow
def test_each_layer_draws_for_each_image_and_targets_follow(name):
    layer = KerasLayer(LAYERS[name]())
    layer.bounding_box_format = "xywh"
    images, masks, boxes = pictures(3)
    boxes[..., 2:] -= boxes[..., :2]
    data = {
        "images": images.astype(np.uint8),
        "labels": np.arange(3),
        "segmentation_masks": [masks, (masks // 7).astype(np.uint8)],
        "bounding_boxes": {"boxes": boxes, "labels": np.full((3, 1), 3)},
    }
    changed = changed_alone_and_together(layer, data)
    rectangles = bright(changed["images"])
    first, second = changed["segmentation_masks"]
    assert (first.dtype, second.dtype) == (np.int32, np.uint8)
    np.testing.assert_array_equal(first, 7 * second)
    assert set(np.unique(first)) == {0, 7}
    assert np.mean(rectangles != (first[..., 0] == 7)) < 0.03
    found = changed["bounding_boxes"]
    assert found["labels"].dtype == np.int64
    assert found["labels"][:, 0].tolist() == [3] * 3
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
