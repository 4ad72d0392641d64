"""Checks of the arguments that augmentation layers share."""

import math
import numbers
from collections.abc import Collection
from typing import Any

import numpy as np

from keras_multigpu.checks import real_number, require_number, value_error

# The lowest and the highest value.
Range = tuple[float, float]


def require(fits: bool, name: str, value: object, what: str, expected: str, example: str) -> None:
    """Raise a `ValueError` that names an argument, unless its value fits."""
    if not fits:
        raise value_error(
            f"`{name}` {what}.",
            f"Expected {expected}.",
            f"Pass for example `{name}={example}`.",
            **{name: value},
        )


def require_seed(seed: object) -> None:
    is_integer = isinstance(seed, numbers.Integral) and not isinstance(seed, bool)
    require(
        seed is None or is_integer, "seed", seed, "is not an integer", "None or an integer", "1"
    )


def require_bool(name: str, value: object) -> None:
    fits = isinstance(value, bool)
    require(fits, name, value, "is neither True nor False", "one of these two", "False")


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
    fix = f"Pass for example `{name}={(low + high) / 2:g}`."
    require_number(name, value, lambda one: low <= one <= high, f"from {low:g} to {high:g}", fix)
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
    what = "is not a pair" if pair_only else "is neither a number nor a pair"
    example = f"({(low + high) / 2:g}, {high:g})"
    require(
        bool(fits), name, value, f"{what} of numbers in its range", f"numbers in {limits}", example
    )
    if len(values) == 2:
        return float(min(values)), float(max(values))
    size = abs(float(value))
    return max(-size, float(low)), size


def as_two_ranges(name: str, value: Any, **limits: Any) -> tuple[Range, Range]:
    """Return a range for each axis, from a number for both or a pair of numbers or ranges."""
    both = (value, value) if is_number(value) else plain(value)
    # (-0.1, 0.1) is a range by mistake: here a pair has an entry for each axis.
    require(
        is_pair(both) and not any(is_number(one) and one < 0 for one in both),
        name,
        value,
        "is neither a number for both axes nor a pair with an entry for each",
        "numbers x of at least 0, which mean -x to x, or (low, high) pairs",
        "(0.1, (0, 0.2))",
    )
    first, second = (as_range(name, one, **limits) for one in both)
    return first, second


def as_value_range(value: Any) -> Range:
    """Return the values of black and white."""
    require(
        is_pair(value) and all(map(is_number, value)) and value[0] < value[1],
        "value_range",
        value,
        "is not a pair of a lower and a higher number",
        "the values of black and white in the images",
        "(0, 255)",
    )
    return float(value[0]), float(value[1])


def as_size(name: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    require(
        is_pair(value) and all(map(is_count, value)),
        name,
        value,
        "is not a height and a width in pixels",
        "None or two positive integers",
        "(224, 224)",
    )
    return int(value[0]), int(value[1])


def as_alpha(name: str, value: Any) -> float | None:
    """Return the parameter of a Beta distribution, or None."""
    if value is None:
        return None
    expected = "above 0, the parameter of a Beta distribution: small ones mix little, 1 is uniform"
    require_number(name, value, lambda one: 0 < one < math.inf, expected, f"Pass `{name}=0.2`.")
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
