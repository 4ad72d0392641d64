"""The commands of `keras-multigpu`, one per file, with little logic of their own.

They import Keras and TensorFlow inside functions, so that `--help` answers at once.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from keras_multigpu import __version__
from keras_multigpu.commands import (
    check_images,
    demo,
    doctor,
    launch,
    memory,
    pack,
    rehearse,
    scale,
    scoreboard,
    verify,
)
from keras_multigpu.commands.usage import says_all

COMMANDS = (demo, doctor, rehearse, verify, memory, scale, scoreboard, launch, check_images, pack)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after `keras-multigpu`; by default those of the command line.

    Returns:
        The exit code: 0 for success, 1 if the command found a problem in what it checked, 2 if it
        could not do its work.
    """
    # TensorFlow's startup messages would bury a command's output.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = argparse.ArgumentParser(
        prog="keras-multigpu",
        description="Train Keras models on several GPUs and get the same numbers as on one.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    if not hasattr(arguments, "run"):
        parser.print_help()
        return 0
    try:
        return arguments.run(arguments)
    except Exception as error:
        if says_all(error):
            print(f"keras-multigpu: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        # Python's own exit code, 1, means here that a problem was found.
        return 2
