"""Batches of a pipeline, sorted into what follows the images in which way."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.augmentation.pipeline_batches import from_batch

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
def test_targets_are_told_by_names_and_shapes(y, expected):
    """Every kind of target gets its name, and the way back gives the same structure."""
    example, back = from_batch(IMAGES, y, None)
    assert set(example) == expected
    x_back, y_back, weight = back(example)
    assert x_back is IMAGES and weight is None
    tf.nest.assert_same_structure(y_back, y)
    for one, other in zip(tf.nest.flatten(y_back), tf.nest.flatten(y), strict=True):
        if one is not None:
            np.testing.assert_array_equal(one, other)


def test_masks_without_channels_have_one_while_they_are_changed():
    """A layer always sees four axes."""
    example, _ = from_batch(IMAGES, MASKS[..., 0], None)
    assert [mask.shape.rank for mask in example["segmentation_masks"]] == [4]


def test_weights_and_other_inputs_pass_through():
    """Only the images among several inputs are changed, and the weights keep their place."""
    vector, weight = tf.ones([2, 3]), tf.constant([1.0, 0.5])
    example, back = from_batch((vector, IMAGES), LABELS, weight)
    assert example["images"] is IMAGES and example["sample_weights"] is weight
    x, _, back_weight = back({**example, "images": IMAGES + 1})
    assert x[0] is vector and float(x[1][0, 0, 0, 0]) == 1 and back_weight is weight


def test_images_are_found_by_name_among_several():
    """With two batches of images the dictionary's `images` is meant."""
    x = {"depth": tf.zeros([2, 4, 6, 1]), "images": IMAGES}
    example, back = from_batch(x, None, None)
    assert example["images"] is IMAGES
    assert back(example)[0]["depth"] is x["depth"]


@pytest.mark.parametrize("x", [tf.zeros([2, 3]), (IMAGES, IMAGES)])
def test_no_images_or_several_are_refused(x):
    """What to augment must be clear."""
    with pytest.raises(ValueError, match=r"The inputs hold \d batches of images\. Expected one"):
        from_batch(x, None, None)
