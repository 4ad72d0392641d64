"""Images grouped by operation, and the targets that follow them."""

import numpy as np
import tensorflow as tf
from helpers.policy_checks import levels, one_step

from keras_multigpu.augmentation import RandAugment, TrivialAugment
from keras_multigpu.augmentation.policies.operations import VALUE_OPERATIONS
from keras_multigpu.augmentation.policies.policy import OPERATIONS, regroup


def test_each_function_sees_only_its_images():
    """In their order, so that only the operations that were drawn cost time."""
    seen = []

    def change(factor):
        def changed(images, rows):
            seen.append((factor, rows.numpy().tolist()))
            return images * factor

        return changed

    images = tf.range(1.0, 6.0)[:, None, None, None]
    group = tf.constant([2, 0, 2, 2, 0])
    changes = [change(factor) for factor in (1.0, 10.0, 100.0)]
    result, places = regroup(images, tf.range(5), group, changes)
    np.testing.assert_array_equal(np.ravel(tf.gather(result, places)), [100, 2, 300, 400, 5])
    assert seen == [(1.0, [1, 4]), (10.0, []), (100.0, [0, 2, 3])]


def test_each_operation_does_what_its_name_says():
    names = list(OPERATIONS)
    magnitudes = np.linspace(1, 3, len(names)).round()
    images = levels((len(names), 9, 8, 3))
    result = TrivialAugment().apply(images, one_step(names, magnitudes))
    for place, (name, size) in enumerate(zip(names, magnitudes, strict=True)):
        image = images[place : place + 1]
        if name in VALUE_OPERATIONS:
            expected = VALUE_OPERATIONS[name](tf.constant(image), tf.constant([size], tf.float32))
            np.testing.assert_array_equal(result[place], expected[0])
    by_name = dict(zip(names, zip(images, result.numpy(), magnitudes, strict=True), strict=True))
    image, moved, size = by_name["translate_x"]
    np.testing.assert_array_equal(moved[:, int(size) :], image[:, : -int(size)])
    assert not moved[:, : int(size)].any()


def test_uncovered_places_get_the_fill_value():
    images = np.ones((1, 6, 6, 3), "float32")
    drawn = one_step(["translate_y"], [2])
    gray = RandAugment(value_range=(0, 1)).apply(images, drawn).numpy()
    np.testing.assert_allclose(gray[0, :2], 128 / 255, rtol=1e-6)
    black = TrivialAugment(value_range=(-1, 1)).apply(images, drawn).numpy()
    np.testing.assert_array_equal(black[0, :2], np.full((2, 6, 3), -1))
    np.testing.assert_array_equal(black[0, 2:], images[0, 2:])


def test_masks_and_boxes_follow():
    layer = RandAugment(bounding_box_format="xyxy")
    drawn = {
        "operation": tf.constant(
            [
                [OPERATIONS.index("translate_x"), OPERATIONS.index("translate_y")],
                [OPERATIONS.index("equalize"), OPERATIONS.index("color")],
            ]
        ),
        "magnitude": tf.constant([[2.0, -1.0], [0.0, 1.5]]),
    }
    masks = np.random.default_rng(0).integers(1, 9, (2, 8, 8, 1)).astype("int32")
    boxes = np.array([[[1, 2, 4, 6]], [[1, 2, 4, 6]]], "float32")
    data = {
        "images": levels((2, 8, 8, 3)),
        "segmentation_masks": masks,
        "bounding_boxes": {"boxes": boxes, "labels": np.ones((2, 1), "float32")},
    }
    result = layer.apply(data, drawn)
    moved = result["segmentation_masks"].numpy()
    assert moved.dtype == np.int32
    np.testing.assert_array_equal(moved[0, :-1, 2:], masks[0, 1:, :-2])
    assert not moved[0, :, :2].any()
    assert not moved[0, -1].any()
    np.testing.assert_array_equal(moved[1], masks[1])
    np.testing.assert_allclose(
        result["bounding_boxes"]["boxes"], [[[3, 1, 6, 5]], [[1, 2, 4, 6]]], atol=1e-5
    )
