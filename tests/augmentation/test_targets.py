"""Batches of a pipeline, sorted by how targets follow the images."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.augmentation.batches import from_batch

IMAGES = tf.zeros([2, 4, 6, 3])
LABELS = tf.constant([1, 2])
MASKS = tf.ones([2, 4, 6, 1], tf.uint8)
BOXES = {"boxes": tf.zeros([2, 5, 4]), "labels": tf.zeros([2, 5])}


@pytest.mark.parametrize(
    ("y", "expected"),
    [
        (None, {"images"}),
        (LABELS, {"images", "labels"}),
        (tf.zeros([2, 10]), {"images", "labels"}),
        (MASKS, {"images", "segmentation_masks"}),
        (MASKS[..., 0], {"images", "segmentation_masks"}),
        (tf.zeros([2, 7, 5]), {"images", "labels"}),
        ((LABELS, MASKS[..., 0]), {"images", "labels", "segmentation_masks"}),
        ({"class": LABELS, "mask": MASKS}, {"images", "labels", "segmentation_masks"}),
        (BOXES, {"images", "bounding_boxes"}),
        ({"bounding_boxes": BOXES, "labels": LABELS}, {"images", "bounding_boxes", "labels"}),
    ],
)
def test_targets_are_recognized_by_names_and_shapes(y, expected):
    example, back = from_batch(IMAGES, y, None)
    assert set(example) == expected
    x_back, y_back, weight = back(example)
    assert x_back is IMAGES and weight is None
    tf.nest.assert_same_structure(y_back, y)
    for one, other in zip(tf.nest.flatten(y_back), tf.nest.flatten(y), strict=True):
        if one is not None:
            np.testing.assert_array_equal(one, other)


def test_boxes_are_found_in_any_structure():
    for y in ((LABELS, BOXES), {"detection": BOXES, "class": LABELS}, [{"a": (LABELS, BOXES)}]):
        example, back = from_batch(IMAGES, y, None)
        assert set(example) == {"images", "labels", "bounding_boxes"}
        assert example["bounding_boxes"] is BOXES
        changed = {**BOXES, "boxes": BOXES["boxes"] + 1}
        _, y_back, _ = back({**example, "bounding_boxes": changed})
        tf.nest.assert_same_structure(y_back, y)
        assert max(float(tf.reduce_max(leaf)) for leaf in tf.nest.flatten(y_back)) == 2


def test_targets_among_the_inputs_follow():
    """A dictionary as keras-cv's layers take it, alone or with labels beside it."""
    x = {"images": IMAGES, "bounding_boxes": BOXES, "segmentation_masks": MASKS, "id": LABELS}
    for y in (None, LABELS):
        example, back = from_batch(x, y, None)
        assert example["bounding_boxes"] is BOXES and example["segmentation_masks"] is MASKS
        assert "id" not in example
        x_back, y_back, _ = back({**example, "images": IMAGES + 1, "segmentation_masks": MASKS + 1})
        assert float(x_back["images"][0, 0, 0, 0]) == 1
        assert int(x_back["segmentation_masks"][0, 0, 0, 0]) == 2
        assert x_back["id"] is LABELS and y_back is y


def test_weights_and_other_inputs_pass_through():
    vector, weight = tf.ones([2, 3]), tf.constant([1.0, 0.5])
    example, back = from_batch((vector, IMAGES), LABELS, weight)
    assert example["images"] is IMAGES and example["sample_weights"] is weight
    x, _, back_weight = back({**example, "images": IMAGES + 1})
    assert x[0] is vector and float(x[1][0, 0, 0, 0]) == 1 and back_weight is weight


def test_images_are_found_by_name_among_several():
    x = {"depth": tf.zeros([2, 4, 6, 1]), "images": IMAGES}
    example, back = from_batch(x, None, None)
    assert example["images"] is IMAGES
    assert back(example)[0]["depth"] is x["depth"]
