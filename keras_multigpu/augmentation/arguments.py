"""Checks of the arguments that augmentation layers share."""

import math
import numbers
from collections.abc import Collection
from typing import Any

import numpy as np

from keras_multigpu.checks import real_number, value_error

# The lowest and the highest value.
Range = tuple[float, float]


def require(fits: bool, name: str, value: object, expected: str) -> None:
    """Raise a `ValueError` that names an argument, unless its value fits."""
    if not fits:
        raise value_error(
            f"`{name}` has a value that does not fit.", f"Expected {expected}.", **{name: value}
        )


def require_seed(seed: object) -> None:
    is_integer = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    require(seed is None or is_integer, "seed", seed, "an integer or None")


def require_bool(name: str, value: object) -> None:
    require(isinstance(value, bool), name, value, "True or False")


def is_number(value: object) -> bool:
    return math.isfinite(real_number(value))


def is_count(value: Any) -> bool:
    """Whether a value is a positive whole number."""
    return is_number(value) and value >= 1 and value % 1 == 0


def is_pair(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == (2,)
    return isinstance(value, list | tuple) and len(value) == 2


def as_number(name: str, value: Any, *, low: float, high: float) -> float:
    fits = low <= real_number(value) <= high
    require(fits, name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def as_range(
    name: str,
    value: Any,
    *,
    low: float,
    high: float,
    open_low: bool = False,
    pair_only: bool = False,
) -> Range:
    """Return a range; one number x, such as Keras's `factor`, gives -x to x within the limits.

    Args:
        open_low: Whether `low` itself is refused.
        pair_only: Whether one number is refused.
    """
    values = list(value) if is_pair(value) else [] if pair_only else [value]
    fits = values and all(
        is_number(one) and (low < one if open_low else low <= one) and one <= high for one in values
    )
    limits = f"{'(' if open_low else '['}{low:g}, {high:g}]"
    kind = "a pair of numbers" if pair_only else "a number, or a pair of them,"
    require(bool(fits), name, value, f"{kind} in {limits}")
    if len(values) == 2:
        return float(values[0]), float(values[1])
    size = abs(float(value))
    return max(-size, float(low)), size


def as_two_ranges(name: str, value: Any, **limits: Any) -> tuple[Range, Range]:
    """Return a range for each axis, from a number for both or a pair of numbers or ranges."""
    both = (value, value) if is_number(value) else plain(value)
    require(
        # (-0.1, 0.1) is a range by mistake: here a pair has an entry for each axis.
        is_pair(both) and not any(is_number(one) and one < 0 for one in both),
        name,
        value,
        "a number for both axes or a pair such as (0.1, (0, 0.2)), with an entry for each: x of at "
        "least 0, which means -x to x, or (low, high)",
    )
    first, second = (as_range(name, one, **limits) for one in both)
    return first, second


def as_value_range(value: Any) -> Range:
    """Return the values of black and white."""
    fits = is_pair(value) and all(map(is_number, value)) and value[0] < value[1]
    require(fits, "value_range", value, "the values of black and white, such as (0, 255)")
    return float(value[0]), float(value[1])


def as_size(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    fits = is_pair(value) and all(map(is_count, value))
    require(fits, name, value, "a height and a width in pixels, such as (224, 224), or None")
    return int(value[0]), int(value[1])


def as_alpha(name: str, value: Any) -> float | None:
    """Return the parameter of a Beta distribution, or None."""
    if value is None:
        return None
    expected = "a number above 0, the alpha of a Beta distribution, or None"
    require(0 < real_number(value) < math.inf, name, value, expected)
    return float(value)


def plain(value: Any) -> Any:
    """Turn NumPy's arrays and numbers into Python's, which JSON can write."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)([plain(one) for one in value])
    return value


def require_draws(
    drawn: dict[str, Any], names: Collection[str], *, needed: Collection[str] = ()
) -> None:
    if not set(needed) <= drawn.keys() <= set(names):
        raise value_error(
            "These draws belong to another layer.",
            f"Expected values named {', '.join(map(repr, names))}.",
            "Pass what the layer's own `draw` returned.",
            drawn=sorted(drawn),
        )
