"""`ReplicaMetrics`: the numbers of each replica, against values by hand."""

import math
import time

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import on_replicas
from helpers.fake_run import fake_fit
from helpers.naps import with_naps
from helpers.rows_in_python import zeros_after
from helpers.stopped_runs import StopAt, Stopped

from keras_multigpu.callbacks import ReplicaMetrics, ResumableCheckpoint
from keras_multigpu.training.watching.probe import Probe

# Some models have no weights, so that their outputs are known.
pytestmark = pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")

# Two batches of four and a ragged one of two.
X = np.arange(1.0, 11.0, dtype="float32")[:, None]
Y = np.zeros((10, 1), "float32")


def line(replicas=None, **compiled):
    """A model `y = w x` with `w = 1` that stays as it is, to be fitted to zero."""
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
    model = keras.Sequential([keras.Input((1,)), layer])
    model = model if replicas is None else on_replicas(model, replicas)
    model.compile(keras.optimizers.SGD(0.0), "mse", **compiled)
    return model


def fit(model, *callbacks, x=X, y=Y, batch_size=4, epochs=1):
    """The history of training in the order of the examples."""
    given = {"shuffle": False, "verbose": 0, "callbacks": list(callbacks)}
    return model.fit(x, y, batch_size=batch_size, epochs=epochs, **given).history


def faked(*callbacks, model=None, replicas=2, epochs=1, **arguments):
    """The same of a fake run of a plain model."""
    given = {"x": X, "y": Y, "replicas": replicas, "epochs": epochs, **arguments}
    return fake_fit(model or line(), *callbacks, **given).history


def by_hand(shares):
    """Loss, error, examples and gradient norm of a replica with these shares."""
    squares = np.concatenate([np.square(share) for share in shares])
    # The gradient of the mean of (w x)^2 is 2 w mean(x^2).
    norms = [2 * np.mean(np.square(share)) for share in shares if len(share)]
    everything = np.concatenate(shares)
    return squares.mean(), np.abs(everything).mean(), len(everything), np.mean(norms)


SHARES = {
    2: [[[1, 2], [5, 6], [9]], [[3, 4], [7, 8], [10]]],
    # The ragged batch leaves two of four replicas without an example.
    4: [[[1], [5], [9]], [[2], [6], [10]], [[3], [7], []], [[4], [8], []]],
}


@pytest.mark.parametrize(
    ("replicas", "real"), [(2, False), (4, False), pytest.param(4, True, marks=pytest.mark.slow)]
)
def test_each_replica_has_its_own_numbers(replicas, real):
    metrics = ReplicaMetrics(["mae"])
    if real:
        history = fit(line(replicas, steps_per_execution=2), metrics)
    else:
        history = faked(metrics, replicas=replicas)
    for replica, shares in enumerate(SHARES[replicas]):
        found = [
            history[f"replica_{replica}/{name}"]
            for name in ("loss", "mae", "examples", "gradient_norm")
        ]
        np.testing.assert_allclose(np.ravel(found), by_hand(shares), rtol=1e-5)
    losses = [by_hand(shares)[0] for shares in SHARES[replicas]]
    np.testing.assert_allclose(history["replicas/loss_min"], [min(losses)], rtol=1e-5)
    np.testing.assert_allclose(history["replicas/loss_max"], [max(losses)], rtol=1e-5)
    np.testing.assert_allclose(
        history["replicas/loss_spread"], [max(losses) - min(losses)], rtol=1e-5, atol=1e-5
    )


def test_the_progress_bar_shows_only_the_mean(capsys):
    """Which hides that one of two replicas has another loss."""
    history = faked(ReplicaMetrics(), verbose=2)
    assert "replica_0" not in capsys.readouterr().out
    np.testing.assert_allclose(history["loss"], [np.mean(X**2)], rtol=1e-6)
    assert history["replica_0/loss"][0] < 30 < 45 < history["replica_1/loss"][0]


def test_a_replica_without_examples_has_no_loss():
    """It is NaN, and does not count in minimum and spread."""
    history = faked(ReplicaMetrics(["mae"]), x=X[:1], y=Y[:1])
    assert math.isnan(history["replica_1/loss"][0])
    assert math.isnan(history["replica_1/mae"][0]) and history["replica_0/mae"] == [1.0]
    assert math.isnan(history["replica_1/gradient_norm"][0])
    assert history["replica_1/examples"] == [0.0]
    assert history["replicas/loss_min"] == history["replicas/loss_max"] == [1.0]
    assert history["replicas/loss_spread"] == [0.0]


@pytest.mark.parametrize(
    ("per_execution", "steps", "examples"), [(1, (2, 3), (6, 10)), (2, (1, 3), (2, 10))]
)
def test_times_are_those_of_a_step(per_execution, steps, examples):
    """Without the first ones. The second replica computes for three seconds, the first for one."""
    given = {"epochs": 2, "steps_per_execution": per_execution}
    history = faked(ReplicaMetrics(), moments=[(0, 1, 4), (0, 3, 4)], **given)
    for epoch in (0, 1):
        value = {k: v[epoch] for k, v in history.items()}
        assert (value["replica_0/compute_time"], value["replica_1/compute_time"]) == (1, 3)
        assert (value["replica_0/sync_time"], value["replica_1/sync_time"]) == (3, 1)
        assert value["replicas/compute_time_spread"] == 2
        speeds = value["replica_0/examples_per_second"] + value["replica_1/examples_per_second"]
        measured = speeds * value["replica_0/step_time"] * steps[epoch]
        np.testing.assert_allclose(measured, examples[epoch], rtol=1e-6)


