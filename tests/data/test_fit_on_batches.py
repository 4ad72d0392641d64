"""`fit`, `evaluate` and `predict` on `Batches`: the same numbers as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.example_source import Torn
from helpers.reused_models import reused

import keras_multigpu as kmg
from keras_multigpu.data import Batches

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(29, 8)).astype("float32")
Y = RANDOM.integers(0, 3, 29)


@reused
def compiled(replicas=None, **settings):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(3)]
    )
    if replicas:
        model = kmg.distribute(model, kmg.strategy(devices=replicas))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], weighted_metrics=["accuracy"], **settings)
    return model


def by_hand(batches, epochs, **fit):
    model = compiled()
    for epoch in epochs:
        history = model.fit(batches.epoch(epoch), shuffle=False, verbose=0, **fit).history
    return model, history


def assert_same(model, other):
    assert model is not other
    weights = [one if isinstance(one, list) else one.get_weights() for one in (model, other)]
    for weight, expected in zip(*weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_training_equals_one_device():
    """Weights, logs and metrics after three epochs, with a last batch of five examples."""
    batches = kmg.data.from_arrays(X, Y, global_batch_size=8, balance="class_weight")
    model = compiled(3)
    history = model.fit(batches, epochs=3, verbose=0)
    expected, logs = by_hand(batches, range(3))
    assert_same(model, expected)
    for name, values in logs.items():
        np.testing.assert_allclose(history.history[name][-1], values[-1], rtol=2e-5, err_msg=name)


class Reads(keras.Model):
    """Reads whatever leaves its inputs have: numbers, texts or ragged rows."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        leaves = [leaf for leaf in keras.tree.flatten(x) if leaf is not None]
        return self.dense(tf.concat([*map(as_vectors, leaves)], axis=1))


def as_vectors(leaf):
    if leaf.dtype == tf.string:
        return tf.one_hot(tf.strings.to_hash_bucket_fast(leaf, 7), 7)
    if isinstance(leaf, tf.RaggedTensor):
        return tf.reduce_sum(tf.one_hot(leaf, 7).to_tensor(), axis=1)
    return leaf


RAGGED = tf.RaggedTensor.from_row_lengths(np.arange(87) % 7, [1, 2, 3, 4, 5] * 5 + [3] * 4)
WORDS = np.array(["red", "green", "blue"], object)[Y]
STRUCTURES = {
    "dict in a dict": lambda **given: kmg.data.from_arrays({"a": X, "b": {"c": -X}}, Y, **given),
    "nested tuples": lambda **given: kmg.data.from_source(
        range(29), lambda i: ((X[i], (X[i, :2], {"a": X[i, 2:]})), Y[i]), **given
    ),
    "texts": lambda **given: kmg.data.from_arrays((X, WORDS), Y, **given),
    "ragged rows": lambda **given: kmg.data.from_dataset(
        tf.data.Dataset.from_tensor_slices((RAGGED, Y)).batch(2), **given
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.slow
def test_inputs_of_every_structure_train_as_on_one_device(name):
    batches = STRUCTURES[name](global_batch_size=8)

    def trained(replicas=None):
        keras.utils.set_random_seed(0)
        model = Reads()
        model(next(iter(batches.epoch(0)))[0])
        if replicas:
            model = kmg.distribute(model, kmg.strategy(devices=replicas))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1), loss)
        data = batches if replicas else batches.epoch(0)
        history = model.fit(data, shuffle=False, verbose=0).history
        return [*model.get_weights(), np.array(history["loss"])]

    assert_same(trained(3), trained())


@pytest.mark.slow
def test_evaluation_and_prediction_keep_the_order_of_the_source():
    batches = kmg.data.from_arrays(X, Y, global_batch_size=8, balance="oversample")
    model = compiled(2)
    np.testing.assert_allclose(
        model.predict(batches, verbose=0), model.predict(X, verbose=0), rtol=1e-5
    )
    logs = model.evaluate(batches, return_dict=True, verbose=0)
    assert logs == pytest.approx(model.evaluate(X, Y, return_dict=True, verbose=0), rel=1e-5)
    history = model.fit(batches, validation_data=batches, epochs=2, verbose=0).history
    logs = model.evaluate(X, Y, return_dict=True, verbose=0)
    assert history["val_loss"][-1] == pytest.approx(logs["loss"], rel=1e-5)


