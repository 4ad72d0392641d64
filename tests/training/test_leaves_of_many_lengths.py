"""Batches whose leaves have different numbers of rows train on replicas as on one device.

The answers are plain Keras's. Shares are uneven, and some are empty.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of
from helpers.one_device import assert_as_one_device

import keras_multigpu as kmg

WIDTH, CLASSES = 4, 3
SIZES = [(5, 14), (5, 14), (3, 7), (2, 2), (1, 3), (4, 4), (6, 2), (3, 0)]
"""How many labelled rows the batches have, and how many unlabelled ones."""


class FixMatch(keras.Model):
    """Trains on labelled rows, and on those of the unlabelled ones of which it is sure."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential(
            [
                keras.Input((WIDTH,)),
                keras.layers.Dense(6, activation="tanh", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.Dropout(0.2, seed=3),
                keras.layers.Dense(CLASSES),
            ]
        )

    def call(self, x, training=False):
        """The logits of one kind of rows, or of both, which predictions are of."""
        if not isinstance(x, dict):
            return self.net(x, training=training)
        logits = self.net(tf.concat([x["labelled"], x["unlabelled"]], 0), training=training)
        return {"both": logits, "labelled": logits[: tf.shape(x["labelled"])[0]]}

    def losses_of(self, data, training):
        x, y = data
        count = tf.shape(x["labelled"])[0]
        logits = self.net(tf.concat([x["labelled"], x["unlabelled"]], 0), training=training)
        known = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits[:count])
        others = logits[count:]
        labels = tf.argmax(others, 1)
        sure = tf.cast(tf.reduce_max(tf.nn.softmax(others), 1) > 0.4, tf.float32)
        guessed = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, others) * sure
        rows = tf.maximum(tf.cast(tf.shape(others)[0], tf.float32), 1.0)
        return tf.reduce_mean(known), tf.reduce_sum(guessed) / rows, sure

    def train_step(self, data):
        with tf.GradientTape() as tape:
            known, guessed, sure = self.losses_of(data, True)
            loss = known + 0.5 * guessed
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss, "sure": tf.reduce_sum(sure)}

    def test_step(self, data):
        known, guessed, sure = self.losses_of(data, False)
        return {"loss": known, "guessed": guessed, "sure": tf.reduce_sum(sure)}


def rows(count, seed):
    return np.random.default_rng(seed).normal(size=(count, WIDTH)).astype("float32")


def batches(sizes=SIZES):
    """Batches of NumPy's, of such sizes."""
    for number, (labelled, unlabelled) in enumerate(sizes):
        x = {"labelled": rows(labelled, number), "unlabelled": rows(unlabelled, 100 + number)}
        y = np.random.default_rng(number).integers(0, CLASSES, labelled)
        yield x, y


def dataset(sizes=SIZES):
    """The same as a dataset that knows no size, but how many batches there are."""
    x = dict.fromkeys(["labelled", "unlabelled"], tf.TensorSpec((None, WIDTH)))
    spec = x, tf.TensorSpec((None,), tf.int64)
    data = tf.data.Dataset.from_generator(lambda: batches(sizes), output_signature=spec)
    return data.apply(tf.data.experimental.assert_cardinality(len(sizes)))


def zipped(labelled=5, unlabelled=7):
    """Two datasets of batches side by side, whose sizes TensorFlow knows."""
    first = tf.data.Dataset.from_tensor_slices(rows(20, 1)).batch(labelled, drop_remainder=True)
    second = tf.data.Dataset.from_tensor_slices(rows(28, 2)).batch(unlabelled, drop_remainder=True)
    return tf.data.Dataset.zip(first, second).map(
        lambda x, u: ({"labelled": x, "unlabelled": u}, tf.cast(x[:, 0] > 0, tf.int64))
    )


DATA = {
    "dataset": dataset,
    "equal at first": lambda: dataset([(4, 4), (3, 3), (5, 2), (2, 2), (7, 3), (6, 6)]),
    "known sizes": zipped,
}


