"""Arguments that layers share: what is refused, and NumPy's numbers in them."""

import json

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu import augmentation
from keras_multigpu.augmentation import arguments
from keras_multigpu.augmentation.mix_up_or_cut_mix import MixUpOrCutMix

HALF = np.float32(0.5)
PAIR = (np.float32(0.25), HALF)
TWO = np.int64(2)
SIZE = np.array([4, 4])
VALUES = (np.int64(0), np.float32(255))

LAYERS = [
    (augmentation.AugMix, {"num_chains": TWO, "chain_depth": np.array([1, 2]), "severity": HALF}),
    (augmentation.AugMix, {"alpha": HALF, "chain_depth": TWO, "value_range": np.array(VALUES)}),
    (augmentation.CutMix, {"alpha": HALF, "num_classes": TWO}),
    (augmentation.MixUp, {"alpha": HALF, "num_classes": TWO}),
    (MixUpOrCutMix, {"mix_up_alpha": HALF, "cut_mix_alpha": HALF, "num_classes": TWO}),
    (MixUpOrCutMix, {"switch_probability": HALF, "probability": HALF}),
    (augmentation.RandAugment, {"num_ops": TWO, "magnitude": TWO, "magnitude_std": HALF}),
    (augmentation.RandomColor, {"brightness": HALF, "contrast": PAIR, "saturation": PAIR}),
    (augmentation.RandomColor, {"hue": np.array(PAIR), "channel_shift": HALF, "grayscale": HALF}),
    (augmentation.RandomErasing, {"factor": PAIR, "scale": PAIR, "fill_value": np.ones(3)}),
    (augmentation.RandomErasing, {"factor": HALF, "fill_value": HALF, "aspect_ratio": PAIR}),
    (augmentation.RandomGeometry, {"rotation": PAIR, "translation": [PAIR] * 2, "zoom": HALF}),
    (augmentation.RandomGeometry, {"shear": np.array([PAIR, PAIR]), "fill_value": TWO}),
    (augmentation.RandomGeometry, {"crop_area": np.array(PAIR), "aspect_ratio": PAIR}),
    (augmentation.RandomGeometry, {"crop": SIZE, "size": tuple(SIZE)}),
    (augmentation.TrivialAugment, {"value_range": VALUES}),
]


@pytest.mark.parametrize(("layer", "given"), LAYERS)
def test_numbers_of_numpy(layer, given):
    """They work as Python's do, and JSON can write the layer's configuration."""
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


def test_a_range_of_an_array():
    """One of two numbers is a pair as a list of them is; sorted as in Keras."""
    found = arguments.as_range("turn", np.array([0.5, -0.25]), low=-1, high=1)
    assert found == (-0.25, 0.5) == arguments.as_range("turn", [-0.25, 0.5], low=-1, high=1)
    assert {type(one) for one in found} == {float}
    np.testing.assert_array_equal(
        augmentation.RandomGeometry(rotation=np.array([-0.1, 0.1])).rotation, [-0.1, 0.1]
    )


@pytest.mark.parametrize(
    "value", [np.ones(3), np.ones((2, 2)), np.ones((2, 1)), np.array(["a", "b"]), "ab", None, 2]
)
def test_no_range(value):
    """Two numbers make one, and one number within the limits."""
    with pytest.raises(
        ValueError, match="`turn` is neither a number nor a pair of numbers.*Received"
    ):
        arguments.as_range("turn", value, low=-1, high=1)


@pytest.mark.parametrize(
    ("value", "symmetric", "expected"),
    [
        (0.5, True, (-0.5, 0.5)),
        (-0.5, True, (-0.5, 0.5)),
        (0.5, False, (0, 0.5)),
        (0, True, (0, 0)),
    ],
)
def test_a_range_of_one_number(value, symmetric, expected):
    """It stands for both directions, or for all from zero on."""
    assert arguments.as_range("turn", value, low=-1, high=1, symmetric=symmetric) == expected


def test_the_lowest_number_can_be_left_out():
    """As a zoom by -1, which would show nothing."""
    limits = {"low": -1, "high": 1, "open_low": True}
    assert arguments.as_range("zoom", (-0.9, 1), **limits) == (-0.9, 1)
    with pytest.raises(ValueError, match=r"Expected numbers in \(-1, 1\]"):
        arguments.as_range("zoom", (-1, 1), **limits)


@pytest.mark.parametrize("value", [True, "1", None, 1j, float("nan"), float("inf"), np.True_])
def test_no_number(value):
    """Neither booleans, nor texts, nor what is not finite."""
    assert not arguments.is_number(value)
    with pytest.raises(ValueError, match="`share` is not a number in its range.*from 0 to 1"):
        arguments.as_number("share", value, low=0, high=1)
    with pytest.raises(ValueError, match="`share` is not a number in its range.*from 0 to 1"):
        arguments.require_probability("share", value)


def test_a_probability():
    """One number, or the mean of those between which it is drawn."""
    assert arguments.as_probability("factor", 0.5) == 0.5
    assert arguments.as_probability("factor", np.array([0.25, 0.75])) == 0.5
    with pytest.raises(ValueError, match="`factor` is neither a number"):
        arguments.as_probability("factor", 1.5)


@pytest.mark.parametrize(
    "value", [255, (1, 0), (0, 0), (0, 1, 2), ("a", "b"), np.zeros(2)], ids=str
)
def test_no_range_of_values(value):
    """Black is below white."""
    with pytest.raises(ValueError, match="`value_range` is not a pair of a lower and a higher"):
        arguments.as_value_range(value)


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.True_], ids=repr)
def test_no_flag(value):
    """A flag is one of Python's two."""
    arguments.require_bool("flag", True)
    with pytest.raises(ValueError, match="`flag` is neither True nor False"):
        arguments.require_bool("flag", value)


def test_seeds_and_formats_of_boxes():
    """None, integers of any type, and the formats that Keras converts."""
    for seed in (None, 1, np.int64(1)):
        arguments.require_seed(seed)
    for seed in (True, 1.0, "1"):
        with pytest.raises(ValueError, match="`seed` is not an integer"):
            arguments.require_seed(seed)
    arguments.require_box_format("xyxy")
    arguments.require_box_format(None)
    with pytest.raises(ValueError, match="`bounding_box_format` has an unknown value"):
        arguments.require_box_format("coco")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), "0.5"),
        (np.array(3), "3"),
        ([np.int64(1), (np.array([2.0]), None)], "[1, ([2.0], None)]"),
        ("random", "'random'"),
    ],
)
def test_plain_values(value, expected):
    """Lists and tuples stay what they are, with numbers of Python in them."""
    assert repr(arguments.plain(value)) == expected


IMAGES = np.zeros((2, 6, 6, 3), "float32")


@pytest.mark.parametrize(
    ("layer", "drawn"),
    [
        (augmentation.RandomColor(), {"rotation": tf.zeros([2])}),
        (augmentation.RandomGeometry(), {"hue": tf.zeros([2])}),
        (augmentation.RandAugment(), {}),
        (augmentation.AugMix(), {"magnitude": tf.zeros([2, 1])}),
        (augmentation.Sequence([augmentation.RandomColor()]), {}),
        (augmentation.Sequence([augmentation.RandomColor()]), {"0: RandomGeometry": {}}),
    ],
)
def test_draws_of_another_layer(layer, drawn):
    """They would change nothing, or be missing in the middle of the work."""
    with pytest.raises(ValueError, match="draws belong to another layer.*own `draw`.*Received: dr"):
        layer.apply(IMAGES, drawn)
