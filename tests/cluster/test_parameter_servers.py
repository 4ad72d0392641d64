"""Workers and parameter servers, in real processes: synchronous as one device, or asynchronous."""

import json
import re
from pathlib import Path

import keras
import numpy as np
import parameter_servers
import pytest
import tensorflow as tf
from processes_left import PATIENCE
from refused_elsewhere import Largest, Own
from replica_runs import difference
from worker_processes import Workers, free_ports

import keras_multigpu as kmg
from keras_multigpu.training.servers.connection import Elsewhere
from keras_multigpu.training.steps.steps_of_model import training_step


@pytest.fixture(scope="module")
def left_behind(tmp_path_factory):
    """The numbers of a synchronous training, and what became of an asynchronous one."""
    folder = tmp_path_factory.mktemp("servers")
    of_each = parameter_servers.environments(free_ports(5))
    with Workers(Path(parameter_servers.__file__), 3, (folder,), of_each=of_each) as processes:
        # The chief ends by itself; the others have been killed before, or serve without end.
        processes.processes[0].join(PATIENCE)
        ended, output = [each.exitcode for each in processes.processes], processes.output(0)
    found = re.search(r"^result (.*)$", output, re.MULTILINE)
    assert ended == [0, -9, -9] and found, output
    loaded = {}
    for kind in ("synchronous", "masked"):
        with np.load(folder / f"{kind}.npz") as numbers:
            loaded[kind] = dict(numbers)
    return loaded, json.loads(found[1])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["synchronous", "masked"])
def test_synchronous_workers_end_where_one_device_does(left_behind, kind):
    """Also where workers have no example of the last batch, though one is killed, and with masks.

    With masks, and weights that are divided by their sum, workers need numbers of all shares.
    """
    found = left_behind[0][kind]
    if kind == "masked":
        expected = parameter_servers.masked_training()
    else:
        model, x, y = parameter_servers.model_and_data()
        history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
        expected = parameter_servers.numbers(model, history, x)
    assert found.keys() == expected.keys()
    apart = {name: difference(value, found[name]) for name, value in expected.items()}
    assert all(each < 2e-5 for each in apart.values()), apart


@pytest.mark.slow
def test_asynchronous_workers_lose_no_step_though_one_is_killed(left_behind):
    """Each batch has updated the model: 20 epochs of 6 batches, of which one worker did most."""
    _, found = left_behind
    # Killed between its update and its answer, a worker has that one batch done again by another.
    assert found["steps"] in (20 * 6, 20 * 6 + 1)
    assert found["after"] < found["before"] / 4
    assert found["losses"][-1] < found["losses"][0] / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["synchronous", "asynchronous"])
def test_a_dead_parameter_server_is_named(kind, tmp_path):
    """Not by lines of TensorFlow's about tensors that could not be copied."""
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
    with Workers(script, 3, (tmp_path, kind), of_each=of_each) as processes:
        processes.processes[0].join(PATIENCE)
        output = processes.output(0)
    assert f"WorkerFailure: Parameter server 0 ({addresses[1]}) is gone. Expected" in output, output


def served(model, asynchronous):
    """Let a model have two workers, as far as its step is made before they are asked."""
    strategy = model.distribute_strategy
    model.replication.elsewhere = Elsewhere(strategy, "workers of parameter servers", 2, False)
    model.replication.elsewhere.asynchronous = asynchronous
    model.replication.shares_of_batch = 1 if asynchronous else 2


@pytest.mark.parametrize(
    ("model", "settings", "what"),
    [
        (Own, {}, "with a `train_step` of its own"),
        (keras.Sequential, {"run_eagerly": True}, "with `run_eagerly=True`"),
        (keras.Sequential, {"loss": lambda y, p: tf.reduce_max(y - p)}, "is not a sum over"),
        (
            keras.Sequential,
            {"metrics": [Largest()]},
            "needs all predictions of a batch",
        ),
    ],
)
def test_what_workers_cannot_do_is_refused_by_name(model, settings, what):
    """Before any of them is asked."""
    model = kmg.distribute(model([keras.Input((2,)), keras.layers.Dense(1)]))
    model.compile(**{"optimizer": "sgd", "loss": "mse", **settings})
    spec = (tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1)), None)
    served(model, asynchronous=True)
    with pytest.raises(ValueError, match=what):
        training_step(model, model.replication, spec, None)


def test_the_moments_of_all_workers_are_refused():
    """They pass over their shares apart; asynchronous ones have whole batches."""
    layers = [keras.Input((2,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    model = kmg.distribute(keras.Sequential(layers))
    model.compile("sgd", "mse")
    spec = (tf.TensorSpec((None, 2)), tf.TensorSpec((None, 1)), None)
    served(model, asynchronous=False)
    with pytest.raises(ValueError, match="with BatchNormalization"):
        training_step(model, model.replication, spec, None)


def test_asynchronous_replicas_are_refused():
    with pytest.raises(ValueError, match="`asynchronous` came without parameter servers"):
        kmg.distribute(keras.Sequential([keras.layers.Dense(1)]), asynchronous=True)
