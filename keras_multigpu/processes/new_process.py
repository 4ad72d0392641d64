"""The command line and the environment of a new Python process; what other programs answer."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from keras_multigpu.checks import error_of

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


ANSWER_SECONDS = 60.0
"""How long a program may take to say something about this machine."""


def answer(*words: str) -> str:
    """What a program prints, nothing if it fails; a `TimeoutError` if it does not end."""
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    process = subprocess.Popen(words, stdout=pipe, stderr=nowhere, text=True)
    try:
        printed, _ = process.communicate(timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        # A driver that hangs keeps its processes even then, and `subprocess.run` would wait.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=1)
        raise error_of(
            TimeoutError,
            f"`{' '.join(words)}` has not ended after {ANSWER_SECONDS:g} seconds.",
            "Expected an answer about this machine in that time.",
            "Run it by hand; where it hangs, too, see `dmesg`, and restart the machine.",
            command=words,
        ) from None
    return "" if process.returncode else printed


OF_CLUSTERS = (("TF_CONFIG",), ("SLURM_PROCID", "SLURM_STEP_NODELIST"))
"""For each of `cluster.managers.MANAGERS` the variables that make a process one of its workers."""

OF_A_CLUSTER = {name for names in OF_CLUSTERS for name in names}


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


def with_gpus(**variables: str) -> dict[str, str]:
    """The same for a process that sees the GPUs, which this process must not use."""
    found = environment(**variables)
    del found["CUDA_VISIBLE_DEVICES"]
    own = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if own is None else {**found, "CUDA_VISIBLE_DEVICES": own}
