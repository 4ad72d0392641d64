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


@pytest.mark.parametrize(
    "layer",
    [KERAS.RandomZoom((-0.2, 0.1), fill_mode="constant"), KERAS.CenterCrop(24, 28)],
    ids=["RandomZoom", "CenterCrop"],
)
@pytest.mark.slow
def test_each_layer_draws_for_each_image_and_masks_follow(layer):
    images, masks, _ = pictures(3)
    data = {
        "images": images.astype(np.uint8),
        "labels": np.arange(3),
        "segmentation_masks": [masks, (masks // 7).astype(np.uint8)],
    }
    changed = changed_alone_and_together(KerasLayer(layer), data)
    first, second = changed["segmentation_masks"]
    assert (first.dtype, second.dtype) == (np.int32, np.uint8)
    np.testing.assert_array_equal(first, 7 * second)
    assert set(np.unique(first)) == {0, 7}
    assert np.mean(bright(changed["images"]) != (first[..., 0] == 7)) < 0.03


REFUSED = [
    (KERAS.RandomFlip(), "bounding_boxes", "only layers of this package move boxes"),
    (KERAS.RandomElasticTransform(0.9), "segmentation_masks", "bends them by another draw"),
    (KERAS.Dropout(0.5), "segmentation_masks", "it takes images only"),
    # Its name is that of a layer that leaves pixels where they are.
    (
        type("Rescaling", (KERAS.Layer,), {"call": lambda self, x: x[:, ::-1]})(),
        "segmentation_masks",
        "it takes images only",
    ),
]


@pytest.mark.parametrize(("layer", "kind", "reason"), REFUSED)
def test_targets_that_cannot_follow_are_refused_unless_pixels_stay(layer, kind, reason):
    images, masks, boxes = pictures(1)
    targets = {"bounding_boxes": {"boxes": boxes, "labels": np.ones((1, 1))}}
    data = {"images": images, kind: {"segmentation_masks": masks, **targets}[kind]}
    settings = {"bounding_box_format": "xyxy"} if kind == "bounding_boxes" else {}
    with pytest.raises(ValueError, match=f"cannot change `{kind}`.*{reason}.*moves_pixels=False"):
        KerasLayer(layer, **settings)(data)
    still = KerasLayer(KERAS.Dropout(0.5), moves_pixels=False, **settings)(data)
    keras.tree.map_structure(np.testing.assert_array_equal, still[kind], data[kind])


LAYERS = {
    "Equalization": KERAS.Equalization,
    "RandomElasticTransform": lambda: KERAS.RandomElasticTransform(0.9, scale=(0.5, 1.0)),
    "RandomFlip": KERAS.RandomFlip,
}


@pytest.mark.parametrize("name", LAYERS)
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
