"""What tests of processes need: their environment, starting them, and waiting for their end."""

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
"""Seconds. Nothing that a test waits for takes this long, however slow the machine.

For a process with many steps it limits each one, after which the process prints something.
"""


PROCESSES = multiprocessing.get_context("forkserver")
"""Starts processes in which Keras is already imported, which takes two seconds."""
# Not this package: a worker joins the others when it imports it.
PROCESSES.set_forkserver_preload(["keras", "pytest"])


QUICK_START = str(Path(__file__).parent / "quick_start")


def python_path(*folders):
    """PYTHONPATH with these folders first; `quick_start` stays in it."""
    return os.pathsep.join([*map(str, folders), os.environ["PYTHONPATH"]])


def as_users_start_it(*folders, **more):
    """The environment of a process as users start it, with these folders in its PYTHONPATH.

    For tests of how something starts, and for whole programs; other processes start faster with
    `quick_start`. A variable that is None is left out.
    """
    path = [one for one in python_path(*folders).split(os.pathsep) if one != QUICK_START]
    users = {"PYTHONPATH": os.pathsep.join(path), "TF_ENABLE_ONEDNN_OPTS": "1"}
    variables = {**os.environ, **users, "CUDA_VISIBLE_DEVICES": "-1", **more}
    return {name: value for name, value in variables.items() if value is not None}


ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process unless it ignores them."""


def start_process(command, ignores=(), patience=PATIENCE, **more):
    """Start a process that is killed after `patience` seconds, so that no test hangs.

    It ignores only the signals named in `ignores`. It would inherit those that the tests ignore,
    which are more under `nohup` or in the background.
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
        """Whether that is so, given the current sizes of the files."""
        if sum(sizes) != self._said:
            self._said, self._since = sum(sizes), time.monotonic()
        return time.monotonic() - self._since > PATIENCE


def ended_process(command, **more):
    """Run a process with many steps to its end; kill it when it prints nothing for `PATIENCE`."""
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


def in_own_process(function, *args):
    """What a module's function returns in a process of its own, which it may abort."""
    result, sends = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(target=_send, args=(sends, function, *args))
    process.start()
    sends.close()
    try:
        assert result.poll(PATIENCE), f"{function.__name__} hangs"
        return result.recv()  # An `EOFError` means that the process has died.
    finally:
        process.kill()
        process.join(PATIENCE)


def _send(sends, function, *args):
    sends.send(function(*args))


def lives(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(is_so):
    latest = time.monotonic() + PATIENCE
    while not is_so():
        assert time.monotonic() < latest
        time.sleep(0.01)
