"""`TrainingRun`: callbacks see the progress of `fit` and its logs, resize batches, and resume."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of
from helpers.reused_models import reused

import keras_multigpu as kmg
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.run import flattened, pythonic
from keras_multigpu.training.variables.model_state import ModelState


class Act(keras.callbacks.Callback):
    def __init__(self, begin=None, step=None, epoch=None):
        super().__init__()
        self.begin, self.step, self.epoch = begin, step, epoch

    def on_train_begin(self, logs=None):
        if self.begin:
            self.begin(self.model.training_run)

    def on_train_batch_end(self, batch, logs=None):
        if self.step:
            self.step(self.model.training_run)

    def on_epoch_end(self, epoch, logs=None):
        if self.epoch:
            self.epoch(self.model.training_run)


@reused
def network(replicas=2, **compiled):
    """A small model with dropout, batch statistics, momentum and a metric."""
    keras.utils.set_random_seed(3)
    layers = [keras.Input((3,)), keras.layers.Dense(4), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.3, seed=1), keras.layers.Dense(2)]
    model = kmg.distribute(keras.Sequential(layers), replicas_of(replicas))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss, metrics=["accuracy"], **compiled)
    return model


RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(22, 3)).astype("float32")
Y = RANDOM.integers(0, 2, 22)


def batches(**settings):
    return kmg.data.from_arrays(X, Y, **{"global_batch_size": 4, "seed": 7, **settings})


@pytest.mark.slow
def test_the_batch_size_changes_between_epochs():
    """Two epochs of batches of four, then of eleven: steps, bar and examples follow."""
    seen = []

    def grow(run):
        seen.append((run.global_batch_size, run.steps_per_epoch, run.step))
        if run.epoch == 1:
            run.set_batch_size(11, largest_share=3)

    pieces = []
    act = Act(epoch=grow, step=lambda run: pieces.append(run.micro_batches))
    model = network()
    model.fit(batches(), epochs=3, verbose=0, callbacks=[act])
    assert seen == [(4, 6, 6), (4, 6, 6), (11, 2, 2)]
    assert act.params["steps"] == 2
    assert pieces == [1] * 12 + [2] * 2
    assert replication_of(model).pieces == 1


def test_a_state_of_another_model_is_refused():
    state = ModelState.of(network())
    other = kmg.distribute(keras.Sequential([keras.Input((3,)), keras.layers.Dense(5)]))
    other.compile("sgd", "mse")
    with pytest.raises(ValueError, match="a different model: .*the state has.*Received: diff"):
        state.restore(other)


def test_numbers_become_python_floats():
    several = tf.constant([1.0, 2.0])
    logs = pythonic({"loss": tf.constant(1.5), "acc": np.float32(0.5), "n": 3, "each": several})
    each = logs.pop("each")
    assert type(each) is np.ndarray
    assert each.tolist() == [1, 2]
    assert list(logs.items()) == [("acc", 0.5), ("loss", 1.5), ("n", 3.0)]
    assert all(type(value) is float for value in logs.values())


def test_nested_logs_are_flattened():
    logs = {"loss": 1, "f1": {"class_0": 2, "deeper": {"class_1": 3}}, "acc": 4}
    assert list(flattened(logs).items()) == [
        ("acc", 4),
        ("class_0", 2),
        ("class_1", 3),
        ("loss", 1),
    ]
    assert flattened({}) == {}


@pytest.mark.slow
def test_a_fit_inside_a_callback_leaves_the_outer_one_its_probes():
    """Without its guard, the outer one would train on a number that is not one."""
    model = kmg.distribute(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), devices=2)
    model.compile("sgd", "mse")
    runs = []

    def fit_inside(run):
        if run.step == 1:
            model.fit(
                np.ones((2, 1)), np.ones((2, 1)), verbose=0, callbacks=[Act(begin=runs.append)]
            )
        runs.append(model.training_run)

    x = np.array([[1.0], [2.0], [np.nan], [3.0]], "float32")
    guard = kmg.callbacks.NaNGuard(action="skip")
    with pytest.warns(UserWarning, match="not finite"):
        model.fit(
            x, x, batch_size=2, shuffle=False, verbose=0, callbacks=[guard, Act(step=fit_inside)]
        )
    inner, *outer = runs
    assert outer[0] is outer[1] and inner is not outer[0]
    assert np.isfinite(model.get_weights()[0]).all()
