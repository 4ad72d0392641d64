"""`keras-multigpu scoreboard`: what the GPUs of this machine show, as a table to send in."""

import argparse
import sys
from pathlib import Path
from typing import Any

from keras_multigpu import __version__
from keras_multigpu.commands.usage import at_least
from keras_multigpu.scoreboard.board import PARTS, fill

FILES = "scoreboard.md and scoreboard.json"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "scoreboard",
        help="check exactness, speed and memory on all GPUs; a table to send in",
        description="Check small trainings on all GPUs against one, measure steps, memory and "
        f"overlap beside stock Keras, and write {FILES}. One GPU is taken for two; without GPUs "
        "everything is tiny, on CPU devices. The exit code is 1 if something is not as expected.",
    )
    within = "seconds for everything; what does not fit is skipped (default: 570)"
    parser.add_argument("--within", type=at_least(float, 0), default=570, help=within)
    some = f"some of the parts: {', '.join(PARTS)}"
    only = {"choices": PARTS, "default": [*PARTS], "metavar": "PART"}
    parser.add_argument("--only", nargs="+", **only, help=some)
    where = f"for {FILES} (default: this one)"
    parser.add_argument("--folder", type=Path, default=Path(), help=where)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    bad = []
    filled = fill(arguments.only, arguments.folder, arguments.within, __version__)
    for part, rows in filled:
        print(f"{part}: {len(rows)} figures", file=sys.stderr, flush=True)
        bad += [f"{part}: {row['name']}" for row in rows if row["ok"] is False]
    print((arguments.folder / "scoreboard.md").read_text(encoding="utf-8"))
    print(f"Not as expected: {'; '.join(bad)}" if bad else "All that can be judged is as expected.")
    print(f"Please send in {FILES}: docs/gpus.md says how.")
    return int(bool(bad))
