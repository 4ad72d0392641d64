"""Checks of the arguments of `RandomGeometry`."""

from typing import Any

from keras_multigpu.augmentation.arguments import Range, as_range, is_number, is_pair
from keras_multigpu.checks import require_choice, value_error

FLIPS = {
    None: (),
    "horizontal": ("flip_horizontal",),
    "vertical": ("flip_vertical",),
    "horizontal_and_vertical": ("flip_horizontal", "flip_vertical"),
}
"""What is drawn for each value of `flip`."""


def drawn_ranges(rotation: Any, translation: Any, zoom: Any, shear: Any) -> dict[str, Range]:
    """The names of what is drawn from a range, with the ranges; without what is always zero."""
    turns = as_range("rotation", rotation, low=-1, high=1)
    height_shift, width_shift = as_two_ranges("translation", translation, low=-1, high=1)
    x_shear, y_shear = as_two_ranges("shear", shear, low=0, high=1)
    height_zoom, width_zoom = zoom_ranges(zoom)
    ranges = {
        "rotation": (turns[0] * 360, turns[1] * 360),
        "height_translation": height_shift,
        "width_translation": width_shift,
        "height_zoom": height_zoom,
        "x_shear": x_shear,
        "y_shear": y_shear,
    }
    used = {name: drawn for name, drawn in ranges.items() if drawn != (0, 0)}
    # None says that the width follows the height, which leaves nothing to draw.
    if width_zoom not in (None, (0, 0)):
        used["width_zoom"] = width_zoom
    return used


def zoom_ranges(zoom: Any) -> tuple[Range, Range | None]:
    """The argument `zoom` as a range for the height, and one for the width or None."""
    both = (zoom, None) if is_number(zoom) else zoom
    limits: dict[str, Any] = {"low": -1, "high": 1, "open_low": True}
    if is_pair(both) and both[1] is None:
        return as_range("zoom", both[0], **limits), None
    return as_two_ranges("zoom", both, **limits)


def as_two_ranges(name: str, value: Any, **limits: Any) -> tuple[Range, Range]:
    """A number for both axes, or a pair with a number or range for each; see `as_range`."""
    both = (value, value) if is_number(value) else value
    # A pair is not a range, and (-0.1, 0.1) looks like one.
    if not is_pair(both) or any(is_number(one) and one < 0 for one in both):
        raise value_error(
            f"`{name}` is neither a number for two axes nor a pair with something for each.",
            "Expected numbers x of at least 0, for -x to x, or (low, high) pairs.",
            f"Pass for example `{name}=0.1` or `{name}=(0.1, (0, 0.2))`.",
            **{name: value},
        )
    first, second = (as_range(name, one, **limits) for one in both)
    return first, second


def as_positive_range(name: str, value: Any, high: float) -> Range | None:
    if value is None:
        return None
    if not is_pair(value) or not all(is_number(one) and 0 < one <= high for one in value):
        raise value_error(
            f"`{name}` is not a pair of numbers in its range.",
            f"Expected None, or the lowest and the highest value, in (0, {high:g}].",
            f"Pass for example `{name}=(0.5, 1)`.",
            **{name: value},
        )
    return float(min(value)), float(max(value))


def as_size(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not is_pair(value) or not all(is_number(one) and one > 0 and one % 1 == 0 for one in value):
        raise value_error(
            f"`{name}` is not a height and a width in pixels.",
            "Expected None or two positive integers.",
            f"Pass for example `{name}=(224, 224)`.",
            **{name: value},
        )
    return int(value[0]), int(value[1])


def require_one_window(crop: Any, crop_area: Any, aspect_ratio: Any) -> None:
    if crop is not None and not (crop_area is None and aspect_ratio is None):
        raise value_error(
            "The window to cut out has a fixed size and a random one.",
            "Expected either `crop`, or `crop_area` and `aspect_ratio`.",
            "Leave one of them out.",
            crop=crop,
            crop_area=crop_area,
            aspect_ratio=aspect_ratio,
        )


def require_flip(flip: Any) -> None:
    if flip is not None:
        require_choice("flip", flip, [name for name in FLIPS if name is not None])


def require_fill_value(value: Any) -> None:
    if not is_number(value):
        raise value_error(
            "`fill_value` is not a number.",
            "Expected the value of what lies outside of the image.",
            "Pass for example `fill_value=0`.",
            fill_value=value,
        )
