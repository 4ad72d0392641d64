"""What relates rows of a batch is found; what takes each row by itself is not."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

import keras_multigpu as kmg
from keras_multigpu.keras_internals import step_hooks
from keras_multigpu.training.replica_pass.rows_flow import RowsFlow


def found(function, place):
    """The operations that relate rows: in a graph of any length, of six, or without a graph."""

    def follow(x):
        flow = RowsFlow(x)
        with step_hooks.noted_operations(flow.note):
            losses = function(x)
        if place != "eager":
            flow.note_all(x.graph.get_operations())
        flow.find_sums([] if losses is None else [losses])
        kinds.extend(finding.kind for finding in flow.found)
        assert all(finding.where.startswith("test_rows_flow.py:") for finding in flow.found)

    kinds = []
    x = tf.constant(np.random.default_rng(0).normal(size=(6, 4)), tf.float32)
    if place == "eager":
        follow(x)
    else:
        spec = tf.TensorSpec([None if place == "open" else 6, 4])
        tf.function(follow, autograph=False).get_concrete_function(spec)
    return kinds


def standardized(x):
    mean, variance = tf.nn.moments(x, [0])
    return (x - mean) / tf.sqrt(variance)


RELATING = {
    "statistics": standardized,
    "after Keras's own": lambda x: standardized(
        layer(layers.BatchNormalization, -1)(x, training=True)
    ),
    "the same by Keras": lambda x: x - ops.mean(x, axis=0),
    "a maximum of all": lambda x: x / ops.max(x),
    "softmax": lambda x: ops.softmax(x, axis=0),
    "normalised": lambda x: ops.normalize(x, axis=0),
    "log of a sum of exponentials": lambda x: ops.logsumexp(x, axis=0),
    "sums so far": lambda x: ops.cumsum(x, axis=0),
    "products so far": lambda x: ops.cumprod(x, axis=0),
    "sorted": lambda x: ops.sort(x, axis=0),
    "the largest": lambda x: ops.argmax(x, axis=0),
    "the two largest": lambda x: ops.top_k(x[:, 0], 2),
    "reversed": lambda x: ops.flip(x, axis=0),
    "reversed by brackets": lambda x: x[::-1],
    "rolled": lambda x: ops.roll(x, 1, axis=0),
    "the next row": lambda x: x[1:] - x[:-1],
    "the first rows": lambda x: x[:2],
    "some rows": lambda x: ops.take(x, [0, 2], axis=0),
    "half of the rows": lambda x: x[: ops.shape(x)[0] // 2],
    "two halves": lambda x: ops.split(x, 2) if x.shape[0] else tf.split(x, 2),
    "differences of all pairs": lambda x: x[:, None] - x[None],
    "products of all pairs": lambda x: ops.matmul(x, ops.transpose(x)),
    "the same by name": lambda x: ops.einsum("id,jd->ij", x, x),
    "the same of all axes but one": lambda x: ops.tensordot(
        ops.reshape(x, (-1, 2, 2)), ops.reshape(x, (-1, 2, 2)), axes=(2, 2)
    ),
    "covariances": lambda x: ops.square(ops.matmul(ops.transpose(x), x)),
    "the root of a mean": lambda x: ops.sqrt(ops.mean(ops.square(x))),
    "a sum to add": lambda x: ops.sum(ops.square(x)),
    "in an order by chance": lambda x: x + tf.random.shuffle(x),
    "the same by Keras's chance": lambda x: x + keras.random.shuffle(x),
    "by a shuffled list": lambda x: ops.take(x, keras.random.shuffle(ops.arange(len_of(x))), 0),
    "in the order of drawn numbers": lambda x: tf.gather(
        x, tf.argsort(tf.random.uniform([len_of(x)]))
    ),
    "in a condition": lambda x: ops.cond(
        tf.random.uniform(()) > 0.5, lambda: standardized(x), lambda: standardized(2 * x)
    ),
    "in a loop": lambda x: tf.while_loop(
        lambda i, y: i < 2, lambda i, y: (i + 1, y / tf.reduce_sum(y, 0)), [0, x]
    ),
    "after a loop": lambda x: standardized(
        tf.while_loop(lambda i, y: i < 2, lambda i, y: (i + 1, 2 * y), [0, x])[1]
    ),
    "row by row": lambda x: tf.map_fn(lambda row: row - tf.reduce_mean(x, 0), x),
    "in Keras's map": lambda x: ops.map(lambda row: row * ops.max(x), x),
    "kept in a variable": lambda x: queue().assign(ops.concatenate([x, queue()])[:6]),
    "rows of a class": lambda x: tf.math.unsorted_segment_sum(x, tf.cast(x[:, 0] > 0, "int32"), 2),
}


@pytest.mark.parametrize("place", ["open", "fixed", "eager"])
@pytest.mark.parametrize("function", RELATING.values(), ids=RELATING)
def test_what_relates_rows_is_found_with_its_line(function, place):
    """Whether the length of the batch is open or fixed, and without a graph."""
    function(tf.ones((6, 4)))  # Layers are built.
    assert found(function, place)


IN_GRAPHS = {
    "row by row by Keras": lambda x: ops.vectorized_map(lambda row: row - ops.mean(x, 0), x),
    "in a function": lambda x: in_a_function(in_a_function(x)),
    "after a function": lambda x: standardized(scaled(x)),
}


@pytest.mark.parametrize("place", ["open", "fixed"])
@pytest.mark.parametrize("function", IN_GRAPHS.values(), ids=IN_GRAPHS)
def test_functions_that_a_graph_calls_are_looked_into(function, place):
    """With their lines, although they are traced once for all graphs."""
    function(tf.ones((6, 4)))
    assert found(function, place)


@tf.function(autograph=False)
def in_a_function(x):
    """What a function of TensorFlow's does, which is traced once for all graphs."""
    return standardized(layer(layers.BatchNormalization, -1)(x, training=True))


