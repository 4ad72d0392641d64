"""How new Python processes of this package are started."""

import os
import sys
from pathlib import Path

FOUND_HERE = str(Path(__file__).parents[2])
"""The folder from which this package was imported."""


def command(module: str, *arguments: str) -> list[str]:
    """What starts a module of this package as a program."""
    # With `-P` the working folder is not searched for modules: a `random.py` of the user's would be
    # taken for Python's own.
    return [sys.executable, "-P", "-m", module, *arguments]


def script(path: str, *arguments: str) -> list[str]:
    """What starts a script of the user's, as `python PATH ARGUMENTS` does."""
    return [sys.executable, path, *arguments]


def code(text: str, *arguments: str) -> list[str]:
    """What runs a few lines of Python."""
    return [sys.executable, "-c", text, *arguments]


OF_A_CLUSTER = ("TF_CONFIG", "SLURM_PROCID", "SLURM_STEP_NODELIST")
"""The variables by which a process knows that it is one of several workers."""


def environment(**variables: str) -> dict[str, str]:
    """The environment of a process that trains on CPUs and finds the same modules as this one."""
    # An empty entry means the working folder, which is all that puts a clone on the path.
    path = os.pathsep.join([*filter(None, sys.path), FOUND_HERE])
    # The new process does not count as a worker, even if this one does.
    own = {name: value for name, value in os.environ.items() if name not in OF_A_CLUSTER}
    # This process may hold all memory of the GPUs.
    return own | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": path} | variables
