"""Plain functions as layers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.augmentation import Function

IMAGES = np.arange(2 * 3 * 4 * 1, dtype=np.uint8).reshape(2, 3, 4, 1)


@keras.saving.register_keras_serializable("test_function")
def darker(images):
    return images / 2


def only_in_training(images, training):
    return images + 1 if training else images


def test_a_function_changes_images():
    np.testing.assert_array_equal(Function(darker)(IMAGES), IMAGES / 2)
    assert Function(darker).title == "darker"


def test_a_function_gets_the_training_flag():
    layer = Function(only_in_training)
    np.testing.assert_array_equal(layer(IMAGES, training=True), IMAGES + 1.0)
    np.testing.assert_array_equal(layer(IMAGES, training=False), IMAGES)


def test_boxes_are_refused_unless_pixels_stay():
    """A function is assumed to move pixels unless `moves_pixels=False`."""
    with pytest.raises(ValueError, match=r"augmentation.Function\(..., moves_pixels=False\)"):
        Function(darker, bounding_box_format="xyxy")
    layer = Function(darker, moves_pixels=False, bounding_box_format="xyxy")
    boxes = {"boxes": np.array([[[0.0, 0, 2, 2]]] * 2, np.float32), "labels": np.ones((2, 1))}
    changed = layer({"images": IMAGES, "bounding_boxes": boxes})
    np.testing.assert_array_equal(changed["bounding_boxes"]["boxes"], boxes["boxes"])


def test_a_changed_number_of_images_is_an_error():
    with pytest.raises(tf.errors.InvalidArgumentError, match="changed the number of images"):
        Function(lambda images: images[:1])(IMAGES)
