"""A process that runs the checks of a module, from a number on, until one raises.

    python -m keras_multigpu.scoreboard.part MODULE NUMBER ARGUMENTS

It tells the process that started it what begins and what was found.
"""

import importlib
import json
import sys
import traceback
from typing import Any

from keras_multigpu.checks import in_one_line
from keras_multigpu.scoreboard.board import TOLD


def main() -> None:
    name, first, arguments = sys.argv[1:]
    try:
        checks = importlib.import_module(name).checks(*json.loads(arguments))
    except Exception as error:
        fail(name, error)
        return
    tell("plan", list(checks))
    for name, check in list(checks.items())[int(first) :]:
        tell("begins", name)
        try:
            for row in check():
                tell("row", row._asdict())
        except Exception as error:
            # What raises may spoil the next: another process goes on.
            fail(name, error)
            return
    tell("ends", None)


def fail(name: str, error: Exception) -> None:
    details = traceback.format_exc()[-4000:]
    tell("row", {"name": name, "got": in_one_line(error), "ok": False, "details": details})
    tell("fails", name)


def tell(word: str, what: Any) -> None:
    print(TOLD + json.dumps([word, what], default=str), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
