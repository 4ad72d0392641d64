"""Ends process groups if the process that has started them dies without doing so.

    python -m keras_multigpu.processes.watchdog GRACE

reads `12` from its input for a group that has been started and `-12` for one that has ended. The
input ends with that process, however it ends.
"""

import os
import signal
import sys
import time


def main(grace: float) -> None:
    """Watch, and end what is left."""
    groups: set[int] = set()
    for line in sys.stdin.buffer:
        number = int(line)
        groups = groups | {number} if number > 0 else groups - {-number}
    latest = time.monotonic() + grace
    groups = {group for group in groups if sent(group, signal.SIGTERM)}
    while groups and time.monotonic() < latest:
        time.sleep(0.05)
        groups = {group for group in groups if sent(group, 0)}
    for group in groups:
        sent(group, signal.SIGKILL)


def sent(group: int, number: int) -> bool:
    """Send a signal to a group; whether there is any of it left."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


if __name__ == "__main__":
    main(float(sys.argv[1]))
