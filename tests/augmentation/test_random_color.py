"""`RandomColor`: each argument against the Keras layer of that name, then their order."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import COLOR, drawn_for, pictures

from keras_multigpu.augmentation import RandomColor

K = keras.layers


def column(values):
    return np.asarray(values, np.float32)[:, None, None, None]


def saturated(images, drawn, values):
    """With (0, 255), Keras allows saturations beyond 1 and returns values below 0."""
    layer, unit = K.RandomSaturation(1.0, value_range=(0, 1)), values[1]
    return layer.transform_images(images / unit, {"factor": drawn}) * unit


# What is drawn for each argument, and what Keras's layer of that name makes of it, in the
# documented order.
PEERS = {
    "brightness": (
        [-0.4, 0.0, 0.9, 0.3],
        lambda images, drawn, values: K.RandomBrightness(1.0, value_range=values).transform_images(
            images, {"rgb_delta": column(drawn) * (values[1] - values[0])}
        ),
    ),
    "contrast": (
        [0.3, 1.0, 1.9, 1.2],
        lambda images, drawn, values: K.RandomContrast(1.0, value_range=values).transform_images(
            images, {"contrast_factor": column(drawn)}
        ),
    ),
    "saturation": ([0.0, 0.5, 1.0, 4.0], saturated),
    "hue": (
        [-0.5, -0.1, 0.0, 0.4],
        lambda images, drawn, values: K.RandomHue(1.0, value_range=values).transform_images(
            images, {"factor": drawn}
        ),
    ),
    "grayscale": (
        [1.0, 0.0, 1.0, 0.0],
        lambda images, drawn, values: K.RandomGrayscale(0.5).transform_images(
            images, column(drawn) > 0
        ),
    ),
}


def assert_pixels(result, expected, value_range):
    tolerance = 1e-5 * (value_range[1] - value_range[0])
    np.testing.assert_allclose(result, expected, rtol=0, atol=tolerance)


def as_drawn(name, values):
    return tf.constant(values, tf.float32) > 0 if name == "grayscale" else tf.constant(values)


# For the saturation, Keras takes zero for black.
RANGES = [(name, (0, high)) for name in PEERS for high in (255, 1)]
RANGES += [(name, (-1, 1)) for name in PEERS if name != "saturation"]


# Black, white, grays, primary and nearly gray colours, as parts of the range.
COLORS = [(0, 0, 0), (1, 1, 1), (0.5, 0.5, 0.5), (1, 0, 0), (0, 1, 0)]
COLORS += [(0, 0, 1), (1, 1, 0), (0.004, 0, 0), (0.8, 0.79, 0.78), (0.1, 0.9, 0.2)]


@pytest.mark.parametrize(("name", "value_range"), RANGES)
def test_each_argument_alone_equals_the_keras_layer(name, value_range):
    values, by_keras = PEERS[name]
    images, drawn = pictures((4, 6, 5, 3), value_range), np.float32(values)
    low, high = value_range
    images[:, :2] = np.reshape(COLORS, (2, 5, 3)) * (high - low) + low
    layer = RandomColor(**{name: 1.0}, value_range=value_range)
    result = layer.apply(images, {name: as_drawn(name, drawn)})
    assert_pixels(result, by_keras(images, drawn, value_range), value_range)


def test_changes_are_applied_in_the_documented_order():
    """Keras's layers in a row give the same if nothing is clipped between them."""
    images = expected = pictures((2, 6, 5, 3), (90, 140))
    drawn = {
        "brightness": np.float32([0.1, -0.05]),
        "contrast": np.float32([1.2, 0.7]),
        "saturation": np.float32([0.5, 1.3]),
        "hue": np.float32([0.3, -0.2]),
        "grayscale": np.float32([0, 1]),
    }
    for name, values in drawn.items():
        expected = PEERS[name][1](expected, values, (0, 255))
    drawn = {name: as_drawn(name, values) for name, values in drawn.items()}
    assert_pixels(RandomColor(**COLOR).apply(images, drawn), expected, (0, 255))


def test_linear_changes_are_clipped_once():
    """Values may exceed white in between: a mean of 300, where Keras makes all of it white."""
    layer = RandomColor(brightness=0.5, contrast=1.0)
    drawn = {"brightness": tf.constant([0.5]), "contrast": tf.constant([2.0])}
    images = np.array([140, 205], np.uint8).reshape(1, 1, 2, 1)
    result = layer.apply(images, drawn)
    np.testing.assert_allclose(result[0, 0, :, 0], [235, 255])


def test_draws_cover_the_ranges_of_keras():
    drawn = drawn_for(RandomColor(**COLOR), (2000, 8, 8, 3))
    expected = {
        "brightness": (-0.3, 0.3),
        "contrast": (0.5, 1.8),
        "saturation": (0.2 / 0.8, 0.9 / 0.1),
        "hue": (-0.25, 0.25),
    }
    assert set(drawn) == {*expected, "grayscale"}
    for name, (low, high) in expected.items():
        values = drawn[name].numpy()
        room = 0.02 * (high - low)
        assert low - 1e-5 <= values.min() < low + room, name
        assert high - room < values.max() <= high + 1e-5, name
        assert len(np.unique(values)) > 0.99 * values.size, name
    assert 0.27 < drawn["grayscale"].numpy().mean() < 0.33


def test_one_number_stands_for_what_keras_documents():
    """Contrast is drawn both ways, saturation from no colour up."""
    layer = RandomColor(contrast=0.4, saturation=0.5)
    drawn = drawn_for(layer, (2000, 8, 8, 3))
    contrast, saturation = drawn["contrast"].numpy(), drawn["saturation"].numpy()
    assert 0.6 <= contrast.min() < 0.61 and 1.39 < contrast.max() <= 1.4
    assert 0 <= saturation.min() < 0.01 and 0.99 < saturation.max() <= 1
    lopsided = drawn_for(RandomColor(contrast=(0.5, 0.1)), (2000, 8, 8, 3))["contrast"].numpy()
    assert 0.5 <= lopsided.min() < 0.51 and 1.09 < lopsided.max() <= 1.1


def test_only_what_is_used_is_drawn():
    images = pictures((2, 6, 5, 3))
    assert drawn_for(RandomColor(), images.shape) == {}
    np.testing.assert_array_equal(RandomColor()(images), images)
    assert set(drawn_for(RandomColor(hue=0.1), images.shape)) == {"hue"}


def test_gray_images_have_no_colour_to_change():
    images = pictures((3, 6, 5, 1))
    colored = RandomColor(saturation=1.0, hue=1.0, grayscale=1.0)
    np.testing.assert_array_equal(colored(images), images)


@pytest.mark.parametrize("channels", [2, 4])
def test_alpha_does_not_change(channels):
    images = pictures((4, 6, 5, channels))
    layer = RandomColor(**COLOR)
    drawn = drawn_for(layer, images.shape)
    result = layer.apply(images, drawn).numpy()
    np.testing.assert_array_equal(result[..., -1], images[..., -1])
    alone = layer.apply(images[..., :-1], drawn)
    assert_pixels(result[..., :-1], alone, (0, 255))