ROWS = [
    ("dataset", 3, {"steps_per_execution": 3}),
    ("equal at first", 2, {}),
    # Micro-batches take a leaf of another length whole.
    ("known sizes", 2, {"micro_batches": 3}),
]


@pytest.mark.parametrize(("data", "replicas", "options"), ROWS)
@pytest.mark.slow
def test_labelled_and_unlabelled_rows_train_as_on_one_device(data, replicas, options):
    """FixMatch: both sizes differ from batch to batch, and are sometimes equal or zero."""

    def numbers(place, **options):
        model = place(FixMatch())
        model.compile(keras.optimizers.SGD(0.1), **options)
        history = model.fit(DATA[data](), shuffle=False, verbose=0).history
        return history, model.get_weights()

    assert_as_one_device(numbers, replicas, **options)


@pytest.mark.slow
def test_evaluate_and_predict_give_what_one_device_gives():
    def numbers(place, **options):
        model = place(FixMatch())
        model.compile(keras.optimizers.SGD(0.1), **options)
        scores = model.evaluate(dataset(), verbose=0, return_dict=True)
        return scores, model.predict(dataset().map(lambda x, y: x), verbose=0)

    assert_as_one_device(numbers, replicas=3)


@pytest.mark.parametrize("replicas", [1, 2])
def test_arrays_of_different_lengths_are_named_by_keras(replicas):
    model = kmg.distribute(FixMatch(), devices=replicas)
    model.compile("sgd")
    with pytest.raises(ValueError, match="sizes: 5, 14"):
        model.fit(*next(batches()), verbose=0)


def fitted(replicas, x, y, units):
    """The loss of one batch, or its error; TensorFlow knows its size only if that is one."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(units)])
    model = kmg.distribute(model, replicas_of(replicas)) if replicas else model
    model.compile("sgd", "mse")
    first = 1 if len(y) == 1 else None
    spec = tf.TensorSpec((None, WIDTH)), tf.TensorSpec((first, *y.shape[1:]))
    data = tf.data.Dataset.from_generator(lambda: iter([(x, y)]), output_signature=spec)
    data = data.apply(tf.data.experimental.assert_cardinality(1))
    try:
        return model.fit(data, shuffle=False, verbose=0).history["loss"]
    except tf.errors.OpError as error:
        return type(error)


@pytest.mark.parametrize(("count", "shape"), [(8, (1, 3)), (3, (3,)), (1, (5, 3))])
@pytest.mark.slow
def test_targets_broadcast_against_outputs_as_on_one_device(count, shape):
    x, y = rows(count, 1), np.linspace(0, 1, np.prod(shape), dtype="float32").reshape(shape)
    one, three = (fitted(replicas, x, y, 3) for replicas in (0, 3))
    if isinstance(one, list):
        np.testing.assert_allclose(three, one, rtol=2e-5)
    else:
        assert three is one


class WithoutTheFirst(keras.layers.Layer):
    """Counts tokens after the first: none if there is none."""

    def call(self, tokens):
        shape = tf.shape(tokens[:, 1:])
        return tf.reduce_sum(tf.ones(shape), axis=1) + tf.cast(shape[1], "float32")


@pytest.mark.slow
def test_a_batch_of_empty_texts_has_a_step_of_its_own():
    """What is known of the length of `tokens[:, 1:]` would be -1."""
    inputs = keras.Input((None,), dtype="int32")
    model = kmg.distribute(keras.Model(inputs, WithoutTheFirst()(inputs)), devices=2)
    texts = [np.ones((3, length), "int32") for length in (3, 2, 0, 1)]
    assert [model.predict_on_batch(text)[0] for text in texts] == [4, 2, 0, 0]
    model.compile(loss=lambda y, outputs: outputs, jit_compile=False)
    for first in (0, 2):
        # A graph reads these, and finds the empty ones among them.
        data = tf.data.Dataset.from_generator(
            lambda first=first: ((text, np.zeros(3)) for text in texts[first:]),
            output_signature=(tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None])),
        ).apply(tf.data.experimental.assert_cardinality(4 - first))
        assert model.evaluate(data, verbose=0) == (0 if first else 6 / 4)
