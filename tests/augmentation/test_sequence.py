"""`Sequence`: how it wraps layers, what they draw, which targets follow, what is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.augmentation import (
    AugmentationLayer,
    Draws,
    KerasCVLayer,
    KerasLayer,
    RandomGeometry,
    Sequence,
)

IMAGES = np.arange(2 * 4 * 6 * 3, dtype=np.uint8).reshape(2, 4, 6, 3)
SEEDS = tf.constant([[1, 2], [3, 4]], tf.int32)


@keras.saving.register_keras_serializable("test_sequence")
class Brighter(AugmentationLayer):
    """Adds a number to each image."""

    def draw(self, seeds, shape):
        return {"added": Draws(seeds).uniform(0.0, 9.0)}

    def change_images(self, images, drawn):
        return images + drawn["added"][:, None, None, None]


def boxes_for(images):
    boxes = np.tile(np.array([[1, 1, 3, 2]], np.float32), (len(images), 1, 1))
    return {"boxes": boxes, "labels": np.ones((len(images), 1), np.int32)}


def added_by_each(drawn):
    first, second, inner = drawn.values()
    return [one["added"].numpy() for one in (first, second, *inner.values())]


def test_each_place_in_the_list_has_its_own_draws():
    """Also a sequence inside a sequence; the draws of equal layers are unrelated."""
    layer = Sequence([Brighter(), Brighter(), Sequence([Brighter()])])
    drawn = layer.draw(SEEDS, (4, 6, 3))
    assert list(drawn) == ["0: Brighter", "1: Brighter", "2: Sequence"]
    expected = IMAGES + sum(added_by_each(drawn))[:, None, None, None]
    np.testing.assert_allclose(layer.apply(IMAGES, drawn), expected, rtol=1e-6)
    many = tf.stack([tf.fill([20_000], 7), tf.range(20_000)], axis=1)
    alone = Brighter().draw(many, (4, 6, 3))["added"]
    added = [alone, *added_by_each(layer.draw(many, (4, 6, 3)))]
    assert np.abs(np.corrcoef(added) - np.eye(4)).max() < 0.03


def test_later_layers_see_the_changed_shape():
    layer = Sequence([keras.layers.Resizing(2, 3), Brighter(), keras.layers.CenterCrop(1, 2)])
    assert layer.changed_shape((4, 6, 3)) == (1, 2, 3)
    assert layer(IMAGES).shape == (2, 1, 2, 3)
    resized = keras.layers.CenterCrop(1, 2)(keras.layers.Resizing(2, 3)(IMAGES.astype(np.float32)))
    np.testing.assert_array_equal(layer(IMAGES, training=False), resized)


def test_targets_pass_through_all_layers():
    layer = Sequence(
        [RandomGeometry(flip="horizontal"), keras.layers.Rescaling(1.0), Brighter()],
        bounding_box_format="xyxy",
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


def test_each_kind_of_layer_gets_its_wrapper():
    """With the format of boxes; chains become their layers."""
    keras_cv = pytest.importorskip("keras_cv")
    chain = keras.layers.Pipeline(
        [
            keras.layers.RandomFlip(),
            keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.RandomHue(0.1)]),
        ]
    )
    inner = Sequence([Brighter()])
    layers = Sequence([inner, keras_cv.layers.RandomFlip(), chain]).layers
    assert layers[0] is inner
    assert [type(layer) for layer in layers[1:]] == [
        KerasCVLayer,
        KerasLayer,
        KerasLayer,
        KerasLayer,
    ]
    assert [layer.title for layer in layers[2:]] == ["RandomFlip", "Rescaling", "RandomHue"]
    (scaling,) = Sequence([keras.layers.Rescaling(2.0)], bounding_box_format="xywh").layers
    assert scaling.bounding_box_format == "xywh"
