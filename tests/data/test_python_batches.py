"""`from_flow`: `PyDataset`s and generators as `Batches`."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.processes_left import PATIENCE

import keras_multigpu as kmg
from keras_multigpu.data import from_flow


def joined(batches, epoch=0):
    parts = list(batches.epoch(epoch).as_numpy_iterator())
    return keras.tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)


# PyDatasets.


class Numbers(keras.utils.PyDataset):
    """Ten numbers in batches of four; reads are recorded."""

    def __init__(self, form=tuple, **kwargs):
        super().__init__(**kwargs)
        self.form = form
        self.events = []
        self.running = []
        self.most_at_once = 0
        self.meeting = None

    def __len__(self):
        return 3

    def __getitem__(self, index):
        self.events.append(index)
        self.running.append(index)
        self.most_at_once = max(self.most_at_once, len(self.running))
        if self.meeting:
            self.meeting.wait(timeout=PATIENCE)
        self.running.remove(index)
        x = np.arange(10)[4 * index : 4 * index + 4]
        return self.form((x, 2 * x))

    def on_epoch_begin(self):
        self.events.append("begin")

    def on_epoch_end(self):
        self.events.append("end")


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("form", [tuple, list])
def test_each_batch_is_read_once(workers, form):
    data = Numbers(form, workers=workers)
    batches = from_flow(data, shuffle=False)
    assert batches.global_batch_size == 4
    data.events.clear()
    parts = [x.tolist() for x, _ in batches.with_(global_batch_size=5).epoch(0).as_numpy_iterator()]
    assert parts == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert data.events[0] == "begin" and data.events[-1] == "end"
    assert sorted(data.events[1:-1]) == [0, 1, 2]


def test_workers_read_concurrently():
    data = Numbers(workers=3)
    batches = from_flow(data)
    data.meeting = threading.Barrier(3)
    assert sorted(joined(batches)[0].tolist()) == list(range(10))
    assert data.most_at_once == 3


def test_no_processes_are_started(caplog):
    data = Numbers(workers=2, use_multiprocessing=True)
    batches = from_flow(data)
    assert "set use_multiprocessing=False and `workers`" in caplog.messages[0]
    assert sorted(joined(batches)[0].tolist()) == list(range(10))
    assert data.most_at_once == 1


class Endless(keras.utils.PyDataset):
    """An endless dataset."""

    def __getitem__(self, index):
        return np.array([index, index])

    @property
    def num_batches(self):
        return None


def test_endless_datasets_go_on_in_each_epoch():
    batches = from_flow(Endless(), steps=2)
    assert [joined(batches, epoch).tolist() for epoch in (0, 1)] == [[0, 0, 1, 1], [2, 2, 3, 3]]


class Unequal(keras.utils.PyDataset):
    """Its second batch has another shape."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return np.zeros((2, 3 + index))


def test_batches_of_different_shapes_are_refused():
    batches = from_flow(Unequal(), shuffle=False)
    with pytest.raises(tf.errors.InvalidArgumentError, match="does not look like its first one"):
        joined(batches)


# Generators.


def make_batches():
    for start in (0, 3, 6):
        x = np.arange(start, min(start + 3, 8))
        yield {"a": x, "b": x[:, None] * [1.0, 2.0]}, x % 2, np.ones(len(x))


def test_generators_are_read_in_order():
    batches = from_flow(make_batches)
    assert batches.global_batch_size == 3
    for epoch in range(2):
        x, y, weight = joined(batches, epoch)
        assert x["a"].tolist() == list(range(8)) and x["b"].shape == (8, 2)
        assert y.tolist() == [0, 1] * 4 and weight.tolist() == [1] * 8


def endless(epoch):
    number = 0
    while True:
        yield np.array([[epoch, number]])
        number += 1


def test_endless_generators_need_steps():
    batches = from_flow(endless, steps=2)
    assert joined(batches, 0).tolist() == [[0, 0], [0, 1]]
    assert joined(batches, 7).tolist() == [[7, 0], [7, 1]]


def test_generators_that_end_too_soon_are_named():
    batches = from_flow(make_batches, steps=5)
    with pytest.raises(tf.errors.InvalidArgumentError, match="ended after 3 of 5 batches"):
        joined(batches)


# Errors of the user's own code.


class Broken(Numbers):
    """Its last batch fails."""

    def __getitem__(self, index):
        if index == 2:
            raise KeyError("mine")
        return super().__getitem__(index)


def broken():
    yield np.zeros((4, 1)), np.zeros(4)
    raise KeyError("mine")


@pytest.mark.parametrize("flow", [Broken(workers=3), broken])
@pytest.mark.slow
def test_errors_of_user_code_reach_the_caller_of_fit(flow):
    model = keras.Sequential([keras.Input(()), keras.layers.Reshape((1,)), keras.layers.Dense(1)])
    if flow is broken:
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model = kmg.distribute(model, kmg.strategy(devices=2))
    model.compile("sgd", "mse")
    with pytest.raises(KeyError, match="mine"):
        model.fit(from_flow(flow, shuffle=False), verbose=0)
