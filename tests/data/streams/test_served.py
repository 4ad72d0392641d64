"""Hosts of a tf.data service make the elements of a dataset; batches are those of one process."""

import logging
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from helpers.processes_left import start_process

import keras_multigpu as kmg

service = tf.data.experimental.service
WORKER = Path(__file__).with_name("service_worker.py")


@pytest.fixture(scope="module")
def dispatcher():
    """A dispatcher, with two workers."""
    dispatcher = service.DispatchServer()
    address = dispatcher.target.rpartition("/")[2]
    workers = [service.WorkerServer(service.WorkerConfig(address)) for _ in range(2)]
    yield dispatcher.target
    del workers


def made(element):
    """An example of a number."""
    return {"x": tf.cast(element, tf.float32) / 2, "name": tf.strings.as_string(element)}, element


def numbers(count=43):
    """A dataset of examples."""
    return tf.data.Dataset.range(count).map(made, num_parallel_calls=2)


def values(dataset):
    """The batches of a dataset."""

    def plain(leaf):
        return leaf.to_list() if isinstance(leaf, tf.RaggedTensor) else leaf.numpy().tolist()

    return [tf.nest.map_structure(plain, batch) for batch in dataset]


@pytest.mark.parametrize(
    ("dataset", "more"),
    [
        (numbers(), {"global_batch_size": 5}),
        (numbers().batch(4).prefetch(2), {"shuffle": False}),
        (numbers(9).map(lambda x, y: (tf.ragged.range(y),)), {"global_batch_size": 3}),
    ],
    ids=["examples", "batches", "ragged"],
)
@pytest.mark.slow
def test_batches_and_their_order_are_those_of_one_process(dispatcher, dataset, more, caplog):
    """In each epoch and from any position: only another host has made the elements."""
    here = kmg.data.from_dataset(dataset, seed=3, **more)
    served = here.with_(service=dispatcher)
    for place in [(0,), (1,), (1, 7)]:
        assert values(served.epoch(*place)) == values(here.epoch(*place))
    assert served.identity() == here.identity()
    assert "did not come" not in caplog.text


@pytest.mark.slow
def test_a_killed_worker_changes_nothing(monkeypatch, caplog):
    """What it had in hand, and all that only it could give, is made here after a second."""
    monkeypatch.setenv("KERAS_MULTIGPU_HEARTBEAT_TIMEOUT", "1")
    dispatcher = service.DispatchServer()
    address = dispatcher.target.rpartition("/")[2].replace("localhost", "127.0.0.1")
    command = [sys.executable, WORKER, address]
    with start_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as worker:
        assert worker.stdout.readline() == b"ready\n"
        here = kmg.data.from_dataset(numbers(2000), global_batch_size=100)
        reading = iter(here.with_(service=dispatcher.target).epoch(0))
        found = [next(reading)]
        worker.kill()
        worker.stdin.close()
        with caplog.at_level(logging.WARNING, "keras_multigpu"):
            found += list(reading)
    assert values(found) == values(here.epoch(0))
    assert "did not come from the tf.data service at grpc://localhost" in caplog.text


def test_an_error_in_the_dataset_is_raised_as_it_is(dispatcher):
    def fails(x, y):
        with tf.control_dependencies([tf.debugging.assert_less(y, np.int64(3), "too large")]):
            return x, tf.identity(y)

    batches = kmg.data.from_dataset(numbers(5).map(fails), global_batch_size=1, service=dispatcher)
    with pytest.raises(tf.errors.UnknownError) as raised:
        list(batches.epoch(0))
    with pytest.raises(tf.errors.InvalidArgumentError, match="too large"):
        raise batches.failure_in(raised.value)


def python(element):
    """What only this process can do."""
    return tf.numpy_function(lambda number: number, [element], tf.int64)


@pytest.mark.parametrize(
    ("dataset", "what"),
    [
        (tf.data.Dataset.range(3).map(python), "calls Python.* `map` .* TensorFlow's functions"),
        (numbers().repeat(), "has no known end.*`dataset.take"),
        (numbers().shuffle(9, seed=1), "shuffles.* `Batches` shuffles"),
        (
            numbers().padded_batch(2),
            "from front to end only.*PaddedBatch.*`Dataset.from_tensor_slices",
        ),
    ],
    ids=["python", "endless", "shuffled", "no random access"],
)
def test_a_dataset_that_others_cannot_make_alike_is_refused(dispatcher, dataset, what):
    with pytest.raises(ValueError, match=what):
        kmg.data.from_dataset(dataset, batched=False, global_batch_size=2, service=dispatcher)


def test_python_sources_say_what_to_do(dispatcher):
    """Arrays as an example; all that are not datasets are read by Python."""
    with pytest.raises(ValueError, match="cannot read arrays: Python reads it.*`from_dataset`"):
        kmg.data.from_arrays(np.arange(3), service=dispatcher)


@pytest.mark.parametrize("address", ["localhost", "grpc://127.0.0.1:1"])
def test_an_address_at_which_nobody_listens_is_named(address):
    """TensorFlow would wait there for ever."""
    with pytest.raises(ValueError, match="no tf.data service at `service`.*Received: service="):
        kmg.data.from_dataset(numbers(), global_batch_size=2, service=address)