@tf.function(autograph=False)
def scaled(x):
    """Keras's own layers in a function."""
    return 2 * layer(layers.BatchNormalization, -1)(x, training=True)


@functools.cache
def layer(kind, *args, **kwargs):
    """A Keras layer, made once."""
    return kind(*args, **kwargs)


@functools.cache
def queue():
    """A variable for the rows of some batches."""
    return keras.Variable(tf.zeros((6, 4)), trainable=False)


def len_of(x):
    return ops.shape(x)[0]


def each_by_itself(x):
    """Much of what models do with rows."""
    weights = tf.ones((4, 5))
    hidden = ops.softmax(ops.matmul(x, weights)) + tf.ones(5)
    hidden = layer(layers.BatchNormalization)(hidden, training=True)
    columns = ops.concatenate([hidden[:, :2], hidden[..., 2:]], axis=1)
    squares = ops.reshape(columns, (-1, 5, 1)) * ops.expand_dims(columns, 1)
    flat = ops.reshape(squares, (ops.shape(x)[0], 25))
    attention = ops.einsum("bij,bkj->bik", squares, squares)
    heads = ops.transpose(ops.reshape(ops.matmul(attention, squares), (-1, 5, 5)), (1, 0, 2))
    order = ops.flip(ops.cumsum(ops.sort(columns, axis=1), axis=1), axis=1)
    best = ops.take_along_axis(order, ops.argmax(order, axis=1)[:, None], axis=1)
    images = layer(layers.Conv2D, 2, 3, padding="same")(ops.reshape(flat, (-1, 5, 5, 1)))
    sequence = layer(layers.LSTM, 3, return_sequences=True)(squares)
    pooled = layer(layers.GroupNormalization, 1)(images)
    chosen = columns[columns[:, 0] > 0.1]
    noise = tf.random.normal(tf.shape(x))
    kept = tf.boolean_mask(x, tf.random.uniform([len_of(x)]) > 0.5)
    mapped = ops.vectorized_map(lambda row: ops.sum(row * row) - row, x)
    in_turn = tf.map_fn(lambda row: row / tf.reduce_max(row), x)
    by_keras = ops.map(lambda rows: rows["x"] / ops.max(rows["y"]), {"x": x, "y": hidden})
    either = ops.cond(ops.sum(weights) > 0, lambda: layer(layers.GRU, 3)(squares), lambda: x[:, :3])
    words = ops.cast(x > 0, "int32") + 1
    lengths = ops.full((len_of(x),), 4, dtype="int32")
    ctc = ops.ctc_loss(words[:, :1], squares, lengths - 3, lengths)
    return [
        *(hidden, heads, ctc, best, pooled, sequence, chosen, noise, mapped, kept, in_turn, either),
        *(scaled(x), by_keras),
    ]


def by_number(x):
    """One row after another, as only a graph can tell."""
    return tf.while_loop(
        lambda i, total: i < len_of(x),
        lambda i, total: (i + 1, total + ops.max(x[i]) * ops.max(tf.gather(x, i))),
        [0, 0.0],
    )


@pytest.mark.parametrize("place", ["open", "fixed"])
def test_of_rows_in_their_turn_nothing_is_said(place):
    """Where a loop takes each by its number."""
    assert not found(by_number, place)


def two_batches(x):
    """Real and generated rows together, and apart again."""
    both = ops.concatenate([x, 2 * x], axis=0)
    labels = tf.concat([tf.ones((tf.shape(x)[0], 1)), tf.zeros((tf.shape(x)[0], 1))], axis=0)
    real, generated = tf.split(both * labels, 2)
    return real - generated + both[: ops.shape(x)[0]]


