"""`keras-multigpu launch`: start the workers of a training, and end them together."""

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from keras_multigpu.cluster import this_machine, worker_commands
from keras_multigpu.cluster.launcher import launch
from keras_multigpu.cluster.this_machine import LOOPBACK
from keras_multigpu.cluster.worker_commands import WorkerCommand
from keras_multigpu.commands.usage import UsageError, at_least, usage_error
from keras_multigpu.processes import new_process


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "launch",
        help="start the workers of one training, on this machine or on several",
        description="Start a script once for each worker, with TF_CONFIG set, and end all workers "
        "together. The exit code is 0 if all end well, otherwise that of the first that failed.",
        epilog="TensorFlow's workers trust anyone who reaches their ports, so use a wider "
        "--address or --hosts in a network of your own only.",
    )
    add = parser.add_argument
    whole, seconds = at_least(int, 1), at_least(float, 0)
    add("--workers", type=whole, metavar="N", help="workers on this machine, or on each host")
    each = "GPUs of each worker (default: all, shared out)"
    add("--devices-per-worker", type=whole, metavar="N", help=each)
    add("--address", metavar="HOST", help=f"where workers listen (default: {LOOPBACK})")
    add("--hosts", metavar="A,B", help="print what to run on each of these machines")
    add("--ssh", action="store_true", help="with --hosts: run it there")
    port = "with --hosts: the first worker's port (default: 23456)"
    add("--port", type=whole, metavar="N", help=port)
    fewest = "go on without workers that fail soon after they start, with at least N (default: all)"
    add("--min-workers", type=whole, metavar="N", help=fewest)
    again = "start all workers again if one fails, at most this often (default: 0)"
    add("--max-restarts", type=at_least(int, 0), default=0, metavar="N", help=again)
    hung = "treat the workers as hung if none writes a line for S seconds (default: never)"
    add("--max-silence", type=seconds, metavar="S", help=hung)
    grace = "how long a worker may take to end when it is told to (default: 10)"
    add("--grace", type=seconds, default=10.0, metavar="S", help=grace)
    add("script", metavar="SCRIPT", help="the script to run")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="its arguments")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    check(arguments)
    try:
        if not arguments.hosts:
            return watched(arguments, local_workers(arguments))
        if arguments.ssh:
            return watched(
                arguments,
                lambda start, places: [
                    worker_commands.by_ssh(*pair) for pair in host_workers(arguments, start, places)
                ],
            )
    except ValueError as error:
        raise UsageError(str(error)) from error
    for host, worker in host_workers(arguments):
        print(f"# on {host}\n{worker_commands.shell_line(worker)}")
    return 0


def watched(
    arguments: argparse.Namespace, commands: Callable[[int, Sequence[int]], list[WorkerCommand]]
) -> int:
    return launch(
        commands,
        worker_count(arguments),
        min_workers=arguments.min_workers,
        max_restarts=arguments.max_restarts,
        max_silence=arguments.max_silence,
        grace=arguments.grace,
    )


def worker_count(arguments: argparse.Namespace) -> int:
    hosts = arguments.hosts.split(",") if arguments.hosts else [LOOPBACK]
    return len(hosts) * (arguments.workers or 1)


def local_workers(
    arguments: argparse.Namespace,
) -> Callable[[int, Sequence[int]], list[WorkerCommand]]:
    """What starts workers of this machine; each time on other ports."""
    script = [arguments.script, *arguments.arguments]
    variables = this_machine.shared_out(
        this_machine.visible_gpus(), arguments.workers, arguments.devices_per_worker
    )
    address = arguments.address or LOOPBACK
    return lambda start, places: worker_commands.on_this_machine(
        [new_process.script(*script)] * len(places),
        address,
        [variables[place] for place in places],
    )


def host_workers(
    arguments: argparse.Namespace, start: int = 0, places: Sequence[int] | None = None
) -> list[tuple[str, WorkerCommand]]:
    """What starts workers of several machines; each time on other ports."""
    script = [arguments.script, *arguments.arguments]
    each = arguments.workers or 1
    # The ports of the last start may still be taken.
    port = (arguments.port or 23456) + start * each
    hosts = arguments.hosts.split(",")
    devices = arguments.devices_per_worker
    return worker_commands.on_hosts(script, hosts, each, devices, port, places)


def check(arguments: argparse.Namespace) -> None:
    if arguments.hosts:
        if not all(arguments.hosts.split(",")) or arguments.address:
            raise usage_error(
                "`--hosts` is not a list of names, or `--address` was given too.",
                "Expected names with commas between them, at which the workers reach each other.",
                "Write for example `--hosts node1,node2`, without `--address`.",
                hosts=arguments.hosts,
                address=arguments.address,
            )
        if (arguments.workers or 1) > 1 and not arguments.devices_per_worker:
            raise usage_error(
                "Several workers of a machine would use the same GPUs.",
                "Expected `--devices-per-worker` where there are hosts with several workers.",
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
    if arguments.min_workers and (
        arguments.min_workers > worker_count(arguments) or not arguments.max_restarts
    ):
        raise usage_error(
            "`--min-workers` has no effect.",
            "Expected at most as many as there are workers, and `--max-restarts`.",
            "Write for example `--workers 4 --min-workers 3 --max-restarts 10`.",
            min_workers=arguments.min_workers,
            max_restarts=arguments.max_restarts,
        )
