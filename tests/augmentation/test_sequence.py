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
from keras_multigpu.augmentation.sequence import as_layer, as_layers
from keras_multigpu.seeded_layers import fold_seeds

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


def test_each_place_in_the_list_has_its_own_draws():
    layer = Sequence([Brighter(), Brighter()])
    drawn = layer.draw(SEEDS, (4, 6, 3))
    assert list(drawn) == ["0: Brighter", "1: Brighter"]
    expected = [Brighter().draw(fold_seeds(SEEDS, place), (4, 6, 3))["added"] for place in (0, 1)]
    for values, known in zip(drawn.values(), expected, strict=True):
        np.testing.assert_array_equal(values["added"], known)
    assert np.all(expected[0] != expected[1])
    changed = layer.apply(IMAGES, drawn)
    np.testing.assert_allclose(
        changed, IMAGES + (expected[0] + expected[1]).numpy()[:, None, None, None], rtol=1e-6
    )


def test_a_sequence_inside_a_sequence_has_its_own_draws():
    layer = Sequence([Brighter(), Sequence([Brighter()])])
    drawn = layer.draw(SEEDS, (4, 6, 3))
    assert list(drawn["1: Sequence"]) == ["0: Brighter"]
    inner = Brighter().draw(fold_seeds(fold_seeds(SEEDS, 1), 0), (4, 6, 3))
    np.testing.assert_array_equal(drawn["1: Sequence"]["0: Brighter"]["added"], inner["added"])


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
    keras_cv = pytest.importorskip("keras_cv")
    inner = Sequence([Brighter()])
    assert as_layer(inner) is inner
    assert type(as_layer(keras.layers.RandomFlip())) is KerasLayer
    assert type(as_layer(keras_cv.layers.RandomFlip())) is KerasCVLayer


def test_wrappers_get_the_format_of_boxes():
    assert as_layer(keras.layers.Rescaling(2.0), "xywh").bounding_box_format == "xywh"


def test_pipelines_become_their_layers():
    row = keras.layers.Pipeline(
        [
            keras.layers.RandomFlip(),
            keras.Sequential([keras.layers.Rescaling(1 / 255), keras.layers.RandomHue(0.1)]),
        ]
    )
    assert [layer.title for layer in as_layers(row)] == ["RandomFlip", "Rescaling", "RandomHue"]
