"""Errors of usage, and how commands read numbers and functions."""

import argparse
import contextlib
import functools
import importlib
import math
import os
import sys
import sysconfig
import tempfile
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, TextIO

from keras_multigpu.checks import error_of, problem


class UsageError(Exception):
    """An error of a command that is printed without a traceback."""


usage_error = functools.partial(error_of, UsageError)


OURS = (Path(__file__).parents[1], Path(sysconfig.get_path("stdlib")))


def says_all(error: Exception) -> bool:
    """Whether a traceback would add nothing: a three-part error raised without the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    files = [Path(each.filename) for each in frames if not each.filename.startswith("<frozen ")]
    ours = all(any(file.is_relative_to(each) for each in OURS) for file in files)
    return isinstance(error, UsageError) or (ours and " Received: " in str(error))


def at_least(kind: Callable[[str], Any], least: float) -> Callable[[str], Any]:
    """A type for `argparse`: a number of at least `least`."""

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


def check_script(path: str) -> None:
    """Each process that runs it would say so."""
    if path.endswith(".ipynb"):
        raise usage_error(
            "This is a notebook.",
            "Expected a Python script.",
            f"Make one of it: `jupyter nbconvert --to script {path}`.",
            script=path,
        )
    if not os.path.exists(path):
        raise usage_error(
            "There is no such script.",
            "Expected the path of a Python script, from this directory.",
            script=path,
            directory=os.getcwd(),
        )


def check_script_or_module(name: str) -> None:
    package = name.partition(".")[0]
    # Which imports nothing.
    if os.path.exists(name) or not PathFinder.find_spec(package, [os.getcwd(), *sys.path]):
        check_script(name)


def not_imported(argument: str, name: str, why: object) -> UsageError:
    return usage_error(
        f"The function given as {argument} cannot be imported: {why}.",
        "Expected a module that can be imported from this directory, and a function in it.",
        "Check the spelling, and run the command in the directory that holds the module.",
        name=name,
        directory=os.getcwd(),
    )


def parts_of(argument: str, name: str) -> tuple[str, str]:
    """The module and the function of a name, with the working folder on Python's path."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise usage_error(
            f"The name given as {argument} is incomplete.",
            "Expected a module and a function in it, with a colon between them.",
            "Write for example `my_package.models:build_model`.",
            name=name,
        )
    if os.getcwd() not in sys.path:  # As with `python -m`.
        sys.path.insert(0, os.getcwd())
    return module_name, function_name


def load(argument: str, name: str) -> Callable[..., Any]:
    """Import a user's function, given as `module:function`."""
    module_name, function_name = parts_of(argument, name)
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise not_imported(argument, name, error) from error
    if not callable(function):
        raise usage_error(
            f"What was given as {argument} is not a function.",
            "Expected a function without arguments.",
            "Name the function that returns it.",
            name=name,
            found=function,
        )
    return function


@contextlib.contextmanager
def without_library_messages() -> Iterator[TextIO | None]:
    """Hide what C libraries print, and yield the terminal, if there is one, to show progress on.

    TensorFlow and image decoders write to the standard error without Python. That output is shown
    only after an unexpected error.
    """
    interactive = sys.stderr.isatty()
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept, os.fdopen(os.dup(2), "w") as terminal:
        os.dup2(kept.fileno(), 2)
        failed = False
        try:
            yield terminal if interactive else None
        except Exception as error:
            failed = not isinstance(error, UsageError)
            raise
        finally:
            os.dup2(terminal.fileno(), 2)
            if failed:
                kept.seek(0)
                sys.stderr.write(kept.read().decode(errors="replace"))
