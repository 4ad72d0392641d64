"""What tests of processes need: where one finds modules, whether it runs still, and has ended."""

import multiprocessing
import os
import time
from pathlib import Path

PATIENCE = 1200
"""Seconds. Nothing that a test waits for takes as long, on however slow a machine."""


PROCESSES = multiprocessing.get_context("forkserver")
"""Makes processes that begin where Keras is imported, which takes two seconds, and not used."""
# This package stays out: a worker joins the others where it imports it.
PROCESSES.set_forkserver_preload(["keras", "pytest"])


def python_path(*folders):
    """PYTHONPATH with these folders first; `quick_start` stays in it."""
    return os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]])


def lives(pid):
    """Whether a process runs; one that is dead and not yet noticed does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so):
    """Wait until something is so."""
    latest = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < latest
        time.sleep(0.01)
