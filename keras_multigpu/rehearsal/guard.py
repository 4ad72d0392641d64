"""Refuses writes outside of a rehearsal's folder, by whatever road the overlay does not know.

Landlock, which needs no rights (Linux 5.13), has the system refuse them: to libraries in C++ and to
programs that the script starts.
"""

import ctypes
import os
import sys
from collections.abc import Sequence

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls, with the same numbers on all machines."""

NO_NEW_PRIVILEGES = 38
WRITE_FILE, REMOVE_AND_MAKE, MOVE, TRUNCATE = 1 << 1, 0x1FF << 4, 1 << 13, 1 << 14


def version() -> int:
    """The version of Landlock; -1 without it."""
    return int(ctypes.CDLL(None).syscall(CREATE_RULESET, None, 0, 1))


def restrict(folders: Sequence[str]) -> bool:
    """Let this process and its children write only in these folders; whether the system can.

    Called while there is one thread: it holds for those that this one starts.
    """
    system, known = ctypes.CDLL(None), version()
    if known < 1:
        return False
    # Version 1 refuses all moves between folders.
    rights = WRITE_FILE | REMOVE_AND_MAKE
    rights |= (MOVE if known >= 2 else 0) | (TRUNCATE if known >= 3 else 0)
    handled = ctypes.c_uint64(rights)
    rules = system.syscall(CREATE_RULESET, ctypes.byref(handled), 8, 0)
    for folder in folders:
        file = os.open(folder, os.O_PATH)
        beneath = handled.value.to_bytes(8, sys.byteorder) + file.to_bytes(4, sys.byteorder)
        system.syscall(ADD_RULE, rules, 1, beneath, 0)
        os.close(file)
    system.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    restricted = system.syscall(RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return restricted
