"""What every layer of this package promises, in tables; see `helpers.layer_checks`."""

import json

import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from helpers.layer_checks import (
    COLOR,
    GEOMETRY,
    SHAPES,
    check_layer,
    check_saved_model,
    pictures,
)

from keras_multigpu.augmentation import (
    CutMix,
    MixUp,
    MixUpOrCutMix,
    RandAugment,
    RandomColor,
    RandomErasing,
    RandomGeometry,
    Sequence,
    TrivialAugment,
)

# Layers, and the arguments of `check_layer` for them.
LAYERS = {
    "CutMix": (CutMix(), {"shapes": SHAPES[:1], "labels": True}),
    "MixUp": (MixUp(), {"shapes": SHAPES[:1], "labels": True}),
    "MixUpOrCutMix": (MixUpOrCutMix(), {"labels": True}),
    "MixUpOrCutMix, arguments": (
        MixUpOrCutMix(0.3, 0.4, probability=0.9, seed=1),
        {"shapes": ((6, 5, 4, 3),), "labels": True, "xla": False},
    ),
    "RandAugment": (
        RandAugment(2, 12, magnitude_std=1.5, seed=3),
        {"shapes": ((3, 9, 7, 1), (0, 8, 8, 3)), "xla": False},
    ),
    "RandomColor": (RandomColor(**COLOR), {"host_tolerance": 1e-5}),
    "RandomColor, linear": (
        RandomColor(brightness=0.3, contrast=0.5),
        {"shapes": SHAPES[:1], "host_tolerance": 1e-5},
    ),
    "RandomColor, 0 to 1": (
        RandomColor(**COLOR, value_range=(0, 1)),
        {"value_range": (0, 1), "shapes": SHAPES[:1], "xla": False, "host_tolerance": 1e-5},
    ),
    "RandomErasing": (RandomErasing(1.0), {"host_tolerance": 0}),
    "RandomErasing, 3": (
        RandomErasing(1.0, fill_value=3),
        {"shapes": SHAPES[:1], "host_tolerance": 0},
    ),
    "RandomErasing, [1, 2, 3]": (
        RandomErasing(1.0, fill_value=[1, 2, 3]),
        {"shapes": SHAPES[:1], "host_tolerance": 0},
    ),
    "RandomGeometry": (RandomGeometry(**GEOMETRY, crop=(5, 3), size=(6, 7)), {}),
    "RandomGeometry, copied": (RandomGeometry(flip="horizontal", crop=(5, 3)), {}),
    "TrivialAugment, 0 to 1": (
        TrivialAugment(value_range=(0, 1), seed=3),
        {"value_range": (0, 1), "shapes": SHAPES[2:3], "xla": False},
    ),
}

# Layers that need no labels.
SAVED = {
    "TrivialAugment": TrivialAugment(seed=1),
    "RandAugment": RandAugment(seed=1),
    "RandomColor": RandomColor(**COLOR, seed=3),
    "RandomErasing": RandomErasing((1.0, 1.0), seed=3),
    "RandomGeometry": RandomGeometry(**GEOMETRY, seed=1),
}


# The base class keeps most promises, and each layer has its own tests.
@pytest.mark.parametrize("name", LAYERS if ALL_REPLICAS else ["CutMix", "RandomErasing"])
@pytest.mark.slow
def test_a_layer_keeps_what_every_layer_promises(name):
    layer, settings = LAYERS[name]
    check_layer(layer, **settings)


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.in_test_all("configurations are compared, too", after=1)
@pytest.mark.slow
def test_a_model_with_the_layer_is_saved_and_loaded(name, tmp_path):
    check_saved_model(SAVED[name], tmp_path)


HALF = np.float32(0.5)
PAIR = (np.float32(0.25), HALF)
TWO = np.int64(2)
SIZE = np.array([4, 4])
VALUES = (np.int64(0), np.float32(255))


@pytest.mark.parametrize(
    ("layer", "given"),
    [
        (CutMix, {"alpha": HALF, "num_classes": TWO}),
        (MixUp, {"alpha": HALF, "num_classes": TWO}),
        (MixUpOrCutMix, {"mix_up_alpha": HALF, "cut_mix_alpha": HALF, "num_classes": TWO}),
        (MixUpOrCutMix, {"probability": HALF}),
        (RandAugment, {"num_ops": TWO, "magnitude": TWO, "magnitude_std": HALF}),
        (RandomColor, {"brightness": HALF, "contrast": PAIR, "saturation": PAIR}),
        (RandomColor, {"hue": np.array(PAIR), "channel_shift": HALF, "grayscale": HALF}),
        (RandomErasing, {"factor": PAIR, "scale": PAIR, "fill_value": np.ones(3)}),
        (RandomErasing, {"factor": HALF, "fill_value": HALF, "aspect_ratio": PAIR}),
        (RandomGeometry, {"rotation": PAIR, "translation": [PAIR] * 2, "zoom": HALF}),
        (RandomGeometry, {"shear": np.array([PAIR, PAIR]), "fill_value": TWO}),
        (RandomGeometry, {"crop_area": np.array(PAIR), "aspect_ratio": PAIR}),
        (RandomGeometry, {"crop": SIZE, "size": tuple(SIZE)}),
        (TrivialAugment, {"value_range": VALUES}),
    ],
)
def test_numpy_numbers_work_as_pythons_do(layer, given):
    """And the layer's configuration can be written as JSON."""
    made = layer(**given)
    config = json.loads(json.dumps(made.get_config()))
    for name, value in given.items():
        if name != "chain_depth":
            np.testing.assert_array_equal(config[name], value)
    numbers = {name: np.asarray(value).tolist() for name, value in given.items()}
    assert json.dumps(layer(**numbers, name=made.name).get_config()) == json.dumps(config)
    seeds = tf.constant([[1, 2], [3, 4]])
    drawn, expected = (one.draw(seeds, (8, 6, 3)) for one in (made, layer(**numbers)))
    tf.nest.map_structure(np.testing.assert_array_equal, drawn, expected)


