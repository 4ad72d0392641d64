"""`explain` shows which parts of a step replicas share; expected numbers are worked out by hand."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_multigpu as kmg


def line_with(words):
    """The first line of this file with these words, as `explain` prints it."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return f"{Path(__file__).name}:{[words in line for line in lines].index(True) + 1}"


class Contrast(keras.Sequential):
    """A contrastive loss: each output is compared with all others."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        logits = tf.matmul(y_pred, y_pred, transpose_b=True)  # line of the gather
        labels = tf.range(tf.shape(logits)[0])
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def distributed(model, **compiled):
    model = kmg.distribute(model, devices=1)
    model.compile("sgd", jit_compile=False, **compiled)
    return model


def test_a_dense_network_shares_everything(capsys):
    """Only gradients and the loss are summed, and all matrix products are shared."""
    model = distributed(keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]), loss="mse")
    found = kmg.explain(model)
    assert (found.shared, found.gathered_bytes, found.replicas) == (1.0, 0, 2)
    # 12 weights and 3 biases in float32, and the loss and its metric.
    assert 4 * 15 <= found.summed_bytes <= 4 * 15 + 32
    assert found.text == capsys.readouterr().out[:-1]
    assert str(found).startswith("<Explanation train_step on 2 replicas: exact")
    assert "train_step on 2 replicas, in batches of 32: exact; all of the arithmetic" in found.text


def test_the_line_that_gathers_is_named_with_what_it_costs():
    """A product that needs all rows gathers them, and its own rows are then shared."""
    model = distributed(Contrast([keras.Input((64,)), keras.layers.Dense(8, use_bias=False)]))
    found = kmg.explain(model, np.zeros((16, 64), "float32"), batch_size=16, replicas=4)
    place = line_with("line of the gather")
    (gather,) = [part for part in found.parts if part.kind == "gathered"]
    assert (gather.place, gather.operation, gather.bytes) == (place, "MatMul", 4 * 16 * 8)
    assert found.shared == 1.0
    assert found.summary.endswith(f"all of the arithmetic is shared; {place} gathers 512 bytes")


def test_without_data_the_answer_is_the_same_as_for_arrays(monkeypatch):
    """It holds for batches of any size, although a median needs the size of its axis."""

    class Median(keras.layers.Layer):
        def call(self, x):
            return x + keras.ops.median(x, axis=1, keepdims=True)

    model = keras.Sequential([keras.Input((4,)), Median(), keras.layers.Dense(2)])
    model = distributed(model, loss="mse")
    made_up = kmg.explain(model)
    given = kmg.explain(model, np.zeros((70, 4), "float32"), np.zeros((70, 2), "float32"))
    assert made_up.text == given.text
    # The forms of `verify`, and of datasets.
    batch = np.zeros((70, 4), "float32"), np.zeros((70, 2), "float32")
    assert kmg.explain(model, batch).text == given.text
    assert kmg.explain(model, (*batch, np.ones(70, "float32"))).text != given.text
    # The machine's free memory changes.
    monkeypatch.setattr("keras_multigpu.explanation.memory.available_bytes", lambda: 10**9)
    assert kmg.memory(model, batch).text == kmg.memory(model, *batch).text


def test_a_dict_of_inputs_in_a_tuple_is_x():
    """However many inputs it names, as those of keras-hub do."""
    inputs = {"a": keras.Input((4,), name="a"), "b": keras.Input((2,), name="b")}
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(list(inputs.values())))
    model = distributed(keras.Model(inputs, outputs), loss="mse")
    batch = {"a": np.zeros((70, 4)), "b": np.zeros((70, 2))}, np.zeros((70, 1))
    assert kmg.explain(model, batch).text == kmg.explain(model, *batch).text


def test_a_tuple_of_all_inputs_is_x():
    class Alone(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_mean(y_pred)

    inputs = [keras.Input((4,)), keras.Input((2,))]
    outputs = keras.layers.Dense(1)(keras.layers.Concatenate()(inputs))
    x = np.zeros((70, 4), "float32"), np.zeros((70, 2), "float32")
    assert kmg.explain(distributed(Alone(inputs, outputs)), x).shared == 1.0


def test_unknown_lengths_are_assumed_to_be_large():
    """Images of unknown size count as 128 pixels wide, like photographs."""
    layers = [keras.layers.Conv2D(2, 3, strides=2) for _ in range(5)]
    last = [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]
    model = distributed(
        keras.Sequential([keras.Input((None, None, 3)), *layers, *last]), loss="mse"
    )
    found = kmg.explain(model)
    assert (found.shared, found.gathered_bytes) == (1.0, 0)


class Ranked(keras.Sequential):
    """Operations after a sort of the batch are computed whole on every replica."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        in_order = tf.sort(tf.stop_gradient(x), axis=0)  # line of the sort
        return tf.reduce_sum(tf.matmul(in_order, tf.ones((64, 8)))) + tf.reduce_sum(y_pred)  # whole


