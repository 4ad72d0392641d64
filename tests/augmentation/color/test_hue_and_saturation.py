"""Hue and saturation in one pass, against `colorsys` of Python."""

import colorsys

import numpy as np
import tensorflow as tf
from helpers.layer_checks import pictures

from keras_multigpu.augmentation.color.hue_and_saturation import change_hue_and_saturation

COLORS = [
    (0, 0, 0),
    (255, 255, 255),
    (128, 128, 128),
    (255, 0, 0),
    (0, 255, 0),
    (0, 0, 255),
    (255, 255, 0),
    (1, 0, 0),
    (200, 199, 198),
    (10, 250, 30),
]


def by_python(image, shift, factor):
    """One image, a pixel at a time."""
    result = np.empty_like(image)
    for place in np.ndindex(image.shape[:2]):
        hue, saturation, value = colorsys.rgb_to_hsv(*image[place])
        changed = (hue + shift) % 1, min(saturation * factor, 1), value
        result[place] = colorsys.hsv_to_rgb(*changed)
    return result


def test_both_are_those_of_the_standard_library():
    """For special colours and others, in both directions and beyond full saturation."""
    images = pictures((4, 5, 6, 3))
    images[:, :2, :5] = np.reshape(COLORS, (2, 5, 3))
    shift = np.float32([0.3, -0.5, 0.0, -0.01])
    factor = np.float32([0.5, 3.0, 1.0, 0.0])
    result = change_hue_and_saturation(
        tf.constant(images), tf.constant(shift), tf.constant(factor), 0.0
    )
    expected = [by_python(*one) for one in zip(images, shift, factor, strict=True)]
    np.testing.assert_allclose(result, expected, rtol=0, atol=2e-3)


def test_either_can_be_left_out():
    images = pictures((2, 4, 4, 3))
    some = tf.constant([0.2, 0.4])
    none, one = tf.zeros([2]), tf.ones([2])
    change = change_hue_and_saturation
    images = tf.constant(images)
    for partial, complete in (((some, None), (some, one)), ((None, some), (none, some))):
        np.testing.assert_allclose(
            change(images, *partial, 0.0),
            change(images, *complete, 0.0),
            rtol=0,
            atol=1e-3,
        )
    assert change(images, None, None, 0.0) is images


def test_black_can_be_another_value_than_0():
    images = tf.constant(pictures((2, 4, 4, 3), (0, 2)))
    shift, factor = tf.constant([0.2, 0.7]), tf.constant([0.5, 2.0])
    expected = change_hue_and_saturation(images, shift, factor, 0.0)
    result = change_hue_and_saturation(images - 1, shift, factor, -1.0)
    np.testing.assert_allclose(result, expected - 1, rtol=0, atol=1e-5)
