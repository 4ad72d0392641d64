"""What starts each worker: on this machine, or by hand or by ssh on others."""

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from keras_multigpu.cluster.this_machine import free_ports
from keras_multigpu.processes import new_process

CONNECT_TIMEOUT = 20
"""Seconds after which a machine does not answer."""


class WorkerCommand(NamedTuple):
    """What starts a worker, with the variables that its environment has besides the launcher's."""

    command: list[str]
    variables: dict[str, str]


def on_this_machine(
    commands: Sequence[list[str]], address: str, gpus: Sequence[Mapping[str, str]]
) -> list[WorkerCommand]:
    """Workers on this machine, on free ports, each with the variables that show it its GPUs."""
    ports = free_ports(len(gpus), address)
    workers = tuple(f"{in_address(address)}:{port}" for port in ports)
    return [
        WorkerCommand(command, {**variables, **tf_config(workers, index)})
        for index, (command, variables) in enumerate(zip(commands, gpus, strict=True))
    ]


def on_hosts(
    script: Sequence[str],
    hosts: Sequence[str],
    each: int,
    devices: int | None,
    port: int,
    chosen: Sequence[int] | None = None,
) -> list[tuple[str, WorkerCommand]]:
    """Workers on several machines: for each its host and what starts it there.

    Workers of a host have `devices` GPUs each, if that is said, and ports from `port` on. Of all
    workers only some may be `chosen`.
    """
    places = [(host, local) for host in hosts for local in range(each)]
    places = places if chosen is None else [places[place] for place in chosen]
    workers = tuple(f"{in_address(host)}:{port + local}" for host, local in places)
    found = []
    for index, (host, local) in enumerate(places):
        variables = tf_config(workers, index)
        if devices is not None:
            gpus = range(local * devices, (local + 1) * devices)
            variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
        found.append((host, WorkerCommand(new_process.script(*script), variables)))
    return found


def by_ssh(host: str, worker: WorkerCommand) -> WorkerCommand:
    """The same worker, started from here on another machine, in the folder of this name."""
    # The terminal (`-tt`) makes sure that it ends when the connection does.
    # BatchMode: fail where a password is needed, which could not be entered.
    options = ["-tt", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_TIMEOUT}"]
    ssh = ["ssh", *options, host, shell_line(worker, PYTHONUNBUFFERED="1")]
    return WorkerCommand(ssh, {})


def shell_line(worker: WorkerCommand, **more: str) -> str:
    """A line for a shell that starts a worker in the folder of this name."""
    variables = {**worker.variables, **more}
    words = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    line = " ".join(["env", *words, shlex.join(worker.command)])
    return f"cd {shlex.quote(os.getcwd())} && {line}"


def tf_config(workers: tuple[str, ...], index: int) -> dict[str, str]:
    task = {"type": "worker", "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": {"worker": workers}, "task": task})}


def in_address(host: str) -> str:
    return f"[{host}]" if ":" in host else host
