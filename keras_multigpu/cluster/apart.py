"""Processes that another launcher has started and that train apart: the first one warns of it.

Unlike TF_CONFIG and those of `srun`, their variables do not say where all of them are.
"""

import functools
import logging
import os
from collections.abc import Mapping
from typing import NamedTuple

from keras_multigpu.checks import problem

logger = logging.getLogger("keras_multigpu")


class Launcher(NamedTuple):
    """What starts processes.

    Attributes:
        name: Its name.
        rank: The variable with the number of a process.
        size: That with how many there are; empty where none says so.
        also: Another one that has to be there.
        instead: What to do.
    """

    name: str
    rank: str
    size: str
    also: str
    instead: str


LAUNCH = "Start them with `keras-multigpu launch` or `srun` in its place, or set TF_CONFIG"
POD = "Set TF_CONFIG in the manifest: the pods of an Indexed Job have predictable names"

LAUNCHERS = (
    Launcher("torchrun, or what sets its variables,", "RANK", "WORLD_SIZE", "MASTER_ADDR", LAUNCH),
    Launcher("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "", LAUNCH),
    Launcher("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "", LAUNCH),
    Launcher("MPI", "PMI_RANK", "PMI_SIZE", "", LAUNCH),
    Launcher("an Indexed Job or a JobSet", "JOB_COMPLETION_INDEX", "", "", POD),
)


def warn(variables: Mapping[str, str] = os.environ) -> None:
    """Say once, in the first process, that each of several trains alone, if that is so."""
    if what := found(variables):
        say_once(what)


def found(variables: Mapping[str, str] = os.environ) -> str:
    """The sentence of `warn`, or nothing."""
    # Launchers may be nested, as in a JobSet that runs `torchrun`.
    sentences = [what for each in LAUNCHERS if (what := of_launcher(each, variables))]
    return next(iter(sentences), without_srun(variables))


def of_launcher(launcher: Launcher, variables: Mapping[str, str]) -> str:
    """A sentence where this is the first of several processes of a launcher."""
    name, rank, size, also, instead = launcher
    if variables.get(rank) != "0" or (also and also not in variables):
        return ""
    count = variables.get(size, "")
    if size and (not count.isdecimal() or count == "1"):
        return ""
    return problem(
        f"{name[0].upper()}{name[1:]} has started {count or 'several'} processes, of which each "
        f"trains alone, on all data and on all devices that it sees.",
        "Expected TF_CONFIG, or the variables of `srun`, by which processes find each other.",
        f"{instead}. Where each is to train alone, choose its devices: "
        "`kmg.strategy(devices=...)`.",
        **{each: variables[each] for each in (rank, size) if each},
    )


def without_srun(variables: Mapping[str, str]) -> str:
    """A sentence where a batch script of SLURM has several tasks, and runs Python by itself."""
    in_step = {"SLURM_STEP_NODELIST", "SLURM_STEP_ID"} & variables.keys()
    counts = {name: variables.get(name, "1") for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES")}
    if in_step or "SLURM_JOB_ID" not in variables or set(counts.values()) == {"1"}:
        return ""
    return problem(
        "SLURM has reserved several tasks or nodes, and this process trains alone.",
        "Expected `srun`, which starts a process for each task.",
        "Write `srun python train.py` in the batch script, or reserve one task.",
        **counts,
    )


@functools.cache
def say_once(what: str) -> None:
    logger.warning("%s", what)
