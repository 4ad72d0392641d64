"""What layers refuse: wrong arguments, draws, images and targets, and what cannot be wrapped."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.layer_checks import pictures

from keras_multigpu.augmentation import (
    AugmentationLayer,
    KerasCVLayer,
    KerasLayer,
    Mix,
    RandAugment,
    RandomColor,
    RandomErasing,
    RandomGeometry,
    Sequence,
    recipe,
)

NAN, INF = float("nan"), float("inf")

ARGUMENTS = [
    (Mix, "mix_up", [0, "much", NAN, INF, True, 1j, np.True_]),
    (Mix, "cut_mix", [-1]),
    (Mix, "num_classes", [0, 2.5]),
    (Mix, "seed", ["one"]),
    (RandAugment, "num_ops", [0]),
    (RandAugment, "magnitude", [31, "9"]),
    (RandAugment, "magnitude_std", [-1]),
    (RandAugment, "value_range", [(1, 0)]),
    (RandAugment, "bounding_box_format", ["boxes"]),
    (RandomColor, "brightness", [1.5]),
    (RandomColor, "contrast", [-0.1, (0.1, 2.0)]),
    (RandomColor, "saturation", ["much"]),
    (RandomColor, "hue", [(0.1, 0.2, 0.3)]),
    (RandomColor, "grayscale", [(0.1, 0.2)]),
    (RandomColor, "value_range", [255, (1, 0), (0, 0), (0, 1, 2), ("a", "b"), np.zeros(2)]),
    (RandomColor, "seed", [0.5, True]),
    (RandomErasing, "factor", [2, (0.2, 0.4)]),
    (RandomErasing, "scale", [(-0.1, 0.5)]),
    (RandomErasing, "aspect_ratio", [(0, 1), 2]),
    (RandomErasing, "fill_value", ["nothing", None, [1, 2, 3]]),
    (RandomGeometry, "flip", ["diagonal"]),
    (RandomGeometry, "rotation", [1.5, "much", None, 2, np.ones(3), np.ones((2, 1))]),
    (RandomGeometry, "translation", [(0.1, 0.2, 0.3), (0.1, 2), (-0.1, 0.1), -0.1]),
    (RandomGeometry, "zoom", [-1, (None, 0.1), None, (-0.1, 0.1)]),
    (RandomGeometry, "shear", [-0.1, (0.1, (0, 2))]),
    (RandomGeometry, "aspect_ratio", [1.5, (0, 1)]),
    (RandomGeometry, "crop_area", [(0.1, 1.1), 0.5]),
    (RandomGeometry, "crop", [5, (5, 0)]),
    (RandomGeometry, "size", [(5, 6.5), (True, 5)]),
    (RandomGeometry, "fill_mode", ["mirror"]),
    (RandomGeometry, "fill_value", ["black"]),
    (RandomGeometry, "interpolation", ["cubic"]),
]
BAD = [(layer, name, value) for layer, name, values in ARGUMENTS for value in values]


@pytest.mark.parametrize(("layer", "name", "value"), BAD)
def test_bad_arguments_are_named_where_the_layer_is_made(layer, name, value):
    with pytest.raises(ValueError, match=rf"(?s)`{name}`.* Expected .*Received: {name}="):
        layer(**{name: value})


class Still(AugmentationLayer):
    """Changes nothing."""

    def draw(self, seeds, shape):
        return {}

    def change_images(self, images, drawn):
        return images


class ImagesOnly(Still):
    """Boxes and masks cannot follow."""

    unsupported = ("bounding_boxes", "segmentation_masks")


IMAGES = pictures((4, 5, 6, 3))
MASKS = np.zeros((4, 5, 6, 1), np.uint8)
LABELS = np.array([0, 1, 2, 0])
BOXES = {"boxes": np.zeros((4, 2, 4)), "labels": np.zeros((4, 2))}
RAGGED = tf.ragged.constant([[[1.0, 2, 3, 4]], []], 1)
FLIP = keras.layers.RandomFlip()
PIPELINE, CV = keras.layers.Pipeline, "not a layer of keras-cv.*Pass layers.*Received: layer="
XYXY = {"bounding_box_format": "xyxy"}
NO_BOXES, NO_MASKS = "cannot change `bounding_boxes`", "cannot change `segmentation_masks`"
NO_FORM = "bounding boxes are not in the form of Keras"
NO_IMAGES = "There are no images to augment"
NO_FLAG = "Expected True or False. Received: "
OTHERS = "draws belong to another layer.*own `draw`.*Received: dr"
NOT_ONE_HOT = "not one-hot labels of 3 classes.*Make class numbers integers.*Received: shapes"
UNKNOWN = tf.TensorSpec([None, None, None, 3])


def boxes(given):
    return lambda: Still(**XYXY)({"images": IMAGES, "bounding_boxes": given})


def drawn(layer, given):
    """For `apply`, which would change nothing or cause an error later."""
    return lambda: layer.apply({"images": IMAGES, "labels": np.eye(4)}, given)


def mixed(layer, labels):
    return lambda: layer({"images": IMAGES, "labels": labels})


def batch(x, y=None):
    return lambda: Still().augment_batch(x, y, None, tf.zeros([4, 2], tf.int32), True)


CALLS = [
    (lambda: RandomGeometry(crop=(5, 5), crop_area=(0.1, 1)), "either `crop`, or `crop_area`"),
    (
        lambda: RandomColor(contrast=0.5)(np.zeros((1, 4, 4, 5), "f4")),
        "which channels of the images are colors",
    ),
    (lambda: recipe("medium"), "`name` has an unknown value.*'light', 'standard', 'strong', 'im"),
    (lambda: recipe("light", num_classes=3), "`num_classes` was given .* does not mix images"),
    (lambda: recipe("strong", num_classes=0), "`num_classes` is not a positive integer"),
    (lambda: recipe("strong", size=224), "Expected a height and a width in pixels"),
    (lambda: recipe("strong", value_range=(1, 0)), "the values of black and white"),
    (lambda: recipe("light", seed="one"), "`seed` has a value that does not fit"),
    (lambda: recipe("strong", num_classes=3, **XYXY), "Mix " + NO_BOXES),
    # What is no image, and targets that cannot follow or are in another form.
    (lambda: Still()(np.zeros((5, 6))), NO_IMAGES),
    (lambda: Still()({"labels": np.zeros(3)}), NO_IMAGES),
    (lambda: Still()(np.zeros((1, 2, 3, 4, 5))), NO_IMAGES),
    (lambda: Still()({"images": IMAGES, "bounding_boxes": BOXES}), "not known.*Pass `bounding_bo"),
    (boxes(np.zeros((4, 2, 4))), NO_FORM),
    (boxes({"boxes": np.zeros((4, 4)), "labels": np.zeros(4)}), NO_FORM),
    (boxes({"boxes": np.zeros((4, 2, 4)), "labels": np.zeros((4, 2, 3))}), NO_FORM),
    (boxes({"boxes": np.zeros((4, 2, 4))}), NO_FORM),
    (boxes({"boxes": RAGGED, "labels": np.zeros((2, 1))}), NO_FORM),
    (lambda: ImagesOnly(**XYXY), "ImagesOnly " + NO_BOXES),
    (lambda: ImagesOnly()({"images": IMAGES, "segmentation_masks": MASKS}), NO_MASKS),
    (lambda: Mix(None, None), "`mix_up` and `cut_mix` are both None"),
    (lambda: Mix(None, **XYXY), "Mix " + NO_BOXES),
    (lambda: Mix(cut_mix=None, **XYXY), "Mix " + NO_BOXES),
    (lambda: Mix(cut_mix=None)({"images": IMAGES, "segmentation_masks": MASKS}), "Mix " + NO_MASKS),
    (lambda: Mix()({"images": IMAGES, "segmentation_masks": MASKS}), NO_MASKS),
    (
        lambda: Still()({"images": IMAGES, "segmentation_masks": MASKS[:, :4]}),
        "mask has another size than the images",
    ),
    (
        lambda: Still(**XYXY).augment_batch(
            tf.constant(IMAGES), tf.zeros([4, 4]), None, tf.zeros([4, 2], tf.int32), True
        ),
        "the batch has no boxes that it knows",
    ),
    (
        batch({"images": IMAGES, "labels": LABELS}, tf.constant(LABELS)),
        "`labels` was given twice: among the",
    ),
    (batch(tf.constant(IMAGES), (BOXES, BOXES)), r"several sets of bounding boxes.*sets=2"),
    (batch(UNKNOWN, tf.TensorSpec([None] * 3)), r"images of unknown size: is it a mask\?"),
    (batch(tf.zeros([2, 3])), "The inputs hold 0 batches of images. Expected one"),
    (batch((tf.zeros([2, 4, 6, 3]),) * 2), "The inputs hold 2 batches of images. Expected one"),
    # Draws of another layer.
    (drawn(RandomColor(), {"rotation": tf.zeros([4])}), OTHERS),
    (drawn(RandomGeometry(), {"hue": tf.zeros([4])}), OTHERS),
    (drawn(RandAugment(), {}), OTHERS),
    (drawn(Sequence([RandomColor()]), {}), OTHERS),
    (drawn(Sequence([RandomColor()]), {"0: RandomGeometry": {}}), OTHERS),
    (drawn(Mix(cut_mix=None), {"rotation": tf.zeros([4])}), OTHERS),
    # Labels that cannot be mixed.
    (lambda: Mix(cut_mix=None)(IMAGES), 'mixing needs labels.*"images" and "labels"'),
    (mixed(Mix(cut_mix=None), LABELS), "cannot be mixed as they are.*Pass `num_classes"),
    (
        mixed(Mix(cut_mix=None, num_classes=2), np.zeros((4, 3), "int32")),
        "neither class numbers nor one-hot",
    ),
    (
        mixed(Mix(cut_mix=None, num_classes=2), np.array([*"abcd"])),
        "cannot be mixed as they are.*='string'",
    ),
    (mixed(Mix(cut_mix=None, num_classes=3), np.arange(4.0)), NOT_ONE_HOT),
    (mixed(Mix(None, num_classes=3), np.eye(4)), NOT_ONE_HOT),
    # What is no list of layers, and what cannot be wrapped.
    (lambda: Sequence([]), "`layers` is not a list of layers"),
    (lambda: Sequence(Still()), "`layers` is not a list of layers"),
    (
        lambda: Sequence(["flip"]),
        "not a layer.*function into the list.*: layer='flip'",
    ),
    (lambda: Sequence([keras.Sequential([])]), "This Sequential has no layers"),
    (lambda: Sequence([PIPELINE([])]), "This Pipeline has no layers"),
    (lambda: Sequence([Still(), Sequence([ImagesOnly()])], **XYXY), NO_BOXES),
    (lambda: Sequence([ImagesOnly()])({"images": IMAGES, "segmentation_masks": MASKS}), NO_MASKS),
    (lambda: Sequence([keras.layers.RandomElasticTransform(0.5)], **XYXY), NO_BOXES),
    (lambda: KerasLayer(FLIP, moves_pixels="no"), NO_FLAG),
    (lambda: KerasCVLayer(FLIP), CV),
    (lambda: KerasCVLayer(3), CV),
    (lambda: KerasLayer(RandomGeometry()), CV.replace("keras-cv", "Keras")),
    (lambda: KerasLayer(lambda images: images), CV.replace("keras-cv", "Keras")),
    (lambda: KerasLayer(keras.layers.RandomFlip), "RandomFlip is a class, not a layer.*Pass `Rand"),
    (lambda: Sequence([RandomGeometry]), "RandomGeometry is a class, not a layer.*Pass `RandomG"),
    (lambda: KerasLayer(keras.layers.MixUp()), "MixUp mixes the examples of a batch"),
    (lambda: KerasLayer(PIPELINE([keras.layers.CutMix()])), "CutMix mixes the examples of a"),
    (lambda: KerasLayer(keras.layers.AugMix()), "AugMix draws its operations once"),
]


@pytest.mark.parametrize(("call", "text"), CALLS)
def test_a_mistake_is_named(call, text):
    with pytest.raises(ValueError, match=f"(?s){text}"):
        call()
