"""`ReplicaMetrics`: one object for several models, and what is refused before training."""

import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from replica_metrics_models import fit, line

from keras_multigpu.callbacks import ReplicaMetrics
from keras_multigpu.callbacks.replica_metrics.window import Window

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")


def classifier(units, activation, loss):
    keras.utils.set_random_seed(2)
    layers = [keras.Input((3,)), keras.layers.Dense(units, activation=activation)]
    model = on_replicas(keras.Sequential(layers), 2)
    model.compile(keras.optimizers.SGD(0.0), loss)
    return model


@pytest.mark.in_test_all("test_probes.py has several models")
def test_a_second_model_gets_its_own_metrics(tmp_path):
    """Accuracy of two classes, then of four; the file is continued."""
    path = tmp_path / "replicas.csv"
    callback = ReplicaMetrics(["accuracy"], path=path)
    binary = classifier(1, "sigmoid", "binary_crossentropy")
    fit(binary, callback, x=X, y=(X[:, :1] > 0) * 1)
    model = classifier(4, "softmax", "sparse_categorical_crossentropy")
    y = np.arange(8) % 4
    history = fit(model, callback, x=X, y=y, batch_size=8)
    right = model.predict(X, verbose=0).argmax(-1) == y
    assert history["replica_0/accuracy"] == [right[:4].mean()]
    assert history["replica_1/accuracy"] == [right[4:].mean()]
    assert len(callback.windows) == 1
    assert len(path.read_text().splitlines()) == 1 + 2 * 2


@pytest.mark.in_test_all("test_probes.py counts compiled steps")
def test_compiling_again_starts_new_measurements():
    model, callback = line.__wrapped__(2), ReplicaMetrics(["mae"])
    fit(model, callback)
    probe = callback._probe
    fit(model, callback)
    assert callback._probe is probe
    assert len(callback.windows) == 2
    model.compile(keras.optimizers.SGD(0.0), "mae")
    fit(model, callback)
    assert callback._probe is not probe
    assert len(callback.windows) == 1


def test_a_slow_replica_is_named_once_in_a_fit(caplog):
    callback = ReplicaMetrics()

    def window(*times):
        values = {"compute_time": np.array(times), "step_time": np.full(2, 2.0)}
        return Window(0, 1, [0, 0], ["GPU:0", "GPU:1"], values)

    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        for times in ((1, 2), (1, 1), (1, 2), (2, 1), (1, 2)):
            for _ in range(3):
                callback._judge(window(*map(float, times)))
    told = [record.getMessage()[:9] for record in caplog.records]
    assert told == ["Replica 1", "Replica 0"]


def test_an_epoch_of_compiled_steps_has_no_speed():
    history = fit(line(1), ReplicaMetrics(), batch_size=10)
    for name in ("examples_per_second", "step_time", "compute_time", "data_wait"):
        assert np.isnan(history[f"replica_0/{name}"]).all()
    assert np.isnan(history["replicas/examples_per_second_min"]).all()


@keras.saving.register_keras_serializable("tests")
class Square(keras.layers.Layer):
    """Adds the mean square of its inputs as the loss."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


@pytest.mark.parametrize("dataset", [False, True])
def test_metrics_need_targets(dataset):
    layers = [keras.Input((3,)), keras.layers.Dense(2), Square()]
    model = on_replicas(keras.Sequential(layers), 2)
    model.compile(keras.optimizers.SGD(0.0))
    x = tf.data.Dataset.from_tensor_slices(X).batch(8) if dataset else X
    size = {} if dataset else {"batch_size": 8}
    with pytest.raises(ValueError, match=r"data have none.*Expected targets.*Leave out.*y=None"):
        model.fit(x, **size, verbose=0, callbacks=[ReplicaMetrics(["mae"])])
    history = model.fit(x, **size, verbose=0, callbacks=[ReplicaMetrics()]).history
    assert np.isfinite(history["replica_0/loss"]).all()


def test_two_in_one_fit_are_refused():
    with pytest.raises(
        ValueError, match=r"more than one `ReplicaMetrics`.*Expected at most one.*Received: call"
    ):
        fit(line(1), ReplicaMetrics(), ReplicaMetrics(["mae"]))
