"""Errors in three parts: what is wrong, what was expected, how to fix it; and printable names."""

import functools
import logging
import math
import numbers
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

E = TypeVar("E", bound=Exception)


def problem(what: str, expected: str, fix: str = "", /, **received: object) -> str:
    """The text of an error: three sentences, and the offending arguments as `name=value`.

    Without `fix` where it would only repeat what was expected.
    """
    values = ", ".join(f"{name}={value!r}" for name, value in received.items())
    # The `repr` of an array has several lines.
    lines = "\n".join(map(printable, values.split("\n")))
    return f"{printable(f'{what} {expected} {fix}'.rstrip())} Received: {lines}"


def error_of(
    kind: Callable[[str], E], what: str, expected: str, fix: str = "", /, **received: object
) -> E:
    """An error of class `kind` with the text of `problem`."""
    return kind(problem(what, expected, fix, **received))


value_error = functools.partial(error_of, ValueError)
type_error = functools.partial(error_of, TypeError)
runtime_error = functools.partial(error_of, RuntimeError)


def os_error(
    error: OSError, what: str, expected: str, fix: str = "", /, **received: object
) -> OSError:
    """An error of the same class as `error`, with the text of `problem`."""
    return type(error)(error.errno, problem(what, expected, fix, **received))


def printable(text: str) -> str:
    """Escape whatever would break the line or control a terminal, since file names may hold it."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


# What Keras and TensorFlow say before, and about where they were; colors and names of nodes.
NOISE = re.compile(r"\x1b\[\d*m|\{\{.*?\}\}|\[\[.*?\]\]|\[Op:.*?\]|(?s:Arguments received by .*)")
PREAMBLES = (
    "Exception encountered when calling",
    "Graph execution error",
    "Detected at node",
    "<stack traces unavailable>",
    "The error could",
)


def in_one_line(error: BaseException) -> str:
    """An exception's type, and what it says of what is wrong."""
    lines = [line.strip() for line in NOISE.sub("", str(error)).splitlines()]
    said = " ".join(line for line in lines if not line.startswith(PREAMBLES))
    text = f"{type(error).__name__}: {said or ' '.join(lines)}"
    return textwrap.shorten(text, 300, placeholder=" ...").rstrip(": ")


def warn(text: str, stacklevel: int = 1) -> None:
    """Warn with a text that may contain names; `stacklevel` 1 is the caller."""
    warnings.warn(printable(text), stacklevel=stacklevel + 1)


def _print_names_safely(record: logging.LogRecord) -> bool:
    if isinstance(record.args, tuple):
        record.args = tuple(
            arg if isinstance(arg, numbers.Number) else printable(str(arg)) for arg in record.args
        )
    return True


# The logger of all modules of the package.
logging.getLogger("keras_multigpu").addFilter(_print_names_safely)


def require_choice(name: str, value: object, choices: Iterable[object]) -> None:
    choices = list(choices)
    if value not in choices:
        known = ", ".join(repr(choice) for choice in choices)
        raise value_error(
            f"`{name}` has an unknown value.",
            f"Expected one of {known}.",
            **{name: value},
        )


def require_ending(path: str | Path, ending: str, otherwise: str) -> Path:
    path = Path(os.path.expanduser(path))
    if path.suffix.lower() != ending:
        raise value_error(
            otherwise,
            f"Expected a path that ends in {ending}.",
            path=str(path),
        )
    return path


def shorten(value: object, length: int) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."


def real_number(value: object) -> float:
    """A number as a float; NaN, which fails every comparison, for anything else."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan
    return float(value)


def require_number(
    name: str, value: object, fits: Callable[[float], bool], expected: str, fix: str = ""
) -> None:
    """Raise a `ValueError` unless a value is a number for which `fits` is true."""
    if not fits(real_number(value)):
        raise value_error(
            f"`{name}` is not a number in its range.",
            f"Expected a number {expected}.",
            fix,
            **{name: value},
        )


def require_positive_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise value_error(
            f"`{name}` is not a positive integer.",
            "Expected 1, 2, 3, ...",
            **{name: value},
        )
