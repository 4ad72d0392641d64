"""Mixing in a pipeline gives the same training on any number of replicas and workers."""

import keras
import numpy as np
import pytest
from helpers.example_source import Torn
from helpers.reused_models import reused

import keras_multigpu as kmg
from keras_multigpu.augmentation import Mix
from keras_multigpu.data import Batches

RANDOM = np.random.default_rng(0)
X = RANDOM.uniform(-1, 1, (29, 4, 4, 1)).astype("float32")
Y = np.repeat([0, 1, 2], [4, 8, 17])
SWITCH = Mix(num_classes=3)


@reused
def compiled(replicas=None):
    """A small model for soft labels, in plain Keras on one device or on replicas."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(3)]
    )
    if replicas:
        model = kmg.distribute(model, kmg.strategy(devices=replicas))
    loss = keras.losses.CategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.5), loss, weighted_metrics=["accuracy"])
    return model


def losses(batches, replicas):
    history = compiled(replicas).fit(batches, epochs=2, verbose=0).history
    return history["loss"]


def rows_of(dataset):
    return [np.concatenate(parts) for parts in zip(*dataset.as_numpy_iterator(), strict=True)]


@pytest.mark.slow
def test_training_equals_keras_on_the_same_batches():
    """Plain Keras on one device gets the mixed batches and their weights as a dataset."""
    batches = kmg.data.from_arrays(
        X, Y, global_batch_size=8, augment=SWITCH, balance="class_weight"
    )
    model, expected = compiled(2), compiled()
    model.fit(batches, verbose=0)
    expected.fit(batches.epoch(0), shuffle=False, verbose=0)
    for weight, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_workers_read_what_one_process_reads(workers=2):
    settings = {"global_batch_size": 8, "augment": SWITCH, "seed": 3}
    batches = kmg.data.from_arrays(X[:24], Y[:24], **settings)
    whole = rows_of(batches.epoch(1))
    assert (whole[1].max(1) < 1).sum() > 3
    parts = [rows_of(batches.epoch(1, shard=(part, workers))) for part in range(workers)]
    for kind, values in enumerate(whole):
        joined = [part[kind].reshape(3, 8 // workers, *values.shape[1:]) for part in parts]
        joined = np.concatenate(joined, axis=1).reshape(values.shape)
        np.testing.assert_allclose(joined, values, rtol=1e-5, atol=1e-6)


def test_class_weights_before_the_mix_cost_what_both_parts_cost():
    """With class weights w and shares l, l * w_i * CE_i + (1 - l) * w_j * CE_j."""
    batches = kmg.data.from_arrays(X[:28], Y[:28], global_batch_size=8, balance="class_weight")
    x, y, weights = rows_of(batches.epoch(0))
    mixed = rows_of(batches.with_(augment=Mix(1.0, None, num_classes=3)).epoch(0))
    partners = np.arange(28) ^ 1
    assert (y != y[partners]).sum() > 8
    difference = (x - x[partners]).reshape(28, -1)
    moved = (mixed[0] - x[partners]).reshape(28, -1)
    share = (moved * difference).sum(1) / (difference**2).sum(1)
    assert share.min() < 0.2 and share.max() > 0.8
    log = np.log(np.random.default_rng(1).dirichlet(np.ones(3), 28))
    costs = weights * -log[np.arange(28), y]
    others = weights[partners] * -log[np.arange(28), y[partners]]
    found = mixed[2] * -(mixed[1] * log).sum(1)
    np.testing.assert_allclose(found, share * costs + (1 - share) * others, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:Epoch . skipped 1 damaged example")
@pytest.mark.slow
def test_skipped_examples_are_not_mixed():
    batches = Batches(
        Torn(X, Y, {3}),
        on_error="skip",
        global_batch_size=8,
        shuffle=False,
        augment=Mix(cut_mix=None, num_classes=3),
    )
    np.testing.assert_allclose(losses(batches, 2), losses(batches, 1), rtol=1e-5)
    images, labels = rows_of(batches.epoch(0))
    assert images.shape[0] == labels.shape[0] == 28


def test_batches_without_labels_are_refused():
    batches = kmg.data.from_arrays(X, augment=SWITCH)
    with pytest.raises(ValueError, match="mixing needs labels"):
        batches.epoch(0)
    assert compiled(2).predict(batches, verbose=0).shape == (29, 3)


@keras.saving.register_keras_serializable("tests")
class MixedLoss(keras.Model):
    """Mixes inside the model, on each replica, and returns the loss of each row."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mix_up = Mix(1.0, None, num_classes=3, seed=1)
        self.flatten, self.dense = keras.layers.Flatten(), keras.layers.Dense(3)

    def call(self, data, training=False):
        data = self.mix_up(data, training=training)
        logits = self.dense(self.flatten(data["images"]))
        return keras.ops.categorical_crossentropy(data["labels"], logits, from_logits=True)


@pytest.mark.slow
def test_in_a_model_each_row_has_its_own_draw_and_replays():
    """Rows 0, 2, 4 and 6 hold the same pair, on two replicas; their mixtures differ."""
    data = {"images": X[[0, 1] * 4], "labels": np.array([0, 1] * 4)}

    def of_row(row):
        def metric(numbers, loss):
            return 8 * loss * keras.ops.cast(numbers == row, "float32")

        metric.__name__ = f"row_{row}"
        return metric

    def losses_of_rows():
        keras.utils.set_random_seed(0)
        model = MixedLoss()
        model(data)
        model = kmg.distribute(model, kmg.strategy(devices=2))
        model.compile("sgd", lambda y, loss: loss, metrics=[of_row(row) for row in (0, 2, 4, 6)])
        numbers = np.arange(8, dtype="float32")
        history = model.fit(data, numbers, batch_size=8, shuffle=False, verbose=0).history
        return [history[f"row_{row}"][0] for row in (0, 2, 4, 6)]

    first = losses_of_rows()
    assert first == losses_of_rows()
    assert len(set(first)) == 4
