"""Flows draw their parameters as `ImageDataGenerator` does."""

import numpy as np
import pytest
import tensorflow as tf
from unmoved import IDENTITY

from keras_multigpu.data.flows.parameters import FlowParameters
from keras_multigpu.data.pipeline.order import draw_seeds

Generator = tf.keras.preprocessing.image.ImageDataGenerator  # noqa: TID251
SEEDS = draw_seeds(5, 0, np.arange(20_000), np.zeros(20_000, int))


def drawn(shape=(200, 100), **arguments):
    return FlowParameters(Generator(**arguments), shape).draw(SEEDS)


def assert_uniform(values, low, high):
    """Quantiles as they should be, within what 20,000 draws allow."""
    assert low <= values.min() and values.max() <= high
    quantiles = np.quantile(values, np.linspace(0.1, 0.9, 9))
    np.testing.assert_allclose(
        quantiles, np.linspace(low, high, 11)[1:-1], atol=0.02 * (high - low)
    )


@pytest.mark.parametrize(
    ("arguments", "name", "low", "high"),
    [
        ({"rotation_range": 40}, "theta", -40, 40),
        ({"shear_range": 0.3}, "shear", -0.3, 0.3),
        ({"zoom_range": 0.2}, "zx", 0.8, 1.2),
        ({"zoom_range": [0.5, 0.9]}, "zy", 0.5, 0.9),
        ({"height_shift_range": 0.1}, "tx", -20, 20),
        ({"width_shift_range": 0.1}, "ty", -10, 10),
        ({"width_shift_range": 12.5}, "ty", -12.5, 12.5),
        ({"channel_shift_range": 30}, "channel_shift_intensity", -30, 30),
        ({"brightness_range": (0.2, 1.5)}, "brightness", 0.2, 1.5),
    ],
)
def test_parameters_are_uniform(arguments, name, low, high):
    assert_uniform(drawn(**arguments)[name], low, high)


@pytest.mark.parametrize(
    ("limit", "values", "shares"),
    [
        ([10, 25], [-25, -10, 10, 25], [0.25] * 4),
        ([0.1, 0.2], [-40, -20, 20, 40], [0.25] * 4),
        # An integer n stands for 0, 1, ..., n - 1 pixels: zero comes with both signs.
        (3, [-2, -1, 0, 1, 2], [1 / 6, 1 / 6, 1 / 3, 1 / 6, 1 / 6]),
        (1, [0], [1]),
    ],
    ids=str,
)
def test_shifts_are_chosen(limit, values, shares):
    found, counts = np.unique(drawn(height_shift_range=limit)["tx"].round(6), return_counts=True)
    assert found.tolist() == values
    np.testing.assert_allclose(counts / 20_000, shares, atol=0.02)


@pytest.mark.parametrize("limit", [[10, 25], [0.1, 0.2], 3, 1, 0.15, 12.5, -4, [0.5], (0.1, 30)])
def test_shifts_are_distributed_as_keras_draws_them(limit):
    """Against `get_random_transform` itself, by quantiles."""
    generator = Generator(width_shift_range=limit)
    np.random.seed(0)
    theirs = [generator.get_random_transform((200, 100, 3))["ty"] for _ in range(4000)]
    ours = drawn(width_shift_range=limit)["ty"]
    points = np.linspace(0.03, 0.97, 23)
    width = max(np.ptp(theirs), 1)
    difference = np.quantile(ours, points, method="nearest") - np.quantile(
        theirs, points, method="nearest"
    )
    # Where values are few, a quantile may fall on a neighbour.
    assert np.sum(np.abs(difference) > 0.06 * width) <= 2


def test_flips_come_half_of_the_time():
    found = drawn(horizontal_flip=True, vertical_flip=True)
    both = found["flip_horizontal"] * found["flip_vertical"]
    assert abs(found["flip_horizontal"].mean() - 0.5) < 0.02
    assert abs(found["flip_vertical"].mean() - 0.5) < 0.02
    assert abs(both.mean() - 0.25) < 0.02


def test_parameters_are_independent():
    found = drawn(
        rotation_range=1, height_shift_range=0.5, width_shift_range=0.5, shear_range=1,
        zoom_range=0.5, channel_shift_range=1, brightness_range=(0, 1), horizontal_flip=True,
    )  # fmt: skip
    values = np.stack([values for name, values in found.items() if name != "flip_vertical"])
    correlations = np.corrcoef(values) - np.eye(len(values))
    assert np.abs(correlations).max() < 0.04


def test_nothing_is_drawn_where_nothing_is_asked_for():
    parameters = FlowParameters(Generator(rescale=0.5), (10, 10))
    assert not parameters.draws and not parameters.moves
    found = parameters.draw(SEEDS[:3])
    assert {name: values.tolist() for name, values in found.items()} == {
        name: [value] * 3 for name, value in IDENTITY.items()
    }
