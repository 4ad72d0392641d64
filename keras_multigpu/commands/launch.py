"""`keras-multigpu launch`: start the workers of a training, and end them together."""

import argparse
import os
import shlex
from collections.abc import Sequence
from typing import Any

from keras_multigpu.cluster.launcher import (
    WorkerCommand,
    in_address,
    launch,
    on_this_machine,
    variables_of_worker,
)
from keras_multigpu.cluster.this_machine import share_out, visible_gpus
from keras_multigpu.commands.usage import UsageError, at_least, check_script, usage_error
from keras_multigpu.processes import new_process

CONNECT_TIMEOUT = 20
"""Seconds that `ssh` waits for a machine to answer."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "launch",
        help="start the workers of one training, on this machine or on several",
        description="Start a script once for each worker, with TF_CONFIG set, and end all workers "
        "together. The exit code is 0 if all end well, otherwise that of the first that failed.",
        epilog="TensorFlow's workers trust anyone who reaches their ports, so use --hosts only in "
        "a network of your own.",
    )
    add = parser.add_argument
    whole = at_least(int, 1)
    add("--workers", type=whole, metavar="N", help="workers on this machine, or on each host")
    each = "GPUs of each worker (default: all, shared out)"
    add("--devices-per-worker", type=whole, metavar="N", help=each)
    add("--hosts", metavar="A,B", help="print what to run on each of these machines")
    add("--ssh", action="store_true", help="with --hosts: run it there")
    port = "with --hosts: the first worker's port (default: 23456)"
    add("--port", type=whole, metavar="N", help=port)
    fewest = "go on without workers that fail soon after they start, with at least N (default: all)"
    add("--min-workers", type=whole, metavar="N", help=fewest)
    again = "start all workers again if one fails, at most N times (default: 0)"
    add("--max-restarts", type=at_least(int, 0), default=0, metavar="N", help=again)
    grace = "how long a worker may take to end when it is told to (default: 10)"
    add("--grace", type=at_least(float, 0), default=10.0, metavar="S", help=grace)
    add("script", metavar="SCRIPT", help="the script to run")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    hosts = arguments.hosts.split(",") if arguments.hosts else []
    count = (len(hosts) or 1) * (arguments.workers or 1)
    check(arguments, count)
    script = new_process.script(arguments.script, *arguments.arguments)
    each = arguments.devices_per_worker

    # Each start takes other ports, since those of the last one may still be taken.
    def on_hosts(start: int, chosen: Sequence[int]) -> list[tuple[str, WorkerCommand]]:
        workers = arguments.workers or 1
        port = (arguments.port or 23456) + start * workers
        places = [divmod(place, workers) for place in chosen]
        addresses = [f"{in_address(hosts[host])}:{port + local}" for host, local in places]
        found = []
        for index, (host, local) in enumerate(places):
            variables = variables_of_worker(addresses, index)
            if each is not None:
                gpus = range(local * each, (local + 1) * each)
                variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
            found.append((hosts[host], WorkerCommand(script, variables)))
        return found

    def here(start: int, chosen: Sequence[int]) -> list[WorkerCommand]:
        variables = [gpus[place] for place in chosen]
        return on_this_machine([script] * len(chosen), variables)

    def by_ssh(start: int, chosen: Sequence[int]) -> list[WorkerCommand]:
        # The terminal (`-tt`) lets a worker end when its connection does. BatchMode fails where a
        # password would be needed.
        options = ["-tt", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT}"]
        return [
            WorkerCommand(["ssh", *options, host, shell_line(worker, PYTHONUNBUFFERED="1")], {})
            for host, worker in on_hosts(start, chosen)
        ]

    if hosts and not arguments.ssh:
        for host, worker in on_hosts(0, range(count)):
            print(f"# on {host}\n{shell_line(worker)}")
        return 0
    if not hosts:
        try:
            gpus = share_out(visible_gpus(), count, each)
        except ValueError as error:
            raise UsageError(str(error)) from error
        check_script(arguments.script)
    return launch(
        by_ssh if hosts else here,
        count,
        min_workers=arguments.min_workers,
        max_restarts=arguments.max_restarts,
        grace=arguments.grace,
    )


def shell_line(worker: WorkerCommand, **more: str) -> str:
    """A shell's command line that starts a worker in the folder of the same path as this one."""
    variables = {**worker.variables, **more}
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    line = " ".join(["env", *words, shlex.join(worker.command)])
    return f"cd {shlex.quote(os.getcwd())} && {line}"


def check(arguments: argparse.Namespace, count: int) -> None:
    if arguments.hosts:
        if not all(arguments.hosts.split(",")):
            raise usage_error(
                "`--hosts` is not a list of names.",
                "Expected names with commas between them, at which the workers reach each other.",
                "Write for example `--hosts node1,node2`.",
                hosts=arguments.hosts,
            )
        if (arguments.workers or 1) > 1 and not arguments.devices_per_worker:
            raise usage_error(
                "Several workers of a machine would use the same GPUs.",
                "Expected `--devices-per-worker` with several workers on a host.",
                "Say how many GPUs each has, or leave `--workers` out.",
                workers=arguments.workers,
            )
    elif arguments.ssh or arguments.port or not arguments.workers:
        raise usage_error(
            "It is not clear where to start workers.",
            "Expected `--workers`, or `--hosts`, which `--ssh` and `--port` belong to.",
            "Write for example `keras-multigpu launch --workers 2 train.py`.",
            workers=arguments.workers,
            hosts=arguments.hosts,
        )
    if arguments.min_workers and (arguments.min_workers > count or not arguments.max_restarts):
        raise usage_error(
            "`--min-workers` has no effect.",
            "Expected at most as many as there are workers, and `--max-restarts`.",
            "Write for example `--workers 4 --min-workers 3 --max-restarts 10`.",
            min_workers=arguments.min_workers,
            max_restarts=arguments.max_restarts,
        )
