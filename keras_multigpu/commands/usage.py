"""Errors of usage, and how commands read numbers and functions."""

import argparse
import contextlib
import functools
import importlib
import inspect
import math
import os
import sys
import sysconfig
import tempfile
import textwrap
import threading
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from keras_multigpu.checks import error_of, printable, problem


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


def load(argument: str, name: str) -> Callable[..., Any]:
    """Import a user's function, given as `module:function`, from the working folder too."""
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise usage_error(
            f"The name given as {argument} is incomplete.",
            "Expected a module and a function in it, with a colon between them.",
            "Write for example `my_package.models:build_model`.",
            name=name,
        )
    if os.getcwd() not in sys.path:  # As with `python -m`.
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise usage_error(
            f"The function given as {argument} cannot be imported: {error}.",
            "Expected a module that can be imported from this directory, and a function in it.",
            "Write the module as `import` does: `my_package.models:build_model`.",
            name=name,
            directory=os.getcwd(),
        ) from error
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise usage_error(
            f"What was given as {argument} cannot be called: {error}.",
            "Expected a function without arguments.",
            "Name a function that returns it, or one that calls this one with arguments.",
            name=name,
        ) from error
    return function


def in_lines(start: str, says: str, do: str) -> str:
    """A line of a report, wrapped beside its first columns, and below it what to do."""
    indent = " " * len(start)
    wrapped = textwrap.TextWrapper(100, break_on_hyphens=False, subsequent_indent=indent)
    texts = [f"{start}{says}", f"{indent}-> {do}"]
    return "\n".join(wrapped.fill(printable(text)) for text in texts[: 2 if do else 1])


def images_of(folder: str) -> tuple[str, Any]:
    """A folder, or its address, and the table of all images in it."""
    from keras_multigpu.data.sources import image_folder

    folder = os.path.expanduser(folder)
    image_folder.require_folder(folder)
    files, _ = image_folder.images_in(folder, None)
    if not len(files):
        raise usage_error(
            "There are no images in the folder.",
            f"Expected files that end in {', '.join(image_folder.EXTENSIONS)}.",
            folder=folder,
        )
    return folder, files


def path_in(folder: str, path: str) -> str:
    return path[len(folder.rstrip("/")) + 1 :]


def progress_bar(count: int) -> Callable[[int], object]:
    """Takes how many more images are done, and shows it on a terminal."""
    import keras

    if not sys.stdout.isatty():
        return lambda more: None
    bar, lock = keras.utils.Progbar(count, unit_name="image"), threading.Lock()

    def add(more: int) -> None:
        with lock:
            bar.add(more)

    return add


@contextlib.contextmanager
def without_library_messages() -> Iterator[None]:
    """Hide what C libraries print.

    TensorFlow and image decoders write to the standard error without Python. That output is shown
    only after an unexpected error.
    """
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)
        failed = False
        try:
            yield
        except Exception as error:
            failed = not says_all(error)
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            if failed:
                kept.seek(0)
                sys.stderr.write(kept.read().decode(errors="replace"))
