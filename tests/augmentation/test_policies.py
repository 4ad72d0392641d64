"""The operations of policies, each against Pillow, and the masks and boxes that follow."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.policy_checks import levels, one_step

from keras_multigpu.augmentation import RandAugment, TrivialAugment

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


def enhanced(name):
    return lambda picture, factor: getattr(ImageEnhance, name)(picture).enhance(factor)


def moved(place, sign):
    """A picture through an affine map of which one entry is the magnitude, by Pillow."""

    def move(picture, size):
        matrix = [1, 0, 0, 0, 1, 0]
        matrix[place] = sign * size
        bilinear = Image.Resampling.BILINEAR
        return picture.transform(picture.size, Image.Transform.AFFINE, matrix, bilinear)

    return move


FACTORS = (0, 0.1, 0.5, 1, 1.3, 1.9)

# Pillow's function for each operation, and the magnitudes that are tried.
VALUES = {
    "identity": (lambda picture, size: picture, (0,)),
    "auto_contrast": (lambda picture, size: ImageOps.autocontrast(picture), (0,)),
    "equalize": (lambda picture, size: ImageOps.equalize(picture), (0,)),
    "solarize": (ImageOps.solarize, (0, 100.5, 128, 255, 256)),
    "posterize": (lambda picture, size: ImageOps.posterize(picture, int(size)), (1, 2, 4, 7, 8)),
    **{name.lower(): (enhanced(name), FACTORS) for name in ("Color", "Contrast", "Brightness")},
    "sharpness": (enhanced("Sharpness"), FACTORS),
}
MOVES = {
    "rotate": (lambda picture, size: picture.rotate(size, Image.Resampling.BILINEAR), (27, -135)),
    "shear_x": (moved(1, 1), (0.3, -0.9)),
    "shear_y": (moved(3, 1), (0.3, -0.9)),
    "translate_x": (moved(2, -1), (7, -3)),
    "translate_y": (moved(5, -1), (7, -3)),
}
EXACT = {"identity", "equalize", "solarize", "posterize"}


def each(table, picture):
    """Operation, magnitude, and what it makes of the picture: all in one batch, out of order."""
    pairs = [(name, size) for name, (_, sizes) in table.items() for size in sizes]
    order = np.random.default_rng(1).permutation(len(pairs))
    names, sizes = zip(*(pairs[place] for place in order), strict=True)
    images = np.repeat(np.asarray(picture, np.float32)[None], len(pairs), axis=0)
    results = TrivialAugment().apply(images, one_step(names, sizes)).numpy()
    return zip(names, sizes, results, strict=True)


def by_pillow(table, name, picture, size):
    expected = np.asarray(table[name][0](picture, size), np.float32)
    return expected.reshape(*expected.shape[:2], -1)


def test_each_operation_is_tried():
    assert {*VALUES, *MOVES} == {*TrivialAugment.OPERATIONS}


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("number", range(len(PICTURES)))
def test_each_operation_on_values_equals_pillows(number, mode):
    """Within one of 256 levels where it rounds."""
    picture = Image.fromarray(PICTURES[number].astype("uint8")).convert(mode)
    pixels = np.asarray(picture).reshape(*picture.size[::-1], -1)
    for name, size, result in each(VALUES, pixels):
        distance = np.abs(result - by_pillow(VALUES, name, picture, size))
        assert distance.max() <= (name not in EXACT), (name, size)
        assert (distance > 0).mean() < 0.1, (name, size)


def around(places, function, **padding):
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(places, 1, **padding), (3, 3))
    return function(windows, axis=(2, 3))


def test_each_operation_on_places_equals_pillows():
    """Moved pixels are within two levels of Pillow's, except borders, which are blended with black.

    Pillow does not blend a pixel that it reads beyond the middle of an outermost pixel.
    """
    y, x = np.mgrid[:41, :30]
    waves = 128 + 100 * np.sin(x / 6)[..., None] * np.cos(y[..., None] / (4, 6, 8))
    picture = Image.fromarray(waves.astype("uint8"))
    for name, size, result in each(MOVES, picture):
        expected = by_pillow(MOVES, name, picture, size)
        outside = expected.max(-1) == 0
        inside = ~around(outside, np.any, constant_values=True)
        assert inside.mean() > 0.2, name
        assert np.abs(result - expected)[inside].max() <= 2, name
        # Well outside there is only the fill value.
        assert not result[around(outside, np.all)].any(), name


@pytest.mark.parametrize("channels", [2, 4])
def test_results_are_whole_levels_and_alpha_stays(channels):
    pixels = RANDOM.integers(0, 256, (12, 11, channels))
    alone = each(VALUES, pixels[..., :-1])
    for (name, size, result), (_, _, colors) in zip(each(VALUES, pixels), alone, strict=True):
        np.testing.assert_array_equal(result[..., -1], pixels[..., -1], f"{name} {size}")
        np.testing.assert_array_equal(result, np.round(result).clip(0, 255), f"{name} {size}")
        np.testing.assert_array_equal(result[..., :-1], colors, f"{name} {size}")


@pytest.mark.parametrize("size", [(1, 1), (1, 5), (2, 2)])
def test_very_small_images_stay_finite(size):
    for name, _, result in each(VALUES, RANDOM.integers(0, 256, (*size, 3))):
        assert np.isfinite(result).all(), name


@pytest.mark.parametrize(
    ("values", "given", "expected"),
    [
        ((0, 1), [0.0, 0.1, 0.5, 1.0, 1.5, -1.0], np.array([0, 26, 128, 255, 255, 0]) / 255),
        ((0, 255), [99.4, 99.5], [99, 100]),
        ((-1, 1), [-1.0, 0.0, 1.0], [-1, 128 / 127.5 - 1, 1]),
    ],
)
def test_images_are_rounded_to_256_levels_of_their_range(values, given, expected):
    images = np.float32(given)[:, None, None, None]
    drawn = one_step(["identity"] * len(given), [0] * len(given))
    result = TrivialAugment(value_range=values).apply(images, drawn)
    np.testing.assert_allclose(np.ravel(result), expected, atol=1e-6)


def test_uncovered_places_get_the_fill_value():
    images = np.ones((1, 6, 6, 3), "float32")
    drawn = one_step(["translate_y"], [2])
    gray = RandAugment(value_range=(0, 1)).apply(images, drawn).numpy()
    np.testing.assert_allclose(gray[0, :2], 128 / 255, rtol=1e-6)
    black = TrivialAugment(value_range=(-1, 1)).apply(images, drawn).numpy()
    np.testing.assert_array_equal(black[0, :2], np.full((2, 6, 3), -1))
    np.testing.assert_array_equal(black[0, 2:], images[0, 2:])


def test_masks_and_boxes_follow_each_of_several_steps():
    masks = RANDOM.integers(1, 9, (2, 8, 8, 1)).astype("int32")
    boxes = np.array([[[1, 2, 4, 6]]] * 2, "float32")
    data = {
        "images": levels((2, 8, 8, 3)),
        "segmentation_masks": masks,
        "bounding_boxes": {"boxes": boxes, "labels": np.ones((2, 1), "float32")},
    }
    steps = (
        one_step(["translate_x", "equalize"], [2, 0]),
        one_step(["translate_y", "color"], [-1, 1.5]),
    )
    drawn = {name: tf.concat([step[name] for step in steps], axis=1) for name in steps[0]}
    result = RandAugment(bounding_box_format="xyxy").apply(data, drawn)
    found = result["segmentation_masks"].numpy()
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found[0, :-1, 2:], masks[0, 1:, :-2])
    assert not found[0, :, :2].any() and not found[0, -1].any()
    np.testing.assert_array_equal(found[1], masks[1])
    expected = [[[3, 1, 6, 5]], [[1, 2, 4, 6]]]
    np.testing.assert_allclose(result["bounding_boxes"]["boxes"], expected, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "size", "expected"),
    [
        ("translate_x", 3.0, (5, 1, 9, 7)),
        ("translate_y", -1.0, (2, 0, 6, 6)),
        ("rotate", 90.0, (1, 4, 7, 8)),
        ("shear_x", 0.5, (0, 1, 5.5, 7)),
    ],
)
def test_boxes_move_with_pixels(name, size, expected):
    boxes = {"boxes": np.float32([[[2, 1, 6, 7]]]), "labels": np.ones((1, 1))}
    data = {"images": levels((1, 10, 10, 3)), "bounding_boxes": boxes}
    layer = TrivialAugment(bounding_box_format="xyxy")
    found = layer.apply(data, one_step([name], [size]))["bounding_boxes"]["boxes"][0, 0]
    np.testing.assert_allclose(found, expected, atol=1e-5)
