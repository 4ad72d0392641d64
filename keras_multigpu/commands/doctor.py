"""`keras-multigpu doctor`: find what is wrong with this machine before a training does.

Each check runs in a child process, which prints a line of JSON; only they import TensorFlow. So
whatever hangs, crashes or cannot be imported is reported like any other problem.
"""

import argparse
import json
import os
import platform
import re
import resource
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from keras_multigpu import __version__
from keras_multigpu.commands import doctor_checks as checks
from keras_multigpu.commands.doctor_checks import NCCL, Answer
from keras_multigpu.commands.usage import at_least, in_lines
from keras_multigpu.processes import new_process
from keras_multigpu.processes.groups import ending

DRIVER = "Run `nvidia-smi`. If it hangs too, see `dmesg` for the driver, and restart the checks."
DISK = "The file system does not respond: see `mount` and `dmesg`, or choose another `--folder`."
SLOW = "Try `python -c 'import tensorflow'`. With a slow disk allow more time: `--limit 900`."

CHECKS: dict[str, tuple[Callable[[argparse.Namespace], Answer], str]] = {
    "folder": (checks.folder, DISK),
    "cluster": (checks.cluster, "Check that host names resolve: `getent hosts NAME`."),
    "tensorflow": (checks.tensorflow, SLOW),
    "gpus": (checks.gpus, DRIVER),
    "step": (checks.step, NCCL),
}
"""Each check, and what to do if it does not answer."""

WITH_TENSORFLOW = {"tensorflow", "gpus", "step"}

START = '{"check"'
"""How the line of JSON begins."""

SHOWN = re.compile("(TF|KERAS|CUDA|NCCL|XLA|NVIDIA|OMP|SLURM)_|LD_LIBRARY_PATH$")
"""The environment variables that `--json` shows."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="look for what is wrong with this machine",
        description="Check devices, a folder, the other workers and a small training. Nothing is "
        "changed, and no cluster is joined. The exit code is 1 if something is wrong, 2 if the "
        "checks could not be run.",
    )
    add = parser.add_argument
    some = f"some of the checks: {', '.join(CHECKS)}"
    add("--only", nargs="+", choices=CHECKS, default=[*CHECKS], metavar="CHECK", help=some)
    add("--json", action="store_true", help="print JSON, for an issue")
    add("--folder", default=".", help="where a training would write (default: this folder)")
    limit = "seconds that a check may take (default: 300)"
    add("--limit", type=at_least(float, 1), default=300.0, metavar="S", help=limit)
    add("--child", help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.child:
        answer(argparse.Namespace(**json.loads(arguments.child)))
        return 0
    names, answers = {*arguments.only}, list[dict[str, Any]]()
    if names & WITH_TENSORFLOW:
        names.add("tensorflow")
    for name in CHECKS:
        if name not in names:
            continue
        found = answer_of_child(name, arguments)
        answers.append(found)
        if not arguments.json:
            start = f"{name:<12}{found['verdict']:<6}"
            print(in_lines(start, found["says"], found["do"]), flush=True)
        if name == "tensorflow" and found["verdict"] == "wrong":
            names -= WITH_TENSORFLOW
    if arguments.json:
        variables = {name: os.environ[name] for name in sorted(os.environ) if SHOWN.match(name)}
        facts = {"keras_multigpu": __version__, "platform": platform.platform()}
        print(json.dumps({**facts, "variables": variables, "checks": answers}, indent=1))
    return int(any(each["verdict"] == "wrong" for each in answers))


def answer_of_child(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """The answer of a process, or why it has none."""
    request = json.dumps({"check": name, "folder": arguments.folder})
    # It finds the same packages. When aborted it prints where it was, and leaves no core file.
    path = new_process.environment()["PYTHONPATH"]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    process = subprocess.Popen(
        new_process.command("keras_multigpu", "doctor", "--child", request),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        process_group=0,
    )
    what, output = "", b""
    # A process that waits for a dead disk or driver outlives even SIGKILL.
    for wait, number in ((arguments.limit, signal.SIGABRT), (5, signal.SIGKILL), (5, 0)):
        try:
            output = process.communicate(timeout=wait)[0]
            break
        except subprocess.TimeoutExpired as late:
            output, what = late.output or b"", f"no answer within {arguments.limit:g} s"
            os.killpg(process.pid, number)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    lines = [line for line in output.decode(errors="replace").splitlines() if line.strip()]
    if lines and lines[-1].startswith(START):
        found: dict[str, Any] = json.loads(lines[-1])
        return found
    ended = f"the process ended with {ending(process.returncode)}"
    return as_json(name, Answer("wrong", what or ended, CHECKS[name][1]), lines)


def as_json(name: str, found: Answer, output: Sequence[str] = ()) -> dict[str, Any]:
    return {"check": name, **found._asdict(), **({"output": output[-30:]} if output else {})}


def answer(arguments: argparse.Namespace) -> None:
    """Run a check in the child process, and print its answer as a line of JSON."""
    name = arguments.check
    if name in WITH_TENSORFLOW:  # No cluster is joined.
        for variable in new_process.OF_A_CLUSTER & os.environ.keys():
            del os.environ[variable]
    began, output = time.monotonic(), []
    try:
        found = CHECKS[name][0](arguments)
    except Exception as error:  # A broken machine may raise anything.
        found = Answer("wrong", f"{type(error).__name__}: {error}", CHECKS[name][1])
        if ". Expected " in str(error):
            found = checks.in_three_parts("wrong", str(error))
        output = traceback.format_exc().splitlines()
    line = {**as_json(name, found, output), "seconds": round(time.monotonic() - began, 2)}
    print("\n" + json.dumps(line), flush=True)
    # A device that hangs would hang again during the shutdown.
    os._exit(0)
