"""`RandAugment` and `TrivialAugment`: what they draw."""

import keras
import numpy as np
from helpers.policy_checks import check_evenly_drawn, drawn_operations

from keras_multigpu.augmentation import RandAugment, TrivialAugment

OPERATIONS = TrivialAugment.OPERATIONS


def test_operations_are_drawn_evenly_and_for_each_image():
    names, _ = drawn_operations(RandAugment(2))
    assert names.shape == (3000, 2)
    for step in names.T:
        check_evenly_drawn(step, OPERATIONS)
    both = names[:, 0] == names[:, 1]
    assert abs(both.mean() - 1 / 14) < 0.03


def test_magnitudes_match_the_paper():
    """At 10 they are AutoAugment's strongest, half of them in the other direction."""
    names, magnitudes = drawn_operations(RandAugment(1, 10), shape=(331, 662, 3))
    expected = {
        "rotate": (-30, 30),
        "shear_x": (-0.3, 0.3),
        "shear_y": (-0.3, 0.3),
        "translate_x": (-300, 300),
        "translate_y": (-150, 150),
        "color": (0.1, 1.9),
        "contrast": (0.1, 1.9),
        "brightness": (0.1, 1.9),
        "sharpness": (0.1, 1.9),
        "solarize": (0,),
        "posterize": (4,),
        "identity": (0,),
        "auto_contrast": (0,),
        "equalize": (0,),
    }
    for name, sizes in expected.items():
        drawn = magnitudes[names == name]
        np.testing.assert_allclose(np.unique(drawn.round(3)), sizes, rtol=1e-4)
        if len(sizes) == 2:
            assert 0.3 < np.mean(drawn == drawn.max()) < 0.7


def test_the_ends_of_the_scale_give_nothing_and_the_strongest():
    names, magnitudes = drawn_operations(RandAugment(1, 0))
    for name, nothing in (("rotate", 0), ("posterize", 8), ("solarize", 256), ("color", 1)):
        np.testing.assert_array_equal(np.unique(magnitudes[names == name]), [nothing])
    names, magnitudes = drawn_operations(RandAugment(1, 30))
    for name, sizes in (
        ("rotate", (-90, 90)),
        ("posterize", (1,)),
        ("solarize", (0,)),
        ("color", (0, 3.7)),
    ):
        found = np.unique(magnitudes[names == name].round(3))
        np.testing.assert_allclose(found, sizes, rtol=1e-4)


def test_magnitude_std_spreads_the_magnitudes():
    names, magnitudes = drawn_operations(RandAugment(1, 9, magnitude_std=0.5))
    degrees = np.abs(magnitudes[names == "rotate"])
    assert abs(degrees.mean() - 27) < 0.5
    assert 1.2 < degrees.std() < 1.8


def test_jit_compile_auto_is_off_with_the_layer():
    model = keras.Sequential([RandAugment(), keras.layers.Flatten(), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile="auto")
    assert model.jit_compile is False


def test_each_image_draws_one_operation_of_any_strength():
    """Each image draws one of 14 operations and one of 31 strengths ("wide")."""
    names, magnitudes = drawn_operations(TrivialAugment(), count=6000)
    assert names.shape == (6000, 1)
    check_evenly_drawn(names, OPERATIONS)
    steps = np.arange(31) / 30
    factors = np.concatenate([1 - 0.99 * steps, 1 + 0.99 * steps])
    for name, sizes in {
        "rotate": np.concatenate([-135 * steps, 135 * steps]),
        "shear_x": np.concatenate([-0.99 * steps, 0.99 * steps]),
        "translate_x": np.concatenate([-32 * steps, 32 * steps]),
        "translate_y": np.concatenate([-32 * steps, 32 * steps]),
        "solarize": 255 * (1 - steps),
        "posterize": np.arange(2, 9),
        "color": factors,
        "sharpness": factors,
    }.items():
        drawn = magnitudes[names == name]
        distance = np.abs(drawn[:, None] - np.unique(sizes)[None])
        assert distance.min(1).max() < 1e-4
        # Almost all possible magnitudes are drawn.
        assert len(np.unique(distance.argmin(1))) > 0.9 * len(np.unique(sizes.round(6)))