@pytest.mark.parametrize("place", ["open", "fixed", "eager"])
@pytest.mark.parametrize(
    "function",
    [
        each_by_itself,
        two_batches,
        lambda x: ops.mean(ops.square(x)) * 0.5 + ops.mean(ops.sum(x, axis=1)),
        lambda x: ops.sum(x) / ops.cast(ops.shape(x)[0], "float32"),
        lambda x: keras.losses.MeanSquaredError()(x, 2 * x),
    ],
)
def test_of_rows_by_themselves_nothing_is_said(function, place):
    """Nor of batches beside each other, nor of means over rows that are added as a loss."""
    function(tf.ones((6, 4)))
    assert not found(function, place)


class Statistics(layers.Layer):
    """Subtracts the mean of the batch, or adds a loss."""

    def __init__(self, adds=None):
        super().__init__()
        self.adds = adds

    def call(self, x):
        if self.adds is None:
            return x - ops.mean(x, axis=0)
        self.add_loss(self.adds(x))
        return x


@pytest.mark.parametrize(
    ("replicas", "options"),
    [(2, {}), (2, {"run_eagerly": True}), (1, {"micro_batches": 2})],
)
@pytest.mark.slow
def test_a_layer_of_ones_own_is_told_once(replicas, options, caplog):
    """With its line and what to write, in `fit` and `predict` together."""
    inputs = keras.Input((4,))
    hidden = keras.layers.BatchNormalization()(Statistics()(inputs))
    model = kmg.distribute(keras.Model(inputs, hidden), kmg.strategy("mirrored", devices=replicas))
    model.compile("sgd", "mse", **options)
    x = np.ones((5, 4), "float32")
    model.fit(x, x, verbose=0, batch_size=3)
    model.predict(x, verbose=0)
    (record,) = [
        record
        for record in caplog.records
        if record.name == "keras_multigpu" and record.levelno >= logging.WARNING
    ]
    assert "(test_rows_flow.py:" in record.message
    assert "`keras.layers.BatchNormalization`" in record.message


@pytest.mark.parametrize(
    ("adds", "told"),
    [
        (lambda x: ops.mean(ops.square(x)), False),
        (lambda x: ops.sum(x) / ops.cast(ops.shape(x)[0], "float32"), False),
        (lambda x: ops.sum(x), True),
        (lambda x: ops.sqrt(ops.mean(x)), True),
    ],
)
def test_what_a_layer_adds_may_be_a_mean(adds, told, caplog):
    """What is linear in means over the batch is right; a sum or a root is told."""
    inputs = keras.Input((4,))
    model = keras.Model(inputs, Statistics(adds)(inputs))
    model = kmg.distribute(model, kmg.strategy("mirrored", devices=2))
    model.compile(loss="mse")
    x = np.ones((5, 4), "float32")
    model.test_on_batch(x, x)
    assert told == any("relates examples" in record.message for record in caplog.records)


@pytest.mark.parametrize(
    ("length", "mask_zero", "told"), [(None, False, True), (None, True, False), (3, False, False)]
)
@pytest.mark.slow
def test_texts_that_are_padded_to_the_longest_are_told(length, mask_zero, told, caplog):
    """A share has another longest text; a mask leaves the padding out."""
    words = layers.TextVectorization(vocabulary=["a", "b"], output_sequence_length=length)
    model = keras.Sequential(
        [
            keras.Input((1,), dtype="string"),
            words,
            layers.Embedding(4, 2, mask_zero=mask_zero),
            layers.GlobalAveragePooling1D(),
        ]
    )
    texts = tf.constant([["a b a"], ["b"], ["a"]])
    found = kmg.distribute(model, devices=2).predict(texts, verbose=0)
    assert told == ("padding to the longest" in caplog.text)
    assert told == (not np.allclose(found, model(texts), atol=1e-6))


@pytest.mark.parametrize(
    ("shape", "mask_zero", "told"),
    [(None, False, True), (None, True, False), ([None, 3], False, False)],
)
def test_ragged_rows_that_are_padded_to_the_longest_are_told(shape, mask_zero, told, caplog):
    """As texts are."""

    class Padded(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding = layers.Embedding(4, 2, mask_zero=mask_zero)
            self.pooling = layers.GlobalAveragePooling1D()

        def call(self, x):
            dense = x.to_tensor(shape=shape) if isinstance(x, tf.RaggedTensor) else x
            return self.pooling(self.embedding(dense))

    rows, model = tf.ragged.constant([[1, 2, 1], [2], [1]]), Padded()
    expected = model(rows)
    data = tf.data.Dataset.from_tensors(rows)
    found = kmg.distribute(model, devices=2).predict(data, verbose=0)
    assert told == ("padding to the longest" in caplog.text)
    assert told == (not np.allclose(found, expected, atol=1e-6))
