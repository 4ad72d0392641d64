"""The commands of `keras-multigpu`, one per file, thin over the library.

Keras and TensorFlow are imported inside the functions, so that `--help` answers at once.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from keras_multigpu.commands import check_images, demo, launch, plan, verify
from keras_multigpu.commands.usage import UsageError

COMMANDS = (demo, verify, launch, plan, check_images)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: The words after `keras-multigpu`; by default those of the command line.

    Returns:
        The exit code: 0 for success, 1 where the command has found a problem in what it was
        asked to check, 2 where it could not do its work.
    """
    # TensorFlow's start-up messages would bury what a command has to say.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    parser = argparse.ArgumentParser(
        prog="keras-multigpu",
        description="Train Keras models on several GPUs and get the same numbers as on one.",
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    arguments = parser.parse_args(argv)
    try:
        return arguments.run(arguments)
    except UsageError as error:
        print(f"keras-multigpu: {error}", file=sys.stderr)
        return 2
