"""Linear changes of colour against NumPy, hue and saturation against `colorsys` of Python."""

import colorsys

import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import pictures

from keras_multigpu.augmentation.color import (
    ColorMap,
    apply_matrices,
    away_from,
    blended_with_gray,
    change_hue_and_saturation,
    shifted,
    then,
)

COUNT = 3
RANDOM = np.random.default_rng(1)


def numbers(*shape):
    return tf.constant(RANDOM.uniform(-0.8, 1.2, (COUNT, *shape)).astype("float32"))


MAPS = {
    "shift of all": shifted(50 * numbers(1)),
    "shift of each": shifted(50 * numbers(3)),
    "scale": away_from(tf.zeros([COUNT, 1]), numbers()),
    "contrast": away_from(100 + 50 * numbers(3), numbers()),
    "gray": blended_with_gray(numbers()),
    "matrix": ColorMap(numbers(3, 3), 20 * numbers(3)),
}


def by_numpy(images, color_map):
    """A map in double precision, without a clip."""
    matrices, bias = color_map
    eye = np.eye(3)
    matrices = np.ones((COUNT, 1)) if matrices is None else np.asarray(matrices, np.float64)
    full = matrices if matrices.ndim == 3 else matrices[:, :, None] * eye
    bias = np.broadcast_to(bias, (COUNT, 3))
    return np.einsum("nij,nhwj->nhwi", full, images) + bias[:, None, None]


@pytest.mark.parametrize("size", [(4, 6), (5, 7)])
@pytest.mark.parametrize("name", MAPS)
def test_maps_are_applied_and_clipped(name, size):
    images = pictures((COUNT, *size, 3))
    result = apply_matrices(tf.constant(images), *MAPS[name], (0.0, 255.0))
    expected = by_numpy(images, MAPS[name]).clip(0, 255)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("second", MAPS)
@pytest.mark.parametrize("first", MAPS)
def test_two_maps_make_one(first, second):
    images = pictures((COUNT, 2, 2, 3))
    together = then(MAPS[first], MAPS[second])
    expected = by_numpy(by_numpy(images, MAPS[first]), MAPS[second])
    np.testing.assert_allclose(by_numpy(images, together), expected, rtol=0, atol=2e-3)


def test_maps_without_a_mix_of_channels_stay_cheap():
    """No matrix where a number for each channel, or none, will do."""
    assert then(MAPS["shift of all"], MAPS["shift of each"]).matrices is None
    assert then(MAPS["contrast"], MAPS["scale"]).matrices.shape == (COUNT, 1)
    assert then(MAPS["contrast"], MAPS["gray"]).matrices.shape == (COUNT, 3, 3)


@pytest.mark.parametrize("name", MAPS)
def test_gray_images_take_what_happens_to_the_red_of_gray(name):
    """As if the one channel were three, of which the first is kept."""
    images = pictures((COUNT, 4, 5, 1))
    result = apply_matrices(tf.constant(images), *MAPS[name], (0.0, 255.0))
    expected = by_numpy(np.repeat(images, 3, axis=3), MAPS[name])[..., :1].clip(0, 255)
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("channels", [3, 4])
def test_plain_operations_give_the_same_pixels(channels, monkeypatch):
    """Beside a graphics card nothing is compiled, and no matrix product rounds to eleven bits."""
    images = tf.constant(pictures((COUNT, 4, 5, channels)))
    expected = apply_matrices(images, *MAPS["matrix"], (0.0, 255.0))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a card"])
    monkeypatch.setattr(tf, "matmul", None)
    result = apply_matrices(images, *MAPS["matrix"], (0.0, 255.0))
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
