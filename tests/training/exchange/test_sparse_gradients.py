"""Gradients of embeddings: rows of a table of three by two, by hand."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.exchange import sparse_gradients
from keras_multigpu.training.replica_group import ReplicaGroup


def rows(indices, values, table=(3, 2)):
    """A gradient that has these rows of a table."""
    values = np.array(values, "float32").reshape(-1, *table[1:])
    return tf.IndexedSlices(tf.constant(values), tf.constant(indices), tf.constant(table))


TWICE = rows([2, 0, 2], [[1, 2], [3, 4], [5, 6]])
"""A gradient with one row that comes twice."""


def content(gradient):
    """The rows of a gradient, in order."""
    pairs = zip(gradient.indices.numpy().tolist(), gradient.values.numpy().tolist(), strict=True)
    return list(pairs)


def test_equal_rows_are_added_up():
    """In the order in which they first came."""
    assert content(sparse_gradients.added_up(TWICE)) == [(2, [6, 8]), (0, [3, 4])]


def test_pieces_follow_one_another():
    """A row that is in both pieces stays twice, as on one device."""
    both = sparse_gradients.concatenated(rows([1], [[1, 1]]), rows([1, 0], [[2, 2], [3, 3]]))
    assert content(both) == [(1, [1, 1]), (1, [2, 2]), (0, [3, 3])]


def test_the_square_norm_is_that_of_the_table():
    """6 * 6 + 8 * 8 + 3 * 3 + 4 * 4, and of dense gradients what they have."""
    assert float(sparse_gradients.square_norm(TWICE)) == 125
    dense = [tf.constant([1.0, 2.0]), tf.constant([[3.0]], tf.float16)]
    assert float(sparse_gradients.square_norm_of_all([*dense, TWICE])) == 125 + 14
    assert float(sparse_gradients.square_norm_of_all([])) == 0


def test_the_spec_leaves_the_number_of_rows_open():
    """One graph takes gradients of any number of rows, and knows how wide these are."""
    widths = []

    @tf.function(input_signature=[sparse_gradients.rows_spec(TWICE)])
    def count(gradient):
        widths.append(gradient.values.shape.as_list())
        return tf.shape(gradient.indices)[0]

    assert int(count(TWICE)) == 3 and int(count(rows([1], [[1, 1]]))) == 1
    assert widths == [[None, 2]]


def test_a_gradient_gets_the_shape_of_its_table():
    """TensorFlow may not know it, or have values with more axes than rows."""
    table = keras.Variable(np.zeros((3, 2), "float32"))
    nested = tf.IndexedSlices(tf.ones((2, 1, 2)), tf.constant([0, 1]), tf.constant([3, 2]))
    found = sparse_gradients.of_table(nested, table)
    assert content(found) == [(0, [1, 1]), (1, [1, 1])]
    assert found.indices.dtype == found.dense_shape.dtype == tf.int64
    assert tf.get_static_value(found.dense_shape).tolist() == [3, 2]


@pytest.mark.parametrize("eager", [False, True])
def test_it_is_known_whether_equal_rows_were_added_up(eager):
    """Through what only changes the form of the indices, with a graph and without one."""
    seen = []

    def look(indices):
        unique = tf.cast(tf.reshape(tf.unique(indices)[0], [-1]), tf.int64)
        for each in (indices, unique):
            gradient = tf.IndexedSlices(tf.ones((2, 2)), each, tf.constant([3, 2]))
            seen.append(sparse_gradients.alike(gradient))
        return unique

    traced_with_rows(look, tf.constant([1, 1, 2]), eager)
    assert seen == [None, 0]
    assert sparse_gradients.alike(TWICE) is None


def traced_with_rows(look, rows, eager):
    """Call a function with rows that are noted, in a graph of any number of them or without one."""

    def noted(rows):
        with sparse_gradients.rows_noted(rows):
            look(rows)

    shape = [None] * rows.shape.rank
    (noted if eager else tf.function(noted, [tf.TensorSpec(shape, rows.dtype)]))(rows)


@pytest.mark.parametrize("eager", [False, True])
def test_positions_are_alike_for_any_part_of_the_batch(eager):
    """As many as there are, 0 if only the graph can know. Not so what rows decide, or chance."""
    seen = []

    def look(rows):
        for indices in (
            tf.range(3),
            tf.constant([1, 0, 1, 1]),
            tf.range(tf.shape(rows)[1]) + 1,
            tf.reshape(rows, [-1]),
            tf.random.uniform([2], maxval=3, dtype=tf.int32),
        ):
            gradient = tf.IndexedSlices(tf.ones((3, 2)), indices, tf.constant([3, 2]))
            seen.append(sparse_gradients.alike(gradient))

    traced_with_rows(look, tf.constant([[1, 1, 2], [1, 1, 2]]), eager)
    assert seen == [3, 4, None if eager else 0, None, None]


def test_parts_that_are_alike_are_added_to_each_other():
    """Two parts with the rows 2, 0, 2 are three rows; the sum has each once where that is known."""
    parts = sparse_gradients.concatenated(TWICE, TWICE)
    joined = sparse_gradients.joined_parts(parts, 3)
    assert content(joined) == [(2, [2, 4]), (0, [6, 8]), (2, [10, 12])]
    assert content(sparse_gradients.joined_parts(parts, 0)) == [(2, [12, 16]), (0, [6, 8])]
    assert sparse_gradients.joined_parts(parts, None) is parts


SPARSE = np.array([[1, 0, 2], [1, 3, 0], [0, 0, 4], [5, 6, 0], [7, 0, 0]], "float32")


@pytest.mark.parametrize(
    ("replicas", "own_step", "options"),
    [
        (2, False, {}),
        (1, False, {"micro_batches": 2}),
        (2, False, {"loss": lambda y, y_pred: keras.ops.mean(keras.ops.square(y - y_pred))}),
        (2, True, {}),
    ],
    ids=["replicas", "micro-batches", "a loss of the whole batch", "an own step"],
)
@pytest.mark.slow
def test_sparse_inputs_train_eagerly_as_on_one_device(replicas, own_step, options):
    """Adam takes each row once: those of all replicas and pieces are added up before."""

    class Net(keras.Sequential):
        if own_step:

            def train_step(self, data):
                return super().train_step(data)

    def weights(place, **options):
        keras.utils.set_random_seed(1)
        model = place(Net([keras.Input((3,), sparse=True), keras.layers.Dense(2)]))
        options = {"loss": "mse", "run_eagerly": True, **options}
        model.compile(keras.optimizers.Adam(0.1), **options)
        for first, last in ((0, 5), (2, 5)):
            x, y = tf.sparse.from_dense(SPARSE[first:last]), SPARSE[first:last, :2]
            model.train_on_batch(x, y)
        return model.get_weights()

    strategy = kmg.strategy("mirrored", devices=replicas)
    found = weights(lambda model: kmg.distribute(model, strategy), **options)
    for one, other in zip(found, weights(lambda model: model), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5)


class Positions(keras.layers.Layer):
    """Adds what two tables have: each place once, and some places several times."""

    def __init__(self):
        super().__init__()
        self.once = keras.layers.Embedding(4, 3)
        self.often = keras.layers.Embedding(2, 3)

    def call(self, x):
        often = self.often(keras.ops.convert_to_tensor([1, 0, 1, 1]))
        return x + self.once(keras.ops.arange(keras.ops.shape(x)[1])) + often


@pytest.mark.parametrize(
    ("replicas", "own_step", "options"),
    [
        (2, False, {}),
        (2, False, {"run_eagerly": True}),
        (1, False, {"micro_batches": 2}),
        (2, False, {"loss": lambda y, y_pred: keras.ops.mean(keras.ops.square(y - y_pred))}),
        (2, True, {}),
    ],
    ids=["replicas", "eagerly", "micro-batches", "a loss of the whole batch", "an own step"],
)
@pytest.mark.slow
def test_tables_of_positions_train_as_on_one_device(replicas, own_step, options):
    """Adam takes a place as often as on one device, not once for each replica or piece."""
    x = np.arange(20).reshape(5, 4) % 5

    class Net(keras.Model):
        if own_step:

            def train_step(self, data):
                return super().train_step(data)

    def weights(place, **options):
        keras.utils.set_random_seed(1)
        given = keras.Input((4,), dtype="int32")
        flat = keras.layers.Flatten()(Positions()(keras.layers.Embedding(5, 3)(given)))
        model = place(Net(given, keras.layers.Dense(1)(flat)))
        model.compile(keras.optimizers.Adam(0.1), **{"loss": "mse", **options})
        for _ in range(3):
            model.train_on_batch(x, x[:, :1] / 4)
        return model.get_weights()

    found = weights(lambda model: kmg.distribute(model, devices=replicas), **options)
    # In Keras a graph takes longer to make than all the steps.
    expected = weights(lambda model: model, run_eagerly=True)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("distinct", "expected"),
    [
        (False, [(2, [1, 1]), (0, [2, 2]), (2, [11, 11]), (0, [12, 12])]),
        (True, [(2, [12, 12]), (0, [14, 14])]),
    ],
)
def test_the_rows_of_all_replicas(distinct, expected):
    """One replica's after another's; the third has no examples, so its rows do not count.

    Rows that are distinct on each replica are so on one device, and equal ones add up.
    """
    group = ReplicaGroup(kmg.strategy("mirrored", devices=3))

    def on_replica(replica):
        indices = tf.constant([2, 0])
        if distinct:
            indices = tf.unique(indices)[0]
        values = tf.constant([[1.0, 1.0], [2.0, 2.0]]) + 10.0 * replica.id
        own = tf.IndexedSlices(values, indices, tf.constant([3, 2]))
        return sparse_gradients.rows_of_all(group, own, tf.constant(replica.id < 2))

    for each in tf.function(lambda: group.run(on_replica), autograph=False)():
        assert content(each) == expected
