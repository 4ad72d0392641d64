"""The shares of this process's replicas are on their devices before their step.

Logical CPUs stand for devices with memory of their own.
"""

import threading
import time

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.processes_left import PATIENCE
from tensorflow.python.eager import context  # noqa: TID251 (where operations are placed)

import keras_multigpu as kmg
from keras_multigpu.training.feed import cutter
from keras_multigpu.training.feed.cutter import AHEAD, Cutter
from keras_multigpu.training.shares import normalized, tensors_of

NAMES = ["CPU:1", "CPU:2"]
LOCAL = [f"/device:{name}" for name in NAMES]
X = np.arange(14, dtype="float32").reshape(7, 2)


@pytest.fixture
def own_memory(monkeypatch):
    """Give every device but the host its own memory."""
    monkeypatch.setattr(cutter, "has_own_memory", lambda device: not device.endswith("CPU:0"))


def devices_of(shares):
    """The devices of each share's tensors."""
    return [{tensor.device[-5:] for tensor in tensors_of(rows.data)} for rows in shares.rows]


def test_shares_arrive_on_their_devices(own_memory):
    cut = Cutter(2, LOCAL)
    data = tf.data.Dataset.from_tensor_slices((X, np.arange(7, dtype="int32"))).batch(3)
    found = list(cut.ahead(data))
    assert [[rows.data[0][:, 0].numpy().tolist() for rows in shares.rows] for shares in found] == [
        [[0, 2], [4]],
        [[6, 8], [10]],
        [[12], []],
    ]
    assert [[int(rows.examples) for rows in shares.rows] for shares in found][2] == [1, 0]
    read_by_python = [cut(normalized(batch)) for batch in data]
    for shares in (*found, *read_by_python):
        assert devices_of(shares) == [{"CPU:1"}, {"CPU:2"}]


@pytest.mark.parametrize(
    "x",
    [
        tf.constant(["a", "b"]),
        tf.ragged.constant([[1], [2, 3]]),
        tf.sparse.from_dense([[0.0, 1], [2, 0]]),
    ],
    ids=["strings", "ragged", "sparse"],
)
def test_tensors_that_devices_cannot_hold_stay_on_the_host(own_memory, x):
    data = tf.data.Dataset.from_tensors((x, tf.ones((2, 1))))
    for shares in (*Cutter(2, LOCAL).ahead(data), Cutter(2, LOCAL)(normalized((x, X[:2])))):
        assert devices_of(shares) == [{"CPU:0"}, {"CPU:0"}]


def of_batch(number):
    """A batch filled with its number."""
    return np.full((4, 1), number, "float32")


class Busy(keras.layers.Layer):
    """Computes as long as a function of the inputs does.

    Args:
        work: The function.
    """

    def __init__(self, work):
        super().__init__()
        self.work = work

    def call(self, x):
        done = tf.numpy_function(self.work, [tf.stop_gradient(x)], tf.float32)
        return x + tf.reshape(done, ())


@pytest.mark.parametrize("copied", [False, True])
def test_shares_are_ready_before_the_previous_step_ends(monkeypatch, copied):
    """If batch k + 2 is being made, the shares of batch k + 1 are ready.

    Where shares are copied, AHEAD of them wait on the host for each device: that batch
    k + AHEAD + 2 is being made says that the devices have taken the shares of step k + 1.
    """
    monkeypatch.setattr(cutter, "has_own_memory", lambda device: copied)
    later = AHEAD + 2 if copied else 2
    made, in_time, alone = {}, {}, threading.Lock()

    def note(number):
        made[int(number)] = time.perf_counter()
        return of_batch(number)

    def batch(number):
        x = tf.ensure_shape(tf.numpy_function(note, [number], tf.float32), (4, 1))
        return x, x

    def work(x):
        step, begun = int(x[0, 0]), time.perf_counter()
        if in_time.setdefault(step) is not None or not alone.acquire(blocking=False):
            return np.float32(0)  # One replica waits; both would take all of TensorFlow's threads.
        while step + later not in made and time.perf_counter() < begun + PATIENCE:
            time.sleep(0.001)
        in_time[step] = made.get(step + later, np.inf) < time.perf_counter()
        alone.release()
        return np.float32(0)

    model = keras.Sequential([keras.Input((1,)), Busy(work), keras.layers.Dense(1)])
    model = kmg.distribute(model, kmg.strategy(devices=NAMES))
    model.compile("sgd", "mse")
    options = tf.data.Options()
    # What TensorFlow by itself reads ahead proves nothing.
    options.experimental_optimization.apply_default_optimizations = False
    data = tf.data.Dataset.range(12).map(batch).with_options(options)
    model.fit(data, steps_per_epoch=6, verbose=0)
    assert in_time == dict.fromkeys(range(6), True)


@pytest.mark.slow
def test_the_inputs_of_a_step_are_on_its_device(own_memory):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model = kmg.distribute(model, kmg.strategy(devices=NAMES), self_check=False)
    model.compile("sgd", "mse")
    context.enable_run_metadata()
    try:
        model.fit(X, X[:, :1], batch_size=2, verbose=0)
        graphs = context.export_run_metadata().function_graphs
    finally:
        context.disable_run_metadata()
    parts = [part for graph in graphs for part in graph.partition_graphs if len(part.node) > 50]
    nodes = {node.name: node for part in parts for node in part.node}
    given = {
        node.name: node.device[-5:]
        for node in nodes.values()
        if node.op == "_Arg" and node.attr["T"].type == tf.float32
    }
    assert sorted(given.values()) == sorted([*NAMES, *NAMES])
    assert not [n for n in nodes.values() if n.op == "_Send" and source(n) in given]


def source(node):
    """The name of the node that makes another's first input."""
    return node.input[0].partition(":")[0] if node.input else ""
