"""Facts about a step's tensors are true for batches of every size."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.all_replicas import first_rows
from validator import is_so

from keras_multigpu.partition.facts.finding import find_facts
from keras_multigpu.partition.program import Program
from keras_multigpu.partition.sizes import Size, value_of

B, T = Size.of("batch"), Size.of("time")


def false_facts(function, dims, dtypes=None, sizes=((5, 3), (2, 7), (4, 2))):
    """The false facts, and the fraction of known lengths.

    All sizes are above 1: for a length of 1, which may be broadcast, TensorFlow sums other axes.
    """

    def traced(*inputs):
        function(*inputs)
        operations = tf.compat.v1.get_default_graph().get_operations()
        tensors = [t for op in operations for t in op.outputs]
        seen.extend(t for t in tensors if t.dtype not in (tf.variant, tf.resource))
        whole = [t if t.dtype in (tf.int32, tf.int64) else tf.zeros([0]) for t in seen]
        return [tf.shape(t) for t in seen], [tf.identity(t) for t in whole]

    seen = []
    dtypes = dtypes or [tf.float32] * len(dims)
    specs = [
        tf.TensorSpec([dim if isinstance(dim, int) else None for dim in own], dtype)
        for own, dtype in zip(dims, dtypes, strict=True)
    ]
    graph = tf.function(traced, autograph=False).get_concrete_function(*specs)
    captured = [None] * (len(graph.graph.inputs) - len(dims))
    program = Program(graph.graph, taps=seen)
    facts = find_facts(program, [*map(list, dims), *captured], {"batch": B})
    false, known, lengths = [], 0, 0
    for batch, time in sizes:
        numbers = {"batch": batch, "time": time}
        shapes = [[value_of(dim, numbers) for dim in own] for own in dims]
        given = [
            tf.cast(np.random.default_rng(0).uniform(0, 3, shape), dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        for tensor, shape, value in zip(seen, *graph(*given), strict=True):
            own = program.tensors[tensor.name]
            told, entries, shape = facts.dims(own), facts.value(own), shape.numpy().tolist()
            lengths += len(shape)
            known += 0 if told is None else len(told) - told.count(None)
            if not is_so(told, shape, numbers):
                false.append((tensor.op.type, tensor.name, told, shape))
            if value.dtype == tensor.dtype and not is_so(entries, value, numbers):
                false.append((tensor.op.type, tensor.name, entries, value))
    return false, known / lengths


ARITHMETIC = {
    "reshape": lambda x: tf.reshape(x, [tf.shape(x)[0], -1]),
    "reshape with time": lambda x: tf.reshape(x, [-1, tf.shape(x)[1] * 2, 2]),
    "reshape by a product": lambda x: tf.reshape(x, [tf.reduce_prod(tf.shape(x)[:2]), 4]),
    "halves": lambda x: (x[: tf.shape(x)[0] // 2], x[tf.shape(x)[0] // 2 :]),
    "without the last": lambda x: (x[:-1], x[:, :-1], x[..., 1:3], x[::2], x[::-1], x[-1]),
    "tile": lambda x: tf.tile(x, [2, 1, tf.shape(x)[1]]),
    "repeat": lambda x: tf.repeat(x, 3, axis=1),
    "range": lambda x: (
        tf.range(tf.shape(x)[0]),
        tf.range(1, tf.shape(x)[1], 2),
        tf.range(5, 2, -1),
    ),
    "range by time": lambda x: tf.range(0, tf.shape(x)[0] * tf.shape(x)[1], tf.shape(x)[1]),
    "concat": lambda x: tf.concat([x, tf.zeros_like(x), x[:1]], 0),
    "stack and split": lambda x: tf.split(tf.concat([x, x], 0), 2),
    "pad": lambda x: tf.pad(x, [[1, 2], [0, tf.shape(x)[1]], [0, 0]]),
    "broadcast": lambda x: x + tf.reduce_sum(x, 0) + tf.reduce_sum(x, [1, 2], keepdims=True),
    "broadcast of one": lambda x: (
        x[..., :1] * x[..., 1:2],
        x[:, :1, :1] * x[:, :1, 1:2],
        x[:, :1] * x,
    ),
    "comparison": lambda x: tf.where(tf.shape(x)[0] > 3, tf.shape(x)[0], 3),
    "largest": lambda x: tf.zeros([tf.maximum(tf.shape(x)[0], tf.shape(x)[1]), 2]),
    "smallest": lambda x: x[: tf.minimum(tf.shape(x)[0], 3)],
    "gather": lambda x: (tf.gather(tf.shape(x), [2, 0]), tf.gather(x, [0, 0], axis=1)),
    "transposed": lambda x: tf.transpose(x, [2, 0, 1]),
    "diagonals": lambda x: (tf.linalg.diag(x), tf.linalg.diag_part(tf.linalg.diag(x))),
    "identity matrices": lambda x: (tf.eye(tf.shape(x)[0]), tf.eye(2, tf.shape(x)[1])),
    "shuffled": lambda x: tf.random.experimental.stateless_shuffle(
        tf.range(tf.shape(x)[0]), [1, 2]
    ),
    "sparse": lambda x: tf.sparse.sparse_dense_matmul(
        tf.sparse.from_dense(x[:, :, 0]), x[0, :, :2]
    ),
    "parts of a shape": lambda x: (
        tf.zeros(tf.unstack(tf.shape(x))[:2]),
        tf.zeros(tf.concat(tf.split(tf.shape(x), 3)[::-1], axis=0)),
        tf.zeros(tf.split(tf.shape(x), [2, 0, 1])[0]),
    ),
    "mapped by one graph": lambda x: tf.vectorized_map(lambda row: tf.reduce_sum(row, axis=-1), x),
    "frames": lambda x: tf.signal.frame(x, 2, 1),
    "patches": lambda x: tf.space_to_batch(x[..., None], [2], [[0, tf.shape(x)[1]]])[..., 0],
    "cond": lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: x[:1]),
    "loop": lambda x: tf.while_loop(
        lambda i, y: i < 2,
        lambda i, y: (i + 1, tf.concat([y, y], 0)),
        (0, x),
        shape_invariants=(tf.TensorShape([]), tf.TensorShape([None, None, 4])),
    ),
    "map": lambda x: tf.map_fn(lambda row: row * 2.0, x),
    "einsum": lambda x: tf.einsum("btd,bsd->bts", x, x),
    "one hot": lambda x: tf.one_hot(tf.argmax(x, -1), 3),
    "norms": lambda x: tf.linalg.norm(x, axis=(0, 2)),
    "top": lambda x: (tf.nn.top_k(x, 2), tf.argsort(x, axis=0), tf.sort(x, axis=1)),
    "nothing": lambda x: tf.zeros([0, tf.shape(x)[0]]),
}


@pytest.mark.parametrize("name", ARITHMETIC)
def test_facts_of_shapes_are_true(name):
    """And for gradients."""

    def function(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            found = [tf.cast(t, tf.float32) for t in tf.nest.flatten(ARITHMETIC[name](x))]
            total = tf.add_n([tf.reduce_sum(tf.sin(t)) for t in found])
        return tape.gradient(total, x)

    assert false_facts(function, [(B, T, 4)])[0] == []


def model_of(*layers, shape=(8,)):
    return keras.Sequential([keras.Input(shape), *layers, keras.layers.Dense(3)])


K = keras.layers
MODELS = {
    "dilated": ((9, 4), lambda: (K.Conv1D(3, 2, dilation_rate=2, padding="causal"),
                K.GlobalMaxPooling1D())),
    "convolutions": ((8, 8, 2), lambda: (K.Conv2D(4, 3), K.BatchNormalization(), K.MaxPooling2D(2),
                     K.SeparableConv2D(4, 2, strides=2), K.Flatten())),
    "recurrent": ((None, 4), lambda: (K.LSTM(3, return_sequences=True), K.GRU(3))),
    "attention": ((None, 4), lambda: (Attention(), K.LayerNormalization(),
                  K.GlobalAveragePooling1D())),
}  # fmt: skip


class Attention(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.heads = keras.layers.MultiHeadAttention(2, 2)

    def call(self, x):
        return x + self.heads(x, x, use_causal_mask=True)


# test_rules.py tries each operation by numbers.
@pytest.mark.slow
@pytest.mark.parametrize("name", first_rows(MODELS, 1))
def test_facts_of_training_steps_are_true(name):
    """With gradients, optimizer and metrics. Nearly all lengths are known."""
    shape, layers = MODELS[name]
    model = model_of(*layers(), shape=shape)
    # Only to build it: without a graph that takes a fifth of the time.
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
    model.train_on_batch(np.zeros((2, *(n or 5 for n in shape))), np.zeros((2, 3)))
    dims = [(B, *(T if n is None else n for n in shape)), (B, 3)]
    sizes = ((5, 4), (2, 7))
    false, known = false_facts(lambda x, y: model.train_step((x, y)), dims, sizes=sizes)
    assert false == []
    assert known > 0.95
