"""CutMix: boxes of neighbours, checked by hand and against SciPy."""

import numpy as np
import pytest
import scipy.stats
import tensorflow as tf
from helpers.layer_checks import pictures, seeds_for

from keras_multigpu.augmentation import Mix

IMAGES = np.arange(4 * 4 * 5 * 3, dtype="float32").reshape(4, 4, 5, 3)
LABELS = np.array([0, 1, 2, 0], "int32")

# They cover four of twenty pixels, all, none and one.
BOXES = [[1, 0, 3, 2], [0, 0, 5, 4], [2, 2, 2, 2], [4, 3, 5, 4]]


def cut(**data):
    data = {"images": IMAGES, "labels": LABELS, **data}
    result = Mix(None, num_classes=3).apply(
        data, {"box": tf.constant(BOXES[: len(data["images"])])}
    )
    return tf.nest.map_structure(np.asarray, result)


def by_slices(images):
    """The same with NumPy's slices."""
    expected = images.copy()
    for row, (left, top, right, bottom) in enumerate(BOXES):
        expected[row, top:bottom, left:right] = images[row ^ 1, top:bottom, left:right]
    return expected


def test_pixels_and_labels_are_mixed_by_the_boxes():
    """A fifth, all, nothing and a twentieth of the labels come from the partner."""
    result = cut()
    np.testing.assert_array_equal(result["images"], by_slices(IMAGES))
    expected = [[0.8, 0.2, 0], [1, 0, 0], [0, 0, 1], [0.95, 0, 0.05]]
    np.testing.assert_allclose(result["labels"], expected, atol=1e-7)


@pytest.mark.parametrize("dtype", ["uint8", "int32", "float32", "bool"])
def test_masks_get_the_same_box(dtype):
    masks = (IMAGES[..., :1] % 7).astype(dtype)
    result = Mix(None).apply(
        {"images": IMAGES, "segmentation_masks": {"one": masks}}, {"box": tf.constant(BOXES)}
    )
    found = result["segmentation_masks"]["one"].numpy()
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, by_slices(masks))
    np.testing.assert_array_equal(result["images"], by_slices(IMAGES))


@pytest.mark.parametrize("channels", [1, 4])
def test_images_of_any_number_of_channels_are_mixed(channels):
    images = pictures((4, 4, 5, channels))
    np.testing.assert_array_equal(cut(images=images)["images"], by_slices(images))


def test_boxes_are_those_of_the_paper():
    """Sides have the image's proportions, the area kept follows Beta, the centre is anywhere."""
    height, width = 1000, 2000
    left, top, right, bottom = (
        Mix(None, 0.7).draw(seeds_for(20000), (height, width, 3))["box"].numpy().T
    )
    assert ((left >= 0) & (left <= right) & (right <= width)).all()
    assert ((top >= 0) & (top <= bottom) & (bottom <= height)).all()
    whole = (left > 0) & (right < width) & (top > 0) & (bottom < height)
    across, down = (right - left) / width, (bottom - top) / height
    np.testing.assert_allclose(across[whole], down[whole], atol=0.002)
    # A box of side s lies within the image with probability (1 - s)^2, which the weights undo.
    side = across[whole]
    for limit in (0.2, 0.4, 0.6):
        share = (1 / (1 - side[side < limit]) ** 2).sum() / 20000
        expected = scipy.stats.beta(0.7, 0.7).sf(1 - limit**2)
        assert share == pytest.approx(expected, rel=0.1)
    centre = ((left + right) / 2 / width)[whole & (across < 0.1)]
    assert scipy.stats.kstest((centre - 0.05) / 0.9, "uniform").statistic < 0.08
