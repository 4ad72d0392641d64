"""Layers in a row: what is drawn where, what follows, what is refused, what is saved."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.augmentation import AugmentationLayer, Sequence
from keras_multigpu.augmentation.function import Function
from keras_multigpu.augmentation.random_numbers import Draws
from keras_multigpu.seeded_layers import folded

IMAGES = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
SEEDS = tf.constant([[1, 2], [3, 4]], tf.int32)


@keras.saving.register_keras_serializable("test_sequence")
class Brighter(AugmentationLayer):
    """Adds a number to each image."""

    def draw(self, seeds, shape):
        return {"added": Draws(seeds).uniform(0.0, 9.0)}

    def change_images(self, images, drawn):
        return images + drawn["added"][:, None, None, None]


@keras.saving.register_keras_serializable("test_sequence")
class ImagesOnly(Brighter):
    """Cannot move anything with its images."""

    unsupported = ("bounding_boxes", "segmentation_masks")


@keras.saving.register_keras_serializable("test_sequence")
def turned(images):
    return images[:, ::-1]


def boxes_for(images):
    boxes = np.tile(np.array([[1, 1, 3, 2]], np.float32), (len(images), 1, 1))
    return {"boxes": boxes, "labels": np.ones((len(images), 1), np.int32)}


def test_each_place_draws_for_itself():
    layer = Sequence([Brighter(), Brighter()])
    drawn = layer.draw(SEEDS, (4, 6, 3))
    assert list(drawn) == ["0: Brighter", "1: Brighter"]
    expected = [Brighter().draw(folded(SEEDS, place), (4, 6, 3))["added"] for place in (0, 1)]
    for values, known in zip(drawn.values(), expected, strict=True):
        np.testing.assert_array_equal(values["added"], known)
    assert np.all(expected[0] != expected[1])
    changed = layer.apply(IMAGES, drawn)
    np.testing.assert_allclose(
        changed, IMAGES + (expected[0] + expected[1]).numpy()[:, None, None, None], rtol=1e-6
    )


def test_layers_inside_layers():
    layer = Sequence([Brighter(), Sequence([Brighter()])])
    drawn = layer.draw(SEEDS, (4, 6, 3))
    assert list(drawn["1: Sequence"]) == ["0: Brighter"]
    inner = Brighter().draw(folded(folded(SEEDS, 1), 0), (4, 6, 3))
    np.testing.assert_array_equal(drawn["1: Sequence"]["0: Brighter"]["added"], inner["added"])


def test_later_layers_see_the_changed_shape():
    layer = Sequence([keras.layers.Resizing(2, 3), Brighter(), keras.layers.CenterCrop(1, 2)])
    assert layer.changed_shape((4, 6, 3)) == (1, 2, 3)
    assert layer(IMAGES).shape == (2, 1, 2, 3)
    resized = keras.layers.CenterCrop(1, 2)(keras.layers.Resizing(2, 3)(IMAGES.astype(np.float32)))
    np.testing.assert_array_equal(layer(IMAGES, training=False), resized)


def test_targets_pass_through_all_layers():
    layer = Sequence(
        [keras.layers.RandomFlip("horizontal"), keras.layers.Rescaling(1.0), Brighter()],
        bounding_box_format="xyxy",
        segmentation_masks=True,
    )
    count = 16
    images = np.tile(np.arange(6, dtype=np.float32)[:, None], (count, 4, 1, 3))
    masks = images[..., :1].astype(np.int32)
    data = {
        "images": images,
        "segmentation_masks": masks,
        "bounding_boxes": boxes_for(images),
        "labels": np.arange(count),
        "others": np.ones(count),
    }
    changed = layer(data)
    flipped = changed["segmentation_masks"].numpy()[:, 0, 0, 0] == 5
    assert 0 < flipped.sum() < count
    left_most = np.where(flipped, 6 - 3, 1)
    np.testing.assert_allclose(changed["bounding_boxes"]["boxes"][:, 0, 0], left_most, atol=1e-5)
    np.testing.assert_array_equal(changed["labels"], np.arange(count))
    np.testing.assert_array_equal(changed["others"], np.ones(count))
    rising = changed["images"][:, 0, 5, 0] > changed["images"][:, 0, 0, 0]
    np.testing.assert_array_equal(rising, ~flipped)


@pytest.mark.parametrize(
    "layers",
    [
        [ImagesOnly()],
        [Brighter(), Sequence([ImagesOnly()])],
        [keras.layers.RandomElasticTransform(0.5)],
        [keras.layers.Pipeline([keras.layers.RandomElasticTransform(0.5)])],
        [lambda images: images],
    ],
)
def test_targets_are_refused_at_construction(layers):
    """By the one layer that cannot move them, however deep it is."""
    Sequence(layers)
    with pytest.raises(ValueError, match="cannot change `bounding_boxes`"):
        Sequence(layers, bounding_box_format="xyxy")
    with pytest.raises(ValueError, match="cannot change `segmentation_masks`"):
        Sequence(layers, segmentation_masks=True)


def test_a_function_that_keeps_pixels_takes_targets():
    layer = Sequence(
        [Function(lambda images: images + 1, moves_pixels=False)],
        bounding_box_format="xyxy",
        segmentation_masks=True,
    )
    changed = layer({"images": IMAGES, "bounding_boxes": boxes_for(IMAGES)})
    np.testing.assert_array_equal(changed["images"], IMAGES + 1.0)


@pytest.mark.parametrize("layers", [[], Brighter(), None])
def test_no_list_of_layers(layers):
    with pytest.raises(ValueError, match="`layers` is not a list of layers"):
        Sequence(layers)


@pytest.mark.slow
def test_a_saved_model_draws_the_same(tmp_path):
    keras_cv = pytest.importorskip("keras_cv")
    inner = Sequence([keras.layers.RandomFlip(), keras_cv.layers.RandomBrightness(0.3)])
    layer = Sequence([Brighter(), inner, Function(turned)], seed=4)
    inputs = keras.Input((4, 6, 3))
    model = keras.Model(inputs, layer(inputs))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    images = IMAGES.astype(np.float32)
    np.testing.assert_array_equal(again(images, training=True), model(images, training=True))
    np.testing.assert_array_equal(again(images), model(images))
    assert list(again.layers[1].draw(SEEDS, (4, 6, 3))) == list(layer.draw(SEEDS, (4, 6, 3)))
