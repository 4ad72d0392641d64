"""Random training steps give the same results on replicas that sum as GPUs do as on one device.

`make test` tries a few; `KMG_PROGRAMS=1000` tries 1000.
"""

import os

import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import ALL_REPLICAS
from helpers.cpu_replicas import replicas_of
from random_programs import WIDTH, Program
from simulated_replicas import Simulation

from keras_multigpu.training.replica_group import ReplicaGroup

COUNT = int(os.environ.get("KMG_PROGRAMS", "12" if ALL_REPLICAS else "4"))
FIRST = int(os.environ.get("KMG_FIRST_PROGRAM", "0"))
SHARES = ([3, 2, 1], [2, 0, 3])


def tried(seed, shards=False):
    """Run a program; returns its largest relative difference from one device."""
    program = Program(seed)
    spec = tf.TensorSpec([None, WIDTH], tf.float64)
    try:
        group = ReplicaGroup(replicas_of(3))
        simulation = Simulation(program.step, [spec], 3, program.variables, group, shards)
    except Exception as error:
        error.add_note(repr(program))
        raise
    draws = np.random.default_rng(seed)
    start = [variable.numpy() for variable in program.variables]
    worst = 0.0
    for counts in SHARES:
        x = draws.normal(size=(sum(counts), WIDTH))
        for variable, value in zip(program.variables, start, strict=True):
            variable.assign(value)
        expected = [np.asarray(each) for each in simulation.whole(tf.constant(x))]
        expected += [variable.numpy() for variable in program.variables]
        for variable, value in zip(program.variables, start, strict=True):
            variable.assign(value)
        found = simulation(counts, x) + [variable.numpy() for variable in program.variables]
        for one, other in zip(expected, found, strict=True):
            assert one.shape == other.shape, program
            scale = max(np.abs(one).max(initial=0.0), 1e-3)
            near = np.isclose(one, other, rtol=0.0, atol=1e-7 * scale, equal_nan=True)
            assert near.all(), program
            worst = max(worst, np.nanmax(np.abs(one - other), initial=0.0) / scale)
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(FIRST, FIRST + COUNT))
@pytest.mark.parametrize("shards", [False, True])
def test_a_random_program_ends_as_on_one_device(seed, shards):
    """Results and variables, with uneven and empty shares; also if variables are in parts."""
    tried(seed, shards)