@pytest.mark.slow
def test_a_damaged_example_is_named():
    model, batches = compiled(2), Batches(Torn(X, Y, {3}), global_batch_size=8)
    with pytest.raises(ValueError, match="page 3 cannot be read: torn in two"):
        model.fit(batches, verbose=0)
    with pytest.raises(ValueError, match="page 3"):
        compiled(2, steps_per_execution=2).fit(batches, verbose=0)
    with pytest.raises(tf.errors.OpError, match="page 3 cannot be read: torn in two"):
        list(batches.epoch(0))


@pytest.mark.slow
def test_skipped_examples_do_not_count():
    """Weights and logs equal those of one device that never saw these examples.

    A whole batch is lost: the epoch is one step shorter.
    """
    damaged = {0, 5, 6, *range(8, 16), 28}
    settings = {"global_batch_size": 8, "shuffle": False}
    batches = Batches(Torn(X, Y, damaged), on_error="skip", **settings)
    model = compiled(3)
    with pytest.warns(UserWarning, match=f"skipped {len(damaged)} damaged example"):
        history = model.fit(batches, epochs=2, verbose=0).history
    rows = [[i for i in range(b, min(b + 8, 29)) if i not in damaged] for b in range(0, 29, 8)]
    spec = (tf.TensorSpec((None, 8)), tf.TensorSpec((None,), tf.int32))
    remaining = tf.data.Dataset.from_generator(
        lambda: ((X[row], Y[row]) for row in rows if row), output_signature=spec
    ).apply(tf.data.experimental.assert_cardinality(sum(map(bool, rows))))
    expected = compiled()
    logs = expected.fit(remaining, epochs=2, shuffle=False, verbose=0).history
    assert_same(model, expected)
    for name, values in logs.items():
        np.testing.assert_allclose(history[name], values, rtol=2e-5, err_msg=name)


@pytest.mark.slow
def test_only_epochs_that_are_trained_warn_of_damage():
    batches = Batches(Torn(X, Y, {3, 7}), on_error="skip", global_batch_size=29)
    with pytest.warns(UserWarning) as warned:
        compiled(2).fit(batches, epochs=2, verbose=0)
    epochs = [str(one.message).split(" skipped")[0] for one in warned]
    assert sorted(epochs) == ["Epoch 1", "Epoch 2"]


@pytest.mark.slow
def test_quarantine_lists_each_damaged_example_once():
    batches = Batches(Torn(X, Y, {3, 7}), on_error="skip", global_batch_size=8)
    with pytest.warns(UserWarning) as warned:
        compiled(2).fit(batches, epochs=2, validation_data=batches, verbose=0)
    assert sorted(batches.quarantine) == [("page 3", "torn in two"), ("page 7", "torn in two")]
    first = [str(w.message) for w in warned if "Epoch 1 skipped 2 damaged" in str(w.message)]
    assert "page 3 (torn in two), page 7 (torn in two)" in first[0]


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_model_that_is_not_distributed_is_named(method):
    batches = kmg.data.from_arrays(X, Y, global_batch_size=8)
    # A missing attribute is missing for whatever else asks, such as debuggers.
    assert not hasattr(batches, "workers")
    with pytest.raises(
        AttributeError,
        match=r"model = keras_multigpu\.distribute\(model\).*Received: batches=Batches\(",
    ):
        getattr(compiled(), method)(batches, verbose=0)
    with pytest.raises(TypeError, match=r"cannot be iterated over.*Write `batches\.epoch\(0\)`"):
        batches[0]


def test_validation_split_refers_to_the_split_method():
    batches = kmg.data.from_arrays(X, Y, global_batch_size=8)
    with pytest.raises(ValueError, match=r"train, validation = batches\.split\(0\.25\).*Received"):
        compiled(1).fit(batches, validation_split=0.25, verbose=0)
