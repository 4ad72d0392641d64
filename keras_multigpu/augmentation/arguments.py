"""Checks of the arguments that augmentation layers share."""

import numbers
from collections.abc import Collection
from typing import Any

import numpy as np

from keras_multigpu.checks import require_choice, require_number, value_error

BOX_FORMATS = "xyxy rel_xyxy yxyx rel_yxyx xywh rel_xywh center_xywh center_yxhw".split()
"""The formats that `keras.utils.bounding_boxes` converts."""

Range = tuple[float, float]
"""The lowest and the highest value that can be drawn."""


def require_seed(seed: object) -> None:
    if seed is None or (not isinstance(seed, bool) and isinstance(seed, numbers.Integral)):
        return
    raise value_error(
        "`seed` is not an integer.",
        "Expected None or an integer.",
        "Pass for example `seed=1`.",
        seed=seed,
    )


def require_box_format(box_format: object) -> None:
    if box_format is not None:
        require_choice("bounding_box_format", box_format, BOX_FORMATS)


def require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise value_error(
            f"`{name}` is neither True nor False.",
            "Expected one of these two.",
            f"Pass for example `{name}=False`.",
            **{name: value},
        )


def is_number(value: object) -> bool:
    return (
        not isinstance(value, bool)
        and isinstance(value, numbers.Real)
        and abs(float(value)) < float("inf")
    )


def as_range(
    name: str,
    value: Any,
    *,
    low: float,
    high: float,
    symmetric: bool = True,
    open_low: bool = False,
) -> Range:
    """An argument such as Keras's `factor`: a number, or a pair of numbers, as a range.

    Args:
        symmetric: Whether one number x means from -x to x (not below `low`), and not 0 to x.
        open_low: Whether `low` itself is not allowed.
    """
    values = [value] if is_number(value) else list(value) if is_pair(value) else []
    if not values or not all(
        is_number(one) and (low < one if open_low else low <= one) and one <= high for one in values
    ):
        bracket = "(" if open_low else "["
        raise value_error(
            f"`{name}` is neither a number nor a pair of numbers in its range.",
            f"Expected numbers in {bracket}{low:g}, {high:g}].",
            f"Pass for example `{name}=({low:g}, {high:g})`.",
            **{name: value},
        )
    if len(values) == 2:
        return float(min(values)), float(max(values))
    size = abs(float(value))
    return (max(-size, low) if symmetric else 0.0), size


def is_pair(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return value.shape == (2,)
    return isinstance(value, list | tuple) and len(value) == 2


def plain(value: Any) -> Any:
    """A value whose arrays and numbers of NumPy are Python's, so that JSON can write it."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if isinstance(value, list | tuple):
        return type(value)([plain(one) for one in value])
    return value


def require_probability(name: str, value: object) -> None:
    fix = f"Pass for example `{name}=0.5`."
    require_number(name, value, lambda one: 0 <= one <= 1, "from 0 to 1", fix)


def as_probability(name: str, value: Any) -> float:
    """An argument such as the `factor` of Keras's RandomErasing, as one probability."""
    # A probability that is itself drawn from a range comes down to the mean of the range.
    low, high = as_range(name, value, low=0, high=1)
    return (low + high) / 2 if is_pair(value) else high


def as_value_range(value: Any) -> Range:
    """The argument `value_range`, checked: the values of black and of white."""
    if not is_pair(value) or not all(is_number(one) for one in value) or value[0] >= value[1]:
        raise value_error(
            "`value_range` is not a pair of a lower and a higher number.",
            "Expected the values of black and white in the images.",
            "Pass `(0, 255)` or `(0, 1)`.",
            value_range=value,
        )
    return float(value[0]), float(value[1])


def as_number(name: str, value: Any, *, low: float, high: float) -> float:
    fix = f"Pass for example `{name}={(low + high) / 2:g}`."
    require_number(name, value, lambda one: low <= one <= high, f"from {low:g} to {high:g}", fix)
    return float(value)


def require_draws(
    drawn: dict[str, Any], names: Collection[str], *, needed: Collection[str] = ()
) -> None:
    if set(needed) <= drawn.keys() <= set(names):
        return
    raise value_error(
        "These draws belong to another layer.",
        f"Expected values named {', '.join(map(repr, names))}.",
        "Pass what the layer's own `draw` returned.",
        drawn=sorted(drawn),
    )
