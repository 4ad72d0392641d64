"""Errors in three parts: what came, what was expected, how to fix it."""

import math
import numbers
from collections.abc import Iterable


def problem(what: str, expected: str, fix: str, **received: object) -> str:
    """The text of one error: three sentences and the values that caused it.

    Args:
        what: What came, in one sentence.
        expected: What would have been right.
        fix: What to change.
        **received: The offending arguments, printed as `name=value`.

    Returns:
        The message, ending in `Received: name=value, ...`.
    """
    values = ", ".join(f"{name}={value!r}" for name, value in received.items())
    return f"{what} {expected} {fix} Received: {values}"


def require_choice(name: str, value: object, choices: Iterable[object]) -> None:
    """Raise a `ValueError` unless `value` is one of `choices`."""
    choices = list(choices)
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise ValueError(
            problem(
                f"`{name}` has an unknown value.",
                f"Expected one of {known}.",
                "Check the spelling.",
                **{name: value},
            )
        )


def real_number(value: object) -> float:
    """A number as a float; NaN, which no comparison lets pass, for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    return float(value)


def require_positive_integer(name: str, value: object) -> None:
    """Raise a `ValueError` unless `value` is an integer of at least one."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(
            problem(
                f"`{name}` is not a positive integer.",
                "Expected 1, 2, 3, ...",
                f"Pass a whole number as `{name}`.",
                **{name: value},
            )
        )