def test_metrics_mean_what_they_mean_in_compile():
    """Names, objects, and "accuracy", which depends on the predictions."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="softmax")])
    wanted = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]
    compiled = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", metrics=compiled)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 3)).astype("float32"), random.integers(0, 4, 8)
    history = faked(ReplicaMetrics(wanted), model=model, x=x, y=y, batch_size=8)
    for replica, rows in enumerate((slice(0, 4), slice(4, 8))):
        alone = model.evaluate(x[rows], y[rows], verbose=0, return_dict=True)
        for name in ("accuracy", "top_2"):
            np.testing.assert_allclose(history[f"replica_{replica}/{name}"], alone[name])


def test_a_metric_that_is_built_late_is_averaged_over_its_classes():
    """F1 has no variables before it sees predictions."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Activation("linear")])
    model.compile("sgd", "mse")
    x = np.array([[1, 0], [0, 1], [1, 0], [1, 0]], "float32")
    y = np.array([[1, 0], [0, 1], [1, 0], [0, 1]], "float32")
    history = faked(ReplicaMetrics([keras.metrics.F1Score()]), model=model, x=x, y=y)
    # The second replica: class 0 has precision 1/2 and recall 1, class 1 has nothing.
    np.testing.assert_allclose(history["replica_0/f1_score"], [1.0], rtol=1e-6)
    np.testing.assert_allclose(history["replica_1/f1_score"], [1 / 3], rtol=1e-6)


def test_several_outputs():
    inputs = keras.Input((1,))
    outputs = {"one": keras.layers.Identity()(inputs), "two": keras.layers.Rescaling(2.0)(inputs)}
    model = keras.Model(inputs, outputs)
    model.compile("sgd", {"one": "mse", "two": "mse"})
    given = {"model": model, "x": X[:4], "y": {"one": Y[:4], "two": Y[:4]}}
    history = faked(ReplicaMetrics({"two": ["mae"]}), **given)
    np.testing.assert_allclose(history["replica_1/two_mae"], [7.0])
    for wrong in (["mae"], {"six": ["mae"]}):
        with pytest.raises(ValueError, match=r"(?s)Invalid `metrics`.*Received: metrics=.*'mae'"):
            faked(ReplicaMetrics(wrong), **given)


@keras.saving.register_keras_serializable("tests")
class SlowWithLarge(keras.layers.Layer):
    """Sleeps on examples larger than 50."""

    def __init__(self, seconds):
        super().__init__()
        self.seconds = seconds

    def call(self, x):
        def wait(values):
            if values.size and values.max() > 50:
                time.sleep(self.seconds)

        return x + zeros_after(wait, x)


@pytest.mark.slow
@pytest.mark.usefixtures("python_sees_rows")
@with_naps
def test_the_fast_replica_waits_which_is_not_computing(nap):
    """The second replica really takes longer, in every batch."""
    x = np.tile(np.array([[1], [1], [99], [99]], "float32"), (2, 1))
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1)(SlowWithLarge(nap)(inputs)))
    model = on_replicas(model, 2)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    history = fit(model, ReplicaMetrics(), x=x, y=np.zeros((8, 1)), epochs=2)
    assert history["replica_1/compute_time"][1] > nap > history["replica_0/compute_time"][1]
    assert history["replica_0/sync_time"][1] > 0.7 * nap > history["replica_1/sync_time"][1]


class Forbid(Probe):
    def on_replica(self, seen):
        return [seen.total_loss]

    def allows(self, measured):
        return measured[0][0] < 50.0


def test_a_forbidden_step_does_not_count_in_the_loss():
    """Of three steps the last, with 9 and 10, is forbidden."""

    class Guard(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.model.training_run.watch(Forbid())

    history = faked(Guard(), ReplicaMetrics(["mae"]), x=X[[0, 1, 2, 3, 8, 9]], y=Y[:6])
    np.testing.assert_allclose(history["replica_0/loss"], [2.5])
    np.testing.assert_allclose(history["replica_0/mae"], [1.5])
    assert history["replica_0/examples"] == [2]


def test_an_epoch_of_compiled_steps_has_no_speed():
    history = faked(ReplicaMetrics(), batch_size=10)
    for name in ("examples_per_second", "step_time", "compute_time", "data_wait"):
        assert np.isnan(history[f"replica_0/{name}"]).all()
    assert np.isnan(history["replicas/examples_per_second_min"]).all()


class Square(keras.layers.Layer):
    """Adds the mean square of its inputs as the loss."""

    def call(self, x):
        self.add_loss(keras.ops.mean(x**2))
        return x


def test_metrics_need_targets():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(2), Square()])
    model.compile(keras.optimizers.SGD(0.0))
    with pytest.raises(ValueError, match=r"data have none.*Expected targets.*Leave out.*y=None"):
        faked(ReplicaMetrics(["mae"]), model=model, y=None)
    history = faked(ReplicaMetrics(), model=model, y=None)
    assert np.isfinite(history["replica_0/loss"]).all()


@pytest.mark.slow
def test_another_number_of_replicas_restarts_the_sums(tmp_path):
    """The second and third batch remain, with the numbers from 5 to 10."""

    def trained(replicas, *others):
        saves = ResumableCheckpoint(tmp_path, every_steps=1)
        return fit(line(replicas), ReplicaMetrics(["mae"]), *others, saves)

    with pytest.raises(Stopped):
        trained(2, StopAt(0, 2))
    squares = np.arange(5.0, 11.0) ** 2
    np.testing.assert_allclose(trained(1)["replica_0/loss"], [squares.mean()], rtol=1e-6)
