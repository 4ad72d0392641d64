"""Pure functions become graphs, and structures become specs: by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.training import tracing

RAGGED = tf.ragged.constant([[1, 2], [3]])
SPARSE = tf.sparse.from_dense([[0.0, 4.0]])


def test_specs_of_every_kind_of_leaf():
    """Tensors, variables, arrays and specs; None stays None."""
    number = tf.TensorSpec((), tf.int32)
    structure = {
        "tensor": tf.ones((2, 3)),
        "variable": keras.Variable(np.zeros(4, "float32")),
        "nested": [number, None, RAGGED],
    }
    assert tracing.specs_of(structure) == {
        "tensor": tf.TensorSpec((2, 3)),
        "variable": tf.TensorSpec((4,)),
        "nested": [number, None, tf.type_spec_from_value(RAGGED)],
    }


def test_stand_ins_for_specs():
    """What Keras calls a model with when there are no numbers yet."""
    dense, sparse, none = tracing.symbolic(
        (tf.TensorSpec((None, 3), tf.int32), tf.type_spec_from_value(SPARSE), None)
    )
    assert isinstance(dense, keras.KerasTensor) and isinstance(sparse, keras.KerasTensor)
    assert (dense.shape, dense.dtype, dense.sparse) == ((None, 3), "int32", False)
    assert (sparse.shape, sparse.dtype, sparse.sparse) == ((1, 2), "float32", True)
    assert none is None
    spec = tf.type_spec_from_value(RAGGED)
    assert tracing.symbolic([spec]) == [spec]


def test_the_tensors_inside_of_others():
    """A ragged tensor is values and splits, a sparse one indices, values and a shape."""
    found = tracing.tensors_of((tf.constant(1), None, {"r": RAGGED, "s": SPARSE}, 5))
    assert [tensor.numpy().tolist() for tensor in found] == [
        1,
        [1, 2, 3],
        [0, 2, 3],
        [[0, 1]],
        [4],
        [1, 2],
    ]


def test_a_function_is_traced_once_for_open_sizes():
    """And is then a graph that takes any size."""
    calls = []

    def add(pair, number):
        calls.append(pair[0].shape.as_list())
        return pair[0] + number, pair[1]

    specs = (tf.TensorSpec((None,)), None), tf.TensorSpec(())
    graph = tracing.traced(add, specs, jit_compile=False)
    for size in (1, 2, 3):
        total, none = graph((tf.ones(size), None), tf.constant(2.0))
        assert total.numpy().tolist() == [3.0] * size and none is None
    assert calls == [[None]]


@pytest.mark.parametrize("way", ["graph", "directly"])
def test_it_runs_as_on_one_device_inside_a_replica(way):
    """The function sees no strategy, wherever it is called."""
    seen = []

    def look(number):
        seen.append(tf.distribute.has_strategy())
        return number + 1.0

    call = tracing.called_directly(look)
    if way == "graph":
        call = tracing.traced(look, (tf.TensorSpec(()),), jit_compile=False)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    results = strategy.run(lambda: call(tf.constant(1.0)))
    assert [float(each) for each in strategy.experimental_local_results(results)] == [2.0, 2.0]
    assert not any(seen)


def test_tensors_wait_for_a_time():
    """The same structure, whose tensors depend on the time; other leaves stay."""
    graph = tf.Graph()
    with graph.as_default():
        time, leaf = tf.timestamp(), tf.constant(1.0)
        held, none, five = tracing.held_until(time, (leaf, None, 5))
    assert held is not leaf and none is None and five == 5
    assert time.op in held.op.control_inputs
    kept = tracing.held_until(tf.timestamp(), RAGGED)
    assert kept.to_list() == [[1, 2], [3]]
