"""SLURM's variables -> `Cluster`: the tasks of one `srun`, in SLURM's order.

`srun --nodes 2 --ntasks-per-node 4 python train.py` starts eight processes, each with variables
for the names of the nodes, the number of tasks on each node, and the number of its own task. Laid
out by block, task 1 is on the first node; cyclically, it is on the second.

TensorFlow's `SlurmClusterResolver` puts task 1 on the first node in both cases, gives all jobs port
8888, and rejects nodes without `nvidia-smi` and names such as `n[1-2].site.org`.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence

from keras_multigpu.checks import value_error
from keras_multigpu.cluster import this_machine
from keras_multigpu.cluster.environment import Cluster, place_of
from keras_multigpu.cluster.this_machine import PORTS
from keras_multigpu.processes import new_process

PORTS_OF_STEP = 16
"""How many ports of a node each step has to itself."""

STEPS = 7
"""How many steps of a job have ports to themselves."""


def cluster(variables: Mapping[str, str] = os.environ) -> Cluster | None:
    """The tasks that `srun` started together with this process; None outside `srun`."""
    # A batch script without `srun` has SLURM_NTASKS and SLURM_PROCID too, but is a single process,
    # which would wait forever for others.
    if not {"SLURM_PROCID", "SLURM_STEP_NODELIST"} <= variables.keys():
        return None
    hosts = host_names(variables["SLURM_STEP_NODELIST"])
    counts = tasks_of_nodes(variables, len(hosts))
    nodes = node_of_each_task(counts, plane_size(variables, max(counts)))
    index = number(variables, "SLURM_PROCID")
    if index >= len(nodes):
        raise slurm_error(f"there are {len(nodes)} tasks", "SLURM_PROCID", variables)
    if number(variables, "SLURM_NODEID", nodes[index]) != nodes[index]:
        what = f"task {index} was expected on node {nodes[index]}"
        raise slurm_error(what, "SLURM_NODEID", variables)
    # Other ports for other jobs and steps that may share a node.
    steps = number(variables, "SLURM_JOB_ID") * STEPS + number(variables, "SLURM_STEP_ID", 0)
    first = PORTS[steps * PORTS_OF_STEP % len(PORTS)]
    workers = [
        f"{hosts[node]}:{first + nodes[:task].count(node)}" for task, node in enumerate(nodes)
    ]
    return Cluster(tuple(workers), index)


def own_gpus(cluster: Cluster, variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The variable that limits this task to its share of a node's GPUs, unless SLURM does."""
    # With these SLURM itself sets CUDA_VISIBLE_DEVICES for each task.
    if {"SLURM_GPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_GPU_BIND"} & variables.keys():
        return {}
    hosts = [place_of(address)[0] for address in cluster.workers]
    own = hosts[cluster.index]
    shares = this_machine.share_out(this_machine.visible_gpus(), hosts.count(own), None)
    return shares[hosts[: cluster.index].count(own)]


def tasks_of_nodes(variables: Mapping[str, str], nodes: int) -> list[int]:
    """How many tasks each node has: `[2, 2, 2, 1]` for `2(x3),1`."""
    name = "SLURM_STEP_TASKS_PER_NODE"
    if name not in variables:
        name = "SLURM_TASKS_PER_NODE"
    counts = []
    for part in variables.get(name, "").split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise slurm_error("it is not of the form `2(x3),1`", name, variables)
        counts += [int(match[1])] * int(match[2] or 1)
    if len(counts) != nodes:
        what = f"it lists {len(counts)} nodes, and SLURM_STEP_NODELIST lists {nodes}"
        raise slurm_error(what, name, variables)
    return counts


def plane_size(variables: Mapping[str, str], most: int) -> int:
    """How many consecutive tasks a node is given before the next node's turn; `most` for all."""
    # After a colon comes the order inside a node: "block:cyclic".
    match re.split("[:,]", variables.get("SLURM_DISTRIBUTION", ""))[0]:
        case "" | "*" | "block" | "unknown":
            return most
        case "cyclic":
            return 1
        case "plane":
            return number(variables, "SLURM_DIST_PLANESIZE")
    what = "the order of the tasks does not follow from it"
    raise slurm_error(what, "SLURM_DISTRIBUTION", variables)


def node_of_each_task(counts: Sequence[int], plane: int) -> list[int]:
    tasks = [
        (task // plane, node, task) for node, count in enumerate(counts) for task in range(count)
    ]
    return [node for _, node, _ in sorted(tasks)]


def host_names(nodes: str) -> list[str]:
    """Expand a list of nodes such as `gpu[1-3,07],login`, by `scontrol` if it is installed."""
    if shutil.which("scontrol"):
        # Without an answer, the names follow from the list itself.
        with contextlib.suppress(TimeoutError):
            if shown := new_process.answer("scontrol", "show", "hostnames", nodes).split():
                return shown
    # Split at commas outside brackets.
    words = re.split(r",(?![^\[]*\])", nodes)
    try:
        if not all(words):
            raise ValueError("A name is empty.")
        return [name for word in words for name in expand(word)]
    except ValueError as error:
        name, what = "SLURM_STEP_NODELIST", "it is not a list of nodes such as `gpu[1-3,07],login`"
        raise slurm_error(what, name, {name: nodes}) from error


def expand(word: str) -> list[str]:
    """`["n08", "n09", "n10"]` for `n[08-10]`; there may be several brackets."""
    match = re.fullmatch(r"([^\[\]\s]*)(?:\[([\d,-]+)\](.*))?", word)
    if match is None:
        raise ValueError(word)
    before, ranges, after = match.groups()
    if ranges is None:
        return [before]
    digits = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers:
            raise ValueError(part)
        digits += [f"{each:0{len(first)}d}" for each in numbers]
    return [f"{before}{number}{tail}" for number in digits for tail in expand(after)]


def number(variables: Mapping[str, str], name: str, missing: int | None = None) -> int:
    text = variables.get(name, "" if missing is None else str(missing))
    if not re.fullmatch("[0-9]{1,18}", text):
        raise slurm_error("it is not a whole number", name, variables)
    return int(text)


def slurm_error(what: str, name: str, variables: Mapping[str, str]) -> ValueError:
    return value_error(
        f"SLURM's variable {name} cannot be used: {what}.",
        "Expected the variables that `srun` sets for each task, with tasks laid out by block, "
        "cyclic or in planes.",
        "Start the script with `srun`, and pass on its variables; or set TF_CONFIG, which "
        "comes first.",
        **{name: variables.get(name)},
    )
