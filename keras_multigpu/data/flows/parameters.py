"""What an `ImageDataGenerator` draws for each image, drawn from seeds instead of NumPy's state."""

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_multigpu.data.pipeline.order import hashed

Drawn = dict[str, np.ndarray]
"""One array for each parameter of `ImageDataGenerator.get_random_transform`."""

_DRAWS = 12
"""How many random numbers an image needs, at most."""


UNCHANGED = types.SimpleNamespace(
    rotation_range=0,
    height_shift_range=0,
    width_shift_range=0,
    shear_range=0,
    zoom_range=(1, 1),
    channel_shift_range=0,
    brightness_range=None,
    horizontal_flip=False,
    vertical_flip=False,
)
"""The ranges of an `ImageDataGenerator` that has been given none."""


class FlowParameters:
    """The ranges of an `ImageDataGenerator`, and draws from them for images of one size."""

    def __init__(self, generator: Any, shape: tuple[int, int]) -> None:
        self._generator = generator
        self._shape = shape
        zoom = generator.zoom_range
        self.moves = bool(
            generator.rotation_range
            or generator.height_shift_range
            or generator.width_shift_range
            or generator.shear_range
            or not (zoom[0] == 1 and zoom[1] == 1)
        )
        """Whether pixels are interpolated."""
        self.colors = bool(
            generator.channel_shift_range != 0 or generator.brightness_range is not None
        )
        """Whether colours are changed."""
        flips = bool(generator.horizontal_flip or generator.vertical_flip)
        self.draws = self.moves or self.colors or flips
        """Whether there is anything to draw."""
        # Keras's x runs down the rows.
        self._tx = shift(generator.height_shift_range, shape[0])
        self._ty = shift(generator.width_shift_range, shape[1])

    def still(self) -> "FlowParameters":
        return FlowParameters(UNCHANGED, self._shape)

    def draw(self, seeds: np.ndarray) -> Drawn:
        """The parameters of some images, as `get_random_transform` names and distributes them."""
        numbers = uniform_numbers(seeds)
        generator = self._generator
        rotation, shear = generator.rotation_range, generator.shear_range
        low, high = generator.zoom_range
        drawn = {
            "theta": between(-rotation, rotation, numbers[0]),
            "tx": self._tx(numbers[1], numbers[2]),
            "ty": self._ty(numbers[3], numbers[4]),
            "shear": between(-shear, shear, numbers[5]),
            "zx": between(low, high, numbers[6]),
            "zy": between(low, high, numbers[7]),
            "flip_horizontal": (numbers[8] < 0.5) * float(generator.horizontal_flip),
            "flip_vertical": (numbers[9] < 0.5) * float(generator.vertical_flip),
        }
        if generator.channel_shift_range != 0:
            limit = generator.channel_shift_range
            drawn["channel_shift_intensity"] = between(-limit, limit, numbers[10])
        if generator.brightness_range is not None:
            low, high = generator.brightness_range
            drawn["brightness"] = between(low, high, numbers[11])
        return drawn


def uniform_numbers(seeds: np.ndarray) -> np.ndarray:
    """Numbers from 0 to 1 that depend on the seeds alone; `float64[draws, n]`."""
    draws = np.arange(_DRAWS)[:, None]
    hashes = hashed(seeds[:, 0], seeds[:, 1], draws)
    # 53 bits are what a float64 holds exactly.
    return (hashes >> np.uint64(11)) * 2.0**-53


def between(low: float, high: float, numbers: np.ndarray) -> np.ndarray:
    return low + (high - low) * numbers


def shift(limit: Any, size: int) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """How an `ImageDataGenerator` draws a shift, in pixels.

    A list is chosen from, and so are the numbers below an integer, either with a random sign;
    a float is the end of a range. What is below one counts in images, the rest in pixels.
    """
    if not np.any(limit):
        return lambda numbers, signs: np.zeros_like(numbers)
    scale = size if np.max(limit) < 1 else 1
    choices = choices_of(limit)
    if choices is None:
        return lambda numbers, signs: between(-limit, limit, numbers) * scale

    def choose(numbers: np.ndarray, signs: np.ndarray) -> np.ndarray:
        chosen = choices[(numbers * len(choices)).astype(int)]
        return np.where(signs < 0.5, -1, 1) * chosen * scale

    return choose


def choices_of(limit: Any) -> np.ndarray | None:
    """What `numpy.random.choice` would choose from; None where it would raise a `ValueError`."""
    if isinstance(limit, float | np.floating):
        return None
    if np.ndim(limit) == 0:
        return np.arange(limit) if limit > 0 else None
    return np.asarray(limit)


def matrices(drawn: Drawn, height: int, width: int) -> np.ndarray:
    """`float64[n, 2, 3]`: where `(x, y, 1)` of a result lies in what was loaded, flips included."""
    theta, shear = np.deg2rad(drawn["theta"]), np.deg2rad(drawn["shear"])
    flips = np.stack([drawn["flip_horizontal"], drawn["flip_vertical"]]) != 0
    # Keras turns x about half the height and y about half the width; so do we.
    center_x, center_y = height / 2 - 0.5, width / 2 - 0.5
    inner = product(
        affine(np.cos(theta), -np.sin(theta), 0, np.sin(theta), np.cos(theta), 0),
        affine(1, 0, drawn["tx"], 0, 1, drawn["ty"]),
        affine(1, -np.sin(shear), 0, 0, np.cos(shear), 0),
        affine(drawn["zx"], 0, 0, 0, drawn["zy"], 0),
    )
    return product(
        affine(1, 0, center_x, 0, 1, center_y),
        inner,
        affine(1, 0, -center_x, 0, 1, -center_y),
        affine(
            np.where(flips[0], -1, 1),
            0,
            np.where(flips[0], width - 1, 0),
            0,
            np.where(flips[1], -1, 1),
            np.where(flips[1], height - 1, 0),
        ),
    )[:, :2]


def affine(*entries: Any) -> np.ndarray:
    """The first two rows of 3x3 matrices, entry by entry, with `(0, 0, 1)` below."""
    filled = np.broadcast_arrays(*np.atleast_1d(*entries), np.zeros(1), np.ones(1))
    rows = np.stack([*filled[:6], filled[6], filled[6], filled[7]], axis=-1).astype(np.float64)
    return rows.reshape(-1, 3, 3)


def product(*factors: np.ndarray) -> np.ndarray:
    result = factors[0]
    for factor in factors[1:]:
        result = result @ factor
    return result
