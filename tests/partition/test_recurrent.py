"""cuDNN's LSTM and GRU, whose kernels only GPUs have: how replicas share them.

What the kernels compute is left to `keras-multigpu scoreboard`; a stand-in takes their place here.
"""

import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas

import keras_multigpu as kmg
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Block, Rows
from keras_multigpu.partition.program import Operation, has_effect
from keras_multigpu.partition.rules.recurrent import cudnn_rnn

EXAMPLES, STEPS, UNITS = 4, 3, 2


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Keras takes cuDNN's kernels where it sees a GPU."""
    rnn = sys.modules["keras.src.backend.tensorflow.rnn"]
    monkeypatch.setattr(rnn, "_is_gpu_available", lambda: True)


@pytest.mark.parametrize("layer", [keras.layers.LSTM, keras.layers.GRU])
def test_replicas_share_cudnns_layers(layer, pretended_gpu):
    """Otherwise the first replica would compute the layer, and all else, for all."""
    layers = [layer(8, return_sequences=True), keras.layers.Bidirectional(layer(8))]
    model = keras.Sequential([keras.Input((10, 6)), *layers, keras.layers.Dense(3)])
    model = on_replicas(model, 2)
    model.compile("sgd", "mse")
    found = kmg.explain(model)
    assert (found.shared, found.gathered_bytes, found.reason) == (1.0, 0, None)
    assert [part.kind for part in found.parts] == ["summed"]


def operation(time_major=False, dropout=0.0, mode="lstm"):
    """The kernel in a graph, and that of its gradient."""
    batch = (STEPS, EXAMPLES) if time_major else (EXAMPLES, STEPS)
    state = (1, EXAMPLES, UNITS) if time_major else (EXAMPLES, 1, UNITS)
    with tf.Graph().as_default():
        x, h = tf.ones([*batch, 5]), tf.ones(state)
        made = tf.raw_ops.CudnnRNNV3(
            input=x,
            input_h=h,
            input_c=h if mode == "lstm" else 0.0,
            params=tf.ones([9]),
            sequence_lengths=tf.fill([EXAMPLES], STEPS),
            rnn_mode=mode,
            dropout=dropout,
            time_major=time_major,
        )
        tf.gradients(made.output, x)
        ops = tf.compat.v1.get_default_graph().get_operations()
    kernels = [op for op in ops if op.type in ("CudnnRNNV3", "CudnnRNNBackpropV3")]
    return [Operation(op, op.type, op.inputs) for op in kernels]


FACTS = SimpleNamespace(
    dims=lambda tensor: tensor.shape.as_list(), length=lambda blocks: EXAMPLES * len(blocks)
)
BATCH = (Block("batch"),)


@pytest.mark.parametrize("time_major", [False, True])
def test_each_replica_has_its_examples(time_major):
    forward, backward = operation(time_major)
    rows, lengths = Rows(int(time_major), BATCH), Rows(0, BATCH)
    inputs = (rows, rows, rows, REPLICATED, lengths)
    plan = cudnn_rnn(forward, (rows, *[REPLICATED] * 4), FACTS)
    assert (plan.need, plan.out) == (inputs, (rows,) * 5)
    plan = cudnn_rnn(backward, (*inputs, *[rows] * 8), FACTS)
    assert (plan.need, plan.out) == ((*inputs, *[rows] * 8), (rows, rows, rows, PARTIAL))


def test_a_gru_has_no_cell():
    (forward, backward), rows = operation(mode="gru"), Rows(0, BATCH)
    inputs = (rows, rows, REPLICATED, REPLICATED, rows)
    plan = cudnn_rnn(forward, inputs, FACTS)
    assert plan.out == (rows, rows, REPLICATED, rows, rows)
    outputs = (rows, rows, REPLICATED)
    plan = cudnn_rnn(backward, (*inputs, *outputs, *outputs, rows, rows), FACTS)
    assert plan.out == (rows, rows, REPLICATED, PARTIAL)


def test_what_is_not_the_examples_axis_is_gathered():
    forward, backward = operation()
    rows = Rows(0, BATCH)
    for wrong in (Rows(1, BATCH), Rows(0, BATCH * 2)):
        assert cudnn_rnn(forward, (wrong, *[REPLICATED] * 4), FACTS) is None
    # The forward kernel had all rows, so what it reserved is for all.
    ins = [*[REPLICATED] * 8, rows, *[REPLICATED] * 4]
    assert cudnn_rnn(backward, tuple(ins), FACTS) is None


def test_dropout_between_layers_draws_once():
    with_dropout, without = operation(dropout=0.5)[0], operation()[0]
    assert has_effect(with_dropout) and not has_effect(without)
    assert cudnn_rnn(with_dropout, (Rows(0, BATCH), *[REPLICATED] * 4), FACTS) is None


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("length", [0, 2])
def test_a_replica_without_examples_gives_the_kernel_one(length, time_major):
    """It adds nothing to the gradient of the weights, and is in no result."""
    seen = {}

    def kernel(op, inputs):
        seen[op.type] = inputs
        gradient = op.type == "CudnnRNNBackpropV3"
        return [*inputs[:3], *(inputs[3:4] if gradient else inputs[-2:])]

    replica = SimpleNamespace(local_length=lambda blocks: tf.constant(length), run=kernel)
    rows, axis = Rows(int(time_major), BATCH), int(time_major)
    layouts = (rows, rows, rows, REPLICATED, Rows(0, BATCH))
    forward, backward = operation(time_major)
    shapes = [tensor.shape.as_list() for tensor in forward.inputs]
    values = [np.full(shape, 7.0, "float32") for shape in shapes]
    values = [
        value if layout == REPLICATED else np.take(value, range(length), layout.axis)
        for value, layout in zip(values, layouts, strict=True)
    ]
    values[4] = values[4].astype("int32")
    plan = cudnn_rnn(forward, layouts, FACTS)
    results = plan.emit(replica, [tf.constant(value) for value in values])
    assert [each.shape[axis] for each in seen["CudnnRNNV3"][:3]] == [max(length, 1)] * 3
    assert seen["CudnnRNNV3"][4].numpy().min() >= 1
    assert [each.shape[axis] for each in results[:3]] == [length] * 3

    given = [*values, *values[:3], *values[:3], np.ones([0], "float32"), np.ones([0], "int8")]
    plan = cudnn_rnn(backward, (*layouts, *[rows] * 8), FACTS)
    results = plan.emit(replica, [tf.constant(value) for value in given])
    back = [each.numpy() for each in seen["CudnnRNNBackpropV3"][8:11]]
    assert all(np.all(each == (7.0 if length else 0.0)) and each.size for each in back)
    assert [each.shape[axis] for each in results[:3]] == [length] * 3