BAD = [
    (CutMix, "alpha", -1),
    (MixUp, "alpha", 0),
    (MixUp, "alpha", "much"),
    (MixUp, "alpha", float("inf")),
    (MixUp, "num_classes", 2.5),
    (MixUp, "seed", "one"),
    (MixUpOrCutMix, "mix_up_alpha", 0),
    (MixUpOrCutMix, "cut_mix_alpha", None),
    (MixUpOrCutMix, "probability", -0.1),
    (MixUpOrCutMix, "num_classes", 0),
    (RandAugment, "num_ops", 0),
    (RandAugment, "magnitude", 31),
    (RandAugment, "magnitude", "9"),
    (RandAugment, "magnitude_std", -1),
    (RandAugment, "value_range", (1, 0)),
    (RandAugment, "bounding_box_format", "boxes"),
    (RandomColor, "brightness", 1.5),
    (RandomColor, "contrast", -0.1),
    (RandomColor, "contrast", (0.1, 2.0)),
    (RandomColor, "saturation", "much"),
    (RandomColor, "hue", (0.1, 0.2, 0.3)),
    (RandomColor, "channel_shift", -0.5),
    (RandomColor, "grayscale", (0.1, 0.2)),
    (RandomColor, "value_range", (1, 0)),
    (RandomColor, "seed", 0.5),
    (RandomColor, "seed", True),
    (RandomErasing, "factor", 2),
    (RandomErasing, "scale", (-0.1, 0.5)),
    (RandomErasing, "aspect_ratio", (0, 1)),
    (RandomErasing, "aspect_ratio", 2),
    (RandomErasing, "fill_value", "nothing"),
    (RandomErasing, "fill_value", []),
    (RandomErasing, "fill_value", np.ones((2, 3))),
    (RandomErasing, "fill_value", ["random", "random"]),
    (RandomErasing, "value_range", 255),
    (RandomGeometry, "flip", "diagonal"),
    (RandomGeometry, "rotation", 1.5),
    (RandomGeometry, "rotation", "much"),
    (RandomGeometry, "translation", (0.1, 0.2, 0.3)),
    (RandomGeometry, "translation", (0.1, 2)),
    (RandomGeometry, "translation", (-0.1, 0.1)),
    (RandomGeometry, "translation", -0.1),
    (RandomGeometry, "zoom", -1),
    (RandomGeometry, "zoom", (None, 0.1)),
    (RandomGeometry, "zoom", None),
    (RandomGeometry, "zoom", (-0.1, 0.1)),
    (RandomGeometry, "shear", -0.1),
    (RandomGeometry, "shear", (0.1, (0, 2))),
    (RandomGeometry, "aspect_ratio", 1.5),
    (RandomGeometry, "aspect_ratio", (0, 1)),
    (RandomGeometry, "crop_area", (0.1, 1.1)),
    (RandomGeometry, "crop_area", 0.5),
    (RandomGeometry, "crop", 5),
    (RandomGeometry, "crop", (5, 0)),
    (RandomGeometry, "size", (5, 6.5)),
    (RandomGeometry, "size", (True, 5)),
    (RandomGeometry, "fill_mode", "mirror"),
    (RandomGeometry, "fill_value", "black"),
    (RandomGeometry, "interpolation", "cubic"),
]


@pytest.mark.parametrize(("layer", "name", "value"), BAD)
def test_bad_arguments_are_named_where_the_layer_is_made(layer, name, value):
    with pytest.raises(ValueError, match=rf"(?s)`{name}`.* Expected .*Received: {name}="):
        layer(**{name: value})


@pytest.mark.parametrize(
    ("layer", "kinds"),
    [
        (CutMix, ("bounding_boxes",)),
        (MixUp, ("bounding_boxes", "segmentation_masks")),
        (MixUpOrCutMix, ("bounding_boxes", "segmentation_masks")),
    ],
)
def test_targets_that_cannot_follow_are_refused(layer, kinds):
    """Boxes are refused already when the layer is made."""
    images = pictures((2, 4, 4, 3))
    with pytest.raises(ValueError, match=f"{layer.__name__} cannot change `bounding_boxes`"):
        layer(bounding_box_format="xyxy")
    for kind in kinds:
        with pytest.raises(ValueError, match=f"{layer.__name__} cannot change `{kind}`"):
            layer()({"images": images, kind: images})


@pytest.mark.parametrize(
    ("layer", "drawn"),
    [
        (RandomColor(), {"rotation": tf.zeros([2])}),
        (RandomGeometry(), {"hue": tf.zeros([2])}),
        (RandAugment(), {}),
        (Sequence([RandomColor()]), {}),
        (Sequence([RandomColor()]), {"0: RandomGeometry": {}}),
        (MixUp(), {"rotation": tf.zeros([2])}),
    ],
)
def test_draws_of_another_layer_are_refused(layer, drawn):
    """They would change nothing, or cause an error later."""
    data = {"images": np.zeros((2, 6, 6, 3), "float32"), "labels": np.eye(2)}
    with pytest.raises(ValueError, match="draws belong to another layer.*own `draw`.*Received: dr"):
        layer.apply(data, drawn)
