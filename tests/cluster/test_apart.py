"""Processes that a launcher started without a cluster: the first one warns, once."""

import logging

import pytest

import keras_multigpu as kmg
from keras_multigpu.cluster import apart

TORCH = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
BATCH = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "2"}

# The variables that each launcher sets, according to its manual.
WARNED = {
    "torchrun": (TORCH, "Torchrun, or what sets its variables, has started 4 processes, each"),
    "Open MPI": (
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        "Open MPI has started 2 processes",
    ),
    "MPICH": ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPI has started 2 processes"),
    "MVAPICH": ({"MV2_COMM_WORLD_RANK": "0", "MV2_COMM_WORLD_SIZE": "8"}, "MVAPICH has started 8"),
    "Indexed Job": (
        {"JOB_COMPLETION_INDEX": "0"},
        "An Indexed Job or a JobSet has started several processes",
    ),
    "JobSet of torchrun": (TORCH | {"JOB_COMPLETION_INDEX": "0"}, "Torchrun"),
    "sbatch": (BATCH, "SLURM has reserved several tasks or nodes, and this process trains alone."),
    "mpirun in sbatch": (
        BATCH | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
        "Open MPI",
    ),
}

SILENT = {
    "alone": {},
    "another rank": TORCH | {"RANK": "1"},
    "a world of one": TORCH | {"WORLD_SIZE": "1"},
    "a variable of that name": {"RANK": "0", "WORLD_SIZE": "4"},
    "one task": BATCH | {"SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1"},
    "a task of srun": BATCH | {"SLURM_STEP_NODELIST": "n1", "SLURM_STEP_ID": "0"},
    "another pod": {"JOB_COMPLETION_INDEX": "2"},
}


@pytest.fixture(autouse=True)
def nothing_said():
    apart.warn_once.cache_clear()


def said(variables, caplog):
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        for _ in range(3):
            apart.warn_if_apart(variables)
    return caplog.messages


@pytest.mark.parametrize(("variables", "what"), WARNED.values(), ids=WARNED)
def test_processes_that_train_apart_warn_about_their_launcher(variables, what, caplog):
    (message,) = said(variables, caplog)
    assert message.startswith(what)
    assert " Expected " in message


@pytest.mark.parametrize("variables", SILENT.values(), ids=SILENT)
def test_other_processes_do_not_warn(variables, caplog):
    assert said(variables, caplog) == []


def test_a_strategy_of_all_devices_warns(monkeypatch, caplog):
    """A strategy of chosen devices does not."""
    for name, value in TORCH.items():
        monkeypatch.setenv(name, value)
    kmg.strategy(devices=1)
    assert caplog.messages == []
    kmg.strategy()
    assert "has started 4 processes" in caplog.text
