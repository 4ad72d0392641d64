"""`RandomErasing`: the places, contents and frequency of the rectangles."""

import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import drawn_for, pictures

from keras_multigpu.augmentation import RandomErasing

# Boxes (left, top, right, bottom) of a part, none and all of an image of 8 x 6.
BOXES = np.int32([[1, 2, 4, 7], [0, 0, 0, 0], [0, 0, 6, 8]])


def filled(images, boxes, values):
    result = images.copy()
    for image, (left, top, right, bottom) in zip(result, boxes, strict=True):
        image[top:bottom, left:right] = values
    return result


@pytest.mark.parametrize("fill_value", [0, 7.5])
def test_rectangles_are_filled_with_a_value(fill_value):
    images = pictures((3, 8, 6, 3))
    result = RandomErasing(fill_value=fill_value).apply(images, {"erased": tf.constant(BOXES)})
    np.testing.assert_array_equal(result, filled(images, BOXES, fill_value))


def test_rectangles_are_filled_with_noise():
    """Uniform between black and white, and different in each row, image and channel."""
    layer = RandomErasing(value_range=(-1, 1))
    images = np.full((3, 48, 40, 3), 9, np.float32)
    boxes = np.int32([[4, 8, 34, 40], [0, 0, 0, 0], [0, 0, 40, 48]])
    drawn = {**drawn_for(layer, images.shape), "erased": tf.constant(boxes)}
    result = layer.apply(images, drawn).numpy()
    np.testing.assert_array_equal(result == 9, filled(images, boxes, 0) == 9)
    noise = result[2].astype(np.float64)
    assert noise.min() < -0.99 and 0.99 < noise.max() < 1
    assert abs(noise.mean()) < 0.03 and abs(noise.std() - 3**-0.5) < 0.02
    first = result[0, 8:40, 4:34]
    for other in (noise[8:40, 4:34], np.roll(noise, 1, axis=0)[8:40, 4:34]):
        assert abs(np.corrcoef(first.ravel(), other.ravel())[0, 1]) < 0.06
    flat = noise.reshape(48, -1)
    between_rows = np.corrcoef(flat) - np.eye(48)
    assert np.abs(between_rows).max() < 0.45 and abs(between_rows.mean()) < 0.01
    assert np.abs(np.corrcoef(noise.reshape(-1, 3).T) - np.eye(3)).max() < 0.06


def test_the_noise_depends_on_its_seeds_alone():
    layer = RandomErasing(1.0)
    images = pictures((2, 8, 6, 3))
    whole = tf.constant(np.int32([[0, 0, 6, 8]] * 2))
    noise = tf.constant([[1, 2], [1, 2]])
    first, second = layer.apply(images, {"erased": whole, "noise": noise}).numpy()
    np.testing.assert_array_equal(first, second)
    part = {"erased": tf.constant([[1, 2, 4, 7]] * 2), "noise": noise + [[0, 0], [0, 1]]}
    first_part, other = layer.apply(images, part).numpy()[:, 2:7, 1:4]
    np.testing.assert_array_equal(first_part, first[2:7, 1:4])
    assert (first_part != other).all()


@pytest.mark.parametrize("channels", [2, 4])
def test_alpha_is_not_erased(channels):
    images = pictures((4, 8, 6, channels))
    for fill_value in ("random", 3):
        layer = RandomErasing(1.0, fill_value=fill_value)
        drawn = drawn_for(layer, images.shape)
        result = layer.apply(images, drawn).numpy()
        np.testing.assert_array_equal(result[..., -1], images[..., -1])
        assert (result[..., :-1] != images[..., :-1]).any()


def test_the_defaults_match_the_paper():
    """Half of the images, 2 to 40 percent of the area, 0.3 to 3.3 times as high as wide."""
    boxes = drawn_for(RandomErasing(), (4000, 300, 400, 3))["erased"].numpy()
    erased = boxes[boxes[:, 2] > 0]
    assert 0.48 < len(erased) / len(boxes) < 0.52
    wide, high = erased[:, 2] - erased[:, 0], erased[:, 3] - erased[:, 1]
    area = wide * high / (300 * 400)
    whole = high < 300
    assert 0.019 < area.min() < 0.022 and 0.38 < area[whole].max() < 0.402
    ratio = (high / wide)[whole & (area > 0.05)]
    assert 0.29 < ratio.min() < 0.32 and 3.2 < ratio.max() < 3.4
    assert (boxes >= 0).all() and (boxes <= [400, 300, 400, 300]).all()
    assert (erased[:, 0] == 0).any() and (erased[:, 2] == 400).any()
    assert (erased[:, 1] == 0).any() and (erased[:, 3] == 300).any()


def test_arguments_set_the_draws():
    layer = RandomErasing(0.3, scale=(0.25, 0.25), aspect_ratio=(1, 1), fill_value=0)
    boxes = drawn_for(layer, (4000, 20, 20, 3))["erased"].numpy()
    erased = boxes[boxes[:, 2] > 0]
    assert 0.27 < len(erased) / len(boxes) < 0.33
    np.testing.assert_array_equal(erased[:, 2:] - erased[:, :2], 10)
    assert set(erased[:, 0]) == set(erased[:, 1]) == set(range(11))


def test_boxes_and_masks_stay():
    example = {
        "images": pictures((2, 8, 6, 3)),
        "segmentation_masks": np.ones((2, 8, 6, 1), np.int32),
        "bounding_boxes": {
            "boxes": np.float32([[[1, 1, 3, 4]]] * 2),
            "labels": np.float32([[1]] * 2),
        },
    }
    result = RandomErasing(1.0, bounding_box_format="xyxy")(example)
    assert (result["images"].numpy() != example["images"]).any()
    np.testing.assert_array_equal(result["segmentation_masks"], example["segmentation_masks"])
    for key, value in example["bounding_boxes"].items():
        np.testing.assert_array_equal(result["bounding_boxes"][key], value)
