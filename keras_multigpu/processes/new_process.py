"""The command line and the environment of a new Python process."""

import os
import sys
from pathlib import Path

PACKAGE_FOLDER = str(Path(__file__).parents[2])
"""The folder from which this package was imported."""


# `-P` keeps the working folder off the path, where the user's `random.py` would hide Python's own.
def command(module: str, *arguments: str) -> list[str]:
    """Run a module of this package."""
    return [sys.executable, "-P", "-m", module, *arguments]


def code(text: str, *arguments: str) -> list[str]:
    """Run a few lines of Python."""
    return [sys.executable, "-P", "-c", text, *arguments]


def script(path: str, *arguments: str) -> list[str]:
    """Run a user's script, as `python PATH ARGUMENTS` does."""
    return [sys.executable, path, *arguments]


OF_A_CLUSTER = ("TF_CONFIG", "SLURM_PROCID", "SLURM_STEP_NODELIST")
"""The variables that make a process one of several workers."""


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that is not a worker, sees no GPU and finds the same modules.

    Args:
        **variables: More variables, or other values.
    """
    # `PYTHONPATH` must not have the path's empty entry, which stands for the working folder.
    path = os.pathsep.join([*filter(None, sys.path), PACKAGE_FOLDER])
    own = {name: value for name, value in os.environ.items() if name not in OF_A_CLUSTER}
    # This process may hold all memory of the GPUs.
    return own | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": path} | variables
