"""A part with a check that raises, ones that end its process, and one that hangs."""

import os
import signal
import time
from collections import namedtuple

# That of the package would start TensorFlow.
Row = namedtuple("Row", "name got expected ok skipped", defaults=[None, "", None, None])


def raises():
    raise ValueError("no")


def half():
    yield Row("half", 1)
    os.abort()


def checks(*names):
    found = {
        "good": lambda: [Row("good", 1, "1", True)],
        "raises": raises,
        "half": half,
        # As the kernel does where memory runs out.
        "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "hangs": lambda: time.sleep(600),
        "good again": lambda: [Row("good again", 2.5)],
    }
    return {name: found[name] for name in names}
