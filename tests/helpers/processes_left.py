"""What tests of processes need: where one finds modules, whether it runs still, and has ended."""

import math
import multiprocessing
import os
import signal
import subprocess
import tempfile
import threading
import time
from pathlib import Path

PATIENCE = 120
"""Seconds. Nothing that a test waits for takes as long, on however slow a machine.

Of what does many things it is the time for each, after which it says something.
"""


PROCESSES = multiprocessing.get_context("forkserver")
"""Makes processes that begin where Keras is imported, which takes two seconds, and not used."""
# This package stays out: a worker joins the others where it imports it.
PROCESSES.set_forkserver_preload(["keras", "pytest"])


QUICK_START = str(Path(__file__).parent / "quick_start")


def python_path(*folders):
    """PYTHONPATH with these folders first; `quick_start` stays in it."""
    return os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]])


def as_users_start_it(*folders, **more):
    """The environment of a process that starts as a user's does; modules are in these folders too.

    For tests of how something starts, and for whole programs; any other process starts sooner with
    what lies in `quick_start`. A variable that is None is not there.
    """
    path = [one for one in python_path(*folders).split(os.pathsep) if one != QUICK_START]
    users = {"PYTHONPATH": os.pathsep.join(path), "TF_ENABLE_ONEDNN_OPTS": "1"}
    variables = {**os.environ, **users, "CUDA_VISIBLE_DEVICES": "-1", **more}
    return {name: value for name, value in variables.items() if value is not None}


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
    if patience < math.inf:
        killer = threading.Timer(patience, process.kill)
        killer.daemon = True
        killer.start()
    return process


class Silence:
    """Whether files have not grown for longer than `PATIENCE`."""

    def __init__(self):
        self._said, self._since = -1, 0.0

    def is_too_long(self, *sizes):
        """The sizes of the files now."""
        if sum(sizes) != self._said:
            self._said, self._since = sum(sizes), time.monotonic()
        return time.monotonic() - self._since > PATIENCE


def ended_process(command, **more):
    """What came of a process that does many things and says something now and then."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        more["env"] = {**more["env"], "PYTHONUNBUFFERED": "1"}
        process = start_process(command, patience=math.inf, stdout=out, stderr=err, **more)
        silence = Silence()
        while process.poll() is None:
            time.sleep(0.01)
            if silence.is_too_long(*(os.fstat(each.fileno()).st_size for each in (out, err))):
                process.kill()
                process.wait(PATIENCE)
        texts = [each.seek(0) or each.read() for each in (out, err)]
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def lives(pid):
    """Whether a process runs; one that is dead and not yet noticed does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so):
    latest = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < latest
        time.sleep(0.01)
