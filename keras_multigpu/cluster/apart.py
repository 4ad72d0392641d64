"""Warns when several processes each train alone.

Either another launcher has started them, which, unlike TF_CONFIG and `srun`, does not say where all
processes are. Or they have joined, and the script has asked for nothing that trains together.
"""

import functools
import logging
import os
import threading
from collections.abc import Mapping

from keras_multigpu.checks import problem

logger = logging.getLogger("keras_multigpu")

# What sets the variables; the variable with a process's number; the one with the number of
# processes and one that has to be set too, empty if there is none.
LAUNCHERS = (
    ("Torchrun, or what sets its variables,", "RANK", "WORLD_SIZE", "MASTER_ADDR"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ""),
    ("MVAPICH", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ""),
    ("MPI", "PMI_RANK", "PMI_SIZE", ""),
    ("An Indexed Job or a JobSet", "JOB_COMPLETION_INDEX", "", ""),
)


def warn_if_apart(variables: Mapping[str, str] = os.environ) -> None:
    """Warn once, in the first of several processes that each train alone."""
    if what := training_apart(variables):
        warn_once(what)


def warn_of_devices(names: tuple[str, ...]) -> None:
    """Warn once that one of several workers has devices of its own, and so trains alone."""
    warn_once(
        problem(
            "`devices` was given in one of several workers, which then trains alone on them.",
            "Expected no `devices`: the environment says which workers train together, on all "
            "their devices.",
            "Leave `devices` out. `keras-multigpu launch --devices-per-worker 2` splits the CPU "
            "of each worker.",
            devices=names,
        )
    )


_train_together = threading.Event()


def note_use() -> None:
    """Note that the script has asked for something that all workers train together."""
    _train_together.set()


def warn_if_unused(workers: int, index: int) -> None:
    """At the end of a script, warn on the chief that the workers had nothing to do together."""
    if not _train_together.is_set() and not index:
        warn_once(
            problem(
                f"{workers} workers have joined, but no model was distributed: each worker has "
                "trained on its own.",
                "Expected `kmg.distribute`, or a step under `kmg.strategy()`.",
                "Write `model = kmg.distribute(model)` before `compile`, or start one process.",
                workers=workers,
            )
        )


@functools.cache
def warn_once(what: str) -> None:
    logger.warning("%s", what)


def training_apart(variables: Mapping[str, str] = os.environ) -> str:
    """The warning, if this is the first of several processes that each train alone."""
    # Launchers may be nested, as in a JobSet that runs `torchrun`. The first one counts.
    for name, rank, size, also in LAUNCHERS:
        count = variables.get(size, "")
        is_first = variables.get(rank) == "0" and (not also or also in variables)
        if is_first and (not size or (count.isdecimal() and count != "1")):
            instead = "Start them with `keras-multigpu launch` or `srun` instead, or set TF_CONFIG"
            if not size:
                instead = "Set TF_CONFIG in the manifest, since an Indexed Job names its pods"
            return problem(
                f"{name} has started {count or 'several'} processes, each of which trains alone, "
                "on all data and on all devices that it sees.",
                "Expected TF_CONFIG, or the variables of `srun`, by which processes find each "
                "other.",
                f"{instead}. To train alone on purpose, choose the devices of each process: "
                "`kmg.strategy(devices=...)`.",
                **{each: variables[each] for each in (rank, size) if each},
            )
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
