"""`keras-multigpu rehearse`: a training script in a minute, and what would fail later."""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from keras_multigpu.cluster.managers import find_cluster
from keras_multigpu.cluster.this_machine import share_out, visible_gpus
from keras_multigpu.commands.usage import (
    UsageError,
    at_least,
    check_script_or_module,
    in_lines,
    usage_error,
)
from keras_multigpu.rehearsal.findings import Notes
from keras_multigpu.rehearsal.rehearse import rehearse


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "rehearse",
        help="run a training script in a minute, to see what would fail later",
        description="Run a script with two steps of each `fit`, a kill and a second start, and say "
        "what a real run would have failed of. Whatever it writes goes to a temporary folder. The "
        "exit code is 1 if something would fail.",
    )
    add = parser.add_argument
    add("--workers", type=at_least(int, 1), metavar="N", help="workers on this machine")
    folder = "where to write, and to leave it (default: a temporary folder)"
    add("--folder", metavar="F", help=folder)
    add("script", metavar="SCRIPT", help="the script, or the module, to run")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    variables: list[dict[str, str]] = [{}]
    if arguments.workers:
        try:
            variables = share_out(visible_gpus(), arguments.workers, None)
        except ValueError as error:
            raise UsageError(str(error)) from error
    script = arguments.script
    check_script_or_module(script)
    cluster = None if arguments.workers else find_cluster()
    if cluster and not arguments.folder:
        raise usage_error(
            "This is one of several workers.",
            "Expected `--folder`, or `KMG_REHEARSE`, to name an empty folder that all share.",
            "Write for example `KMG_REHEARSE=/shared/rehearsal` in front of your launcher.",
            workers=len(cluster[1].workers),
        )
    with tempfile.TemporaryDirectory(prefix="rehearsal_") as temporary:
        folder = Path(arguments.folder or temporary).resolve()
        found = rehearse(folder, [script, *arguments.arguments], variables)
        if isinstance(found, int):
            return found
        if not (cluster and cluster[1].index):
            print()
            for each in found:
                start = f"{each.where:<9}{each.check:<17}{each.verdict:<8}"
                print(in_lines(start, each.says, each.do))
        if Notes(folder).read("unguarded"):
            print("This system has no Landlock: what C++ and other programs wrote was not watched.")
    return int(any(each.verdict == "fails" for each in found))
