"""The operations of policies, each against Pillow."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.augmentation.policies import operations as policy_operations
from keras_multigpu.augmentation.policies.operations import VALUE_OPERATIONS, as_levels, from_levels

Image = pytest.importorskip("PIL.Image")
ImageEnhance = pytest.importorskip("PIL.ImageEnhance")
ImageOps = pytest.importorskip("PIL.ImageOps")

RANDOM = np.random.default_rng(0)

# Noise, low contrast, a ramp, one colour, and too few pixels to equalize.
PICTURES = (
    RANDOM.integers(0, 256, (31, 40, 3)),
    RANDOM.normal(120, 20, (32, 24, 3)).clip(0, 255),
    np.broadcast_to(np.linspace(30, 180, 20)[:, None, None], (20, 16, 3)),
    np.full((17, 17, 3), 77),
    RANDOM.integers(0, 256, (9, 9, 3)),
)


def enhanced(name, picture, factor):
    return getattr(ImageEnhance, name)(picture).enhance(factor)


PILLOW = {
    "identity": lambda picture, magnitude: picture,
    "auto_contrast": lambda picture, magnitude: ImageOps.autocontrast(picture),
    "equalize": lambda picture, magnitude: ImageOps.equalize(picture),
    "solarize": lambda picture, magnitude: ImageOps.solarize(picture, magnitude),
    "posterize": lambda picture, magnitude: ImageOps.posterize(picture, int(magnitude)),
    "color": lambda picture, magnitude: enhanced("Color", picture, magnitude),
    "contrast": lambda picture, magnitude: enhanced("Contrast", picture, magnitude),
    "brightness": lambda picture, magnitude: enhanced("Brightness", picture, magnitude),
    "sharpness": lambda picture, magnitude: enhanced("Sharpness", picture, magnitude),
}
MAGNITUDES = {
    "identity": (0,),
    "auto_contrast": (0,),
    "equalize": (0,),
    "solarize": (0, 100.5, 128, 255, 256),
    "posterize": (1, 2, 4, 7, 8),
}
FACTORS = (0, 0.1, 0.5, 1, 1.3, 1.9)


def changed(name, picture, magnitude):
    levels = tf.constant(np.asarray(picture)[None], tf.float32)
    result = VALUE_OPERATIONS[name](levels, tf.constant([magnitude], tf.float32))
    return result[0].numpy()


@pytest.mark.parametrize("mode", ("RGB", "L"))
@pytest.mark.parametrize("name", VALUE_OPERATIONS)
def test_each_operation_equals_pillows(name, mode):
    """Within one of 256 levels where it rounds."""
    exact = name in MAGNITUDES and name != "auto_contrast"
    for picture in PICTURES:
        picture = Image.fromarray(picture.astype("uint8")).convert(mode)
        for magnitude in MAGNITUDES.get(name, FACTORS):
            expected = np.asarray(PILLOW[name](picture, magnitude), np.float32)
            expected = expected.reshape(*expected.shape[:2], -1)
            levels = np.asarray(picture).reshape(expected.shape)
            result = changed(name, levels, magnitude)
            distance = np.abs(result - expected)
            assert distance.max() <= (0 if exact else 1), magnitude
            assert (distance > 0).mean() < 0.1, magnitude


@pytest.mark.parametrize("name", VALUE_OPERATIONS)
def test_each_operation_keeps_whole_levels_and_alpha(name):
    """Results are whole numbers from 0 to 255; alpha stays beside gray and beside colours."""
    magnitude = MAGNITUDES.get(name, FACTORS)[-2:][0]
    for channels in (2, 4):
        levels = RANDOM.integers(0, 256, (12, 11, channels))
        result = changed(name, levels, magnitude)
        np.testing.assert_array_equal(result[..., -1], levels[..., -1])
        np.testing.assert_array_equal(result, np.round(result).clip(0, 255))
        alone = changed(name, levels[..., :-1], magnitude)
        np.testing.assert_array_equal(result[..., :-1], alone)


@pytest.mark.parametrize("name", VALUE_OPERATIONS)
def test_each_operation_treats_images_independently(name):
    levels = RANDOM.integers(0, 256, (3, 10, 12, 3)).astype("float32")
    magnitudes = np.array((MAGNITUDES.get(name, FACTORS) * 4)[1:4], "float32")
    result = VALUE_OPERATIONS[name](tf.constant(levels), tf.constant(magnitudes))
    for one, image, magnitude in zip(result, levels, magnitudes, strict=True):
        np.testing.assert_array_equal(one, changed(name, image, magnitude))
    empty = VALUE_OPERATIONS[name](tf.zeros((0, 10, 12, 3)), tf.zeros(0))
    assert empty.shape == (0, 10, 12, 3)


@pytest.mark.parametrize("size", ((1, 1), (1, 5), (2, 2)))
def test_very_small_images_keep_their_shape_and_stay_finite(size):
    levels = RANDOM.integers(0, 256, (*size, 3))
    for name in VALUE_OPERATIONS:
        result = changed(name, levels, MAGNITUDES.get(name, FACTORS)[-1])
        assert result.shape == (*size, 3)
        assert np.isfinite(result).all()


def test_other_ranges_of_values_become_levels_and_back():
    images = tf.constant([0.0, 0.1, 0.5, 1.0, 1.5, -1.0])
    levels = as_levels(images, (0.0, 1.0))
    np.testing.assert_array_equal(levels, [0, 26, 128, 255, 255, 0])
    back = from_levels(levels, (0.0, 1.0))
    np.testing.assert_allclose(back, np.array([0, 26, 128, 255, 255, 0]) / 255, rtol=1e-6)
    np.testing.assert_array_equal(as_levels(tf.constant([99.4, 99.5]), (0.0, 255.0)), [99, 100])
    centered = policy_operations.as_levels(tf.constant([-1.0, 0.0, 1.0]), (-1.0, 1.0))
    np.testing.assert_array_equal(centered, [0, 128, 255])
