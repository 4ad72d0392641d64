"""Linear changes of colour against NumPy, hue and saturation against Python's `colorsys`."""

import colorsys

import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import pictures

from keras_multigpu.augmentation.color import LUMA, change_hue_and_saturation, recolor
from keras_multigpu.augmentation.compilation import fuse

COUNT = 3
RANDOM = np.random.default_rng(1)
GRAY = tf.constant([True, False, True])


def numbers(*shape):
    return tf.constant(RANDOM.uniform(-0.8, 1.2, (COUNT, *shape)).astype("float32"))


CHANGES = {
    "shift of all": (None, 50 * numbers(1), None),
    "shift of each": (None, 50 * numbers(3), None),
    "scale": (numbers(1), None, None),
    "contrast": (numbers(1), 100 + 50 * numbers(3), None),
    "gray": (None, None, GRAY),
    "all": (numbers(1), 50 * numbers(3), GRAY),
}


def by_numpy(images, factor, bias, gray):
    """The change in double precision."""
    images = images.astype(np.float64)
    if factor is not None:
        images = images * np.asarray(factor)[:, None, None]
    if bias is not None:
        images = images + np.asarray(bias)[:, None, None]
    if gray is not None:
        images = np.where(gray[:, None, None, None], (images @ LUMA)[..., None], images)
    return images.clip(0, 255)


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
@pytest.mark.parametrize("name", CHANGES)
def test_linear_changes_are_applied_and_clipped(name, size):
    images = pictures((COUNT, *size, 3))
    result = fuse(recolor, [tf.constant(images), *CHANGES[name]], (0.0, 255.0))
    expected = by_numpy(images, *CHANGES[name])
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("channels", [3, 4])
def test_plain_operations_give_the_same_pixels(channels, monkeypatch):
    """With a GPU nothing is compiled, and no matrix product rounds to TensorFloat-32."""
    images = tf.constant(pictures((COUNT, 4, 5, channels)))
    change = [images, *CHANGES["all"]], (0.0, 255.0)
    expected = tf.function(lambda: fuse(recolor, *change), autograph=False)()
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a card"])
    monkeypatch.setattr(tf, "matmul", None)
    result = fuse(recolor, *change)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3)


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


def test_hue_and_saturation_equal_colorsys():
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
