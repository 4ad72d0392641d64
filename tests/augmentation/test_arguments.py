"""The arguments that layers share: what they accept, and what is refused."""

import numpy as np
import pytest

from keras_multigpu import augmentation
from keras_multigpu.augmentation import arguments


def test_an_array_of_two_numbers_is_a_range():
    """It is a pair, like a list; pairs are sorted, as in Keras."""
    found = arguments.as_range("turn", np.array([0.5, -0.25]), low=-1, high=1)
    assert found == (-0.25, 0.5) == arguments.as_range("turn", [-0.25, 0.5], low=-1, high=1)
    assert {type(one) for one in found} == {float}
    np.testing.assert_array_equal(
        augmentation.RandomGeometry(rotation=np.array([-0.1, 0.1])).rotation, [-0.1, 0.1]
    )


@pytest.mark.parametrize(
    "value", [np.ones(3), np.ones((2, 2)), np.ones((2, 1)), np.array(["a", "b"]), "ab", None, 2]
)
def test_what_is_no_range_is_named(value):
    with pytest.raises(
        ValueError, match="`turn` is neither a number nor a pair of numbers.*Received"
    ):
        arguments.as_range("turn", value, low=-1, high=1)


@pytest.mark.parametrize(
    ("value", "low", "expected"),
    [(0.5, -1, (-0.5, 0.5)), (-0.5, -1, (-0.5, 0.5)), (0.5, 0, (0, 0.5)), (0, -1, (0, 0))],
)
def test_one_number_is_a_range_around_zero_or_up_from_the_lowest(value, low, expected):
    assert arguments.as_range("turn", value, low=low, high=1) == expected


def test_the_lower_end_of_a_range_can_be_open():
    limits = {"low": -1, "high": 1, "open_low": True}
    assert arguments.as_range("zoom", (-0.9, 1), **limits) == (-0.9, 1)
    with pytest.raises(ValueError, match=r"Expected numbers in \(-1, 1\]"):
        arguments.as_range("zoom", (-1, 1), **limits)


@pytest.mark.parametrize("value", [True, "1", None, 1j, float("nan"), float("inf"), np.True_])
def test_what_is_no_number_is_named(value):
    assert not arguments.is_number(value)
    with pytest.raises(ValueError, match="`share` is not a number in its range.*from 0 to 1"):
        arguments.as_number("share", value, low=0, high=1)


@pytest.mark.parametrize(
    "value", [255, (1, 0), (0, 0), (0, 1, 2), ("a", "b"), np.zeros(2)], ids=str
)
def test_what_is_no_range_of_values_is_named(value):
    with pytest.raises(ValueError, match="`value_range` is not a pair of a lower and a higher"):
        arguments.as_value_range(value)


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.True_], ids=repr)
def test_flags_must_be_true_or_false(value):
    arguments.require_bool("flag", True)
    with pytest.raises(ValueError, match="`flag` is neither True nor False"):
        arguments.require_bool("flag", value)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), "0.5"),
        (np.array(3), "3"),
        ([np.int64(1), (np.array([2.0]), None)], "[1, ([2.0], None)]"),
        ("random", "'random'"),
    ],
)
def test_plain_values_hold_no_numpy_types(value, expected):
    assert repr(arguments.plain(value)) == expected