def test_operations_computed_whole_are_a_share_of_the_arithmetic():
    """Two of three equal products are shared, but not the one after the sort."""
    model = distributed(Ranked([keras.Input((64,)), keras.layers.Dense(8, use_bias=False)]))
    found = kmg.explain(model, np.zeros((16, 64), "float32"), batch_size=16)
    assert found.shared == pytest.approx(2 / 3)
    (whole,) = [part for part in found.parts if part.kind == "whole"]
    assert (whole.place, whole.operation) == (line_with("# whole"), "MatMul")
    assert whole.arithmetic == pytest.approx(1 / 3)
    assert {part.place for part in found.parts if part.kind == "gathered"} == {
        line_with("line of the sort")
    }


def test_a_step_that_runs_on_one_replica_says_so():
    class Text(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            text = tf.strings.reduce_join(tf.strings.as_string(y_pred))
            return tf.reduce_mean(y_pred) * tf.cast(tf.strings.length(text), tf.float32)

    model = distributed(Text([keras.Input((4,)), keras.layers.Dense(2)]))
    found = kmg.explain(model, np.zeros((6, 4), "float32"))
    assert found.reason and "one replica takes the whole batch" in found.text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": keras.Sequential()}, "`model` is not distributed"),
        ({"replicas": 0}, "replicas"),
        ({}, "`x` is missing"),
        ({"x": ([np.zeros((2, 3))] for _ in range(2))}, "is a generator"),
    ],
)
def test_what_cannot_be_explained_is_refused_with_a_reason(arguments, words):
    model = kmg.distribute(keras.Sequential([keras.layers.Dense(2)]), devices=1)
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=words):
        kmg.explain(**{"model": model} | arguments)


@pytest.mark.parametrize(("width", "warned"), [(64, False), (4000, True)])
def test_one_warning_names_a_gather_that_slows_steps(width, warned, caplog):
    """The warning names its line. A small gather causes no warning."""

    class Sorted(keras.Sequential):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return tf.reduce_sum(y_pred) + tf.reduce_sum(tf.sort(x, axis=0)[0])  # slow line

    model = kmg.distribute(Sorted([keras.Input((width,)), keras.layers.Dense(1)]), devices=2)
    model.compile("sgd", jit_compile=False)
    with caplog.at_level("WARNING", logger="keras_multigpu"):
        model.fit(np.zeros((250, width), "float32"), batch_size=100, verbose=0)
    said = [record.message for record in caplog.records if "rows of all" in record.message]
    assert len(said) == warned
    assert all(line_with("slow line") in message for message in said)


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_it_says_what_sharding_moves(shard):
    """A scatter and a gather are a sum: new weights are gathered, or those of the only bucket."""
    parts = [keras.layers.Dense(256, use_bias=False) for _ in range(2)]
    model = keras.Sequential([keras.Input((256,)), *parts])
    model = kmg.distribute(model, devices=2, shard=shard)
    model.compile("adam", "mse", jit_compile=False)
    found = kmg.explain(model)
    kernels = 2 * 4 * 256**2
    moved = {part.kind: part.bytes for part in found.parts}
    assert moved["scattered"] == moved["weights"] == kernels and found.summed_bytes < 100
    assert found.times_unsharded == pytest.approx(1, abs=0.01)
    assert "moves 1.0 times the bytes of no `shard`" in found.text


def test_weights_that_a_condition_updates_count_whole():
    """With a loss scale replicas run both branches, and gather the new weights behind them."""
    model = kmg.distribute(
        keras.Sequential([keras.Input((256,)), keras.layers.Dense(256, use_bias=False)]),
        devices=2,
        shard="optimizer",
    )
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model.compile(optimizer, "mse", jit_compile=False)
    found = kmg.explain(model)
    (weights,) = [part for part in found.parts if part.kind == "weights"]
    assert weights.bytes == 4 * 256 * 256
    assert found.times_unsharded == pytest.approx(1, rel=0.01)
