"""Parameter servers and workers in real processes: synchronous as one device, or asynchronous."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import parameter_servers
import pytest
from exactness.cases import CASES
from exactness.runs import alone, difference, run
from helpers.processes_left import PATIENCE
from worker_processes import Workers, free_ports

import keras_multigpu as kmg


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """The results of the synchronous trainings, and what happened in the others."""
    folder = tmp_path_factory.mktemp("servers")
    of_each = parameter_servers.environments(free_ports(5))
    script = Path(parameter_servers.__file__)
    with Workers(script, 3, (folder,), of_each=of_each) as processes:
        # The chief ends by itself after several trainings; the others have been killed before, or
        # serve without end.
        processes.processes[0].join(4 * PATIENCE)
        ended, output = [each.exitcode for each in processes.processes], processes.output(0)
    found = re.search(r"^result (.*)$", output, re.MULTILINE)
    assert ended == [0, -9, -9] and found, output
    loaded = {}
    for file in folder.glob("*.npz"):
        with np.load(file) as numbers:
            loaded[file.stem] = dict(numbers)
    return loaded, json.loads(found[1]), output


def assert_equal(found, expected, tolerance=2e-5):
    assert found.keys() == expected.keys()
    apart = {name: difference(value, found[name]) for name, value in expected.items()}
    assert not {name: each for name, each in apart.items() if each > tolerance}


@pytest.mark.slow
def test_synchronous_workers_end_where_one_device_does(left_behind):
    """Even if workers have no example of the last batch, and one is killed."""
    model, x, y = parameter_servers.model_and_data()
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_equal(left_behind[0]["killed"], parameter_servers.numbers(model, history, x))


@pytest.mark.slow
def test_moments_of_all_rows_are_those_of_one_device(left_behind):
    (case,) = (case for case in CASES if case.name == parameter_servers.ROW)
    assert_equal(left_behind[0]["row"], run(case, alone).numbers, case.tolerance)


@pytest.mark.slow
def test_callbacks_see_the_steps_of_workers(left_behind):
    """A guard skips a batch, and metrics of each replica are measured."""
    expected, found = parameter_servers.guarded(rows=np.r_[0:8, 16:24]), left_behind[0]["guarded"]
    assert_equal({name: found[name] for name in expected}, expected)
    assert found["log skipped_steps"] == 1 and found["log replica_0/examples_per_second"] > 0


@pytest.mark.slow
def test_the_chief_computes_what_workers_cannot(left_behind):
    """A lookup table. The log says so."""
    _, found, output = left_behind
    np.testing.assert_allclose(found["looked up"], parameter_servers.looked_up(), rtol=1e-5)
    assert "computes the whole of train_step: workers do not have its table for" in output
    # Asynchronously, nobody waits for the chief.
    of_table, of_callback = found["refused"]
    assert "cannot train with a step that needs its table for look-ups" in of_table
    assert "cannot train with a callback that looks into steps" in of_callback


@pytest.mark.slow
def test_asynchronous_workers_lose_no_step_though_one_is_killed(left_behind):
    """Each of 20 epochs of 6 batches has updated the model."""
    found = left_behind[1]
    # If a worker is killed between its update and its answer, another repeats that batch.
    assert found["steps"] in (20 * 6, 20 * 6 + 1)
    assert found["after"] < found["before"] / 4
    assert found["losses"][-1] < found["losses"][0] / 2


@pytest.mark.slow
def test_a_dead_parameter_server_is_named(tmp_path):
    ports = free_ports(3)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    cluster = {
        role: [each] for role, each in zip(("chief", "ps", "worker"), addresses, strict=True)
    }
    of_each = [
        {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": role, "index": 0}})}
        for role in cluster
    ]
    script = Path(__file__).with_name("dying_server.py")
    with Workers(script, 3, (tmp_path,), of_each=of_each) as processes:
        processes.processes[0].join(PATIENCE)
        output = processes.output(0)
    assert f"WorkerFailure: Parameter server 0 ({addresses[1]}) is gone. Expected" in output, output


def test_asynchronous_replicas_are_refused():
    with pytest.raises(ValueError, match="`asynchronous=True` needs parameter servers"):
        kmg.distribute(keras.Sequential([keras.layers.Dense(1)]), asynchronous=True)
