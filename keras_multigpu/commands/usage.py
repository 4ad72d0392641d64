"""What a command raises when it was called wrongly or lacks something."""

import argparse
import functools
import math
from collections.abc import Callable
from typing import Any

from keras_multigpu.checks import error_of, problem


class UsageError(Exception):
    """A command cannot do its work; its message is printed without a traceback."""


usage_error = functools.partial(error_of, UsageError)


def at_least(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """A reader of numbers that are not too small."""

    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = math.nan
        if not least <= number < math.inf:
            raise argparse.ArgumentTypeError(
                problem(
                    "the value cannot be used.",
                    f"Expected {'an integer' if kind is int else 'a number'} of at least {least}.",
                    f"Write for example `{least + 1}`.",
                    value=text,
                )
            )
        return number

    return read
