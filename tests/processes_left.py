"""What tests of processes need: where one finds modules, whether it runs still, and has ended."""

import multiprocessing
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

PATIENCE = 120
"""Seconds. Nothing that a test waits for takes as long, on however slow a machine."""


PROCESSES = multiprocessing.get_context("forkserver")
"""Makes processes that begin where Keras is imported, which takes two seconds, and not used."""
# This package stays out: a worker joins the others where it imports it.
PROCESSES.set_forkserver_preload(["keras", "pytest"])


def python_path(*folders):
    """PYTHONPATH with these folders first; `quick_start` stays in it."""
    return os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]])


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What ends a process that does not ignore it."""


def start_process(command, ignores=(), patience=PATIENCE, **more):
    """A process that is killed when it has run too long, so that nobody waits for it for ever.

    It ignores these signals alone. By itself it would ignore what the tests do, which is more if
    they run by `nohup` or in the background.
    """
    before = {number: signal.getsignal(number) for number in ENDING}
    try:
        for number in ENDING:
            signal.signal(number, signal.SIG_IGN if number in ignores else signal.SIG_DFL)
        process = subprocess.Popen(command, **more)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    killer = threading.Timer(patience, process.kill)
    killer.daemon = True
    killer.start()
    return process


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
