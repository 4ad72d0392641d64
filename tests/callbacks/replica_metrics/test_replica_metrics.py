"""`ReplicaMetrics`: the numbers of each replica, against values by hand."""

import csv
import logging
import math
import re
import time

import keras
import numpy as np
import pytest
from helpers.cpu_replicas import covering, on_replicas
from helpers.naps import with_naps
from helpers.rows_in_python import zeros_after
from replica_metrics_models import X, Y, fit, line

from keras_multigpu.callbacks import ReplicaMetrics
from keras_multigpu.training.watching.probe import Probe

# Some models have no weights, so that their outputs are known.
pytestmark = pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")


def by_hand(shares):
    """Loss, error, examples and gradient norm of a replica with these shares."""
    squares = np.concatenate([np.square(share) for share in shares])
    # The gradient of the mean of (w x)^2 is 2 w mean(x^2).
    norms = [2 * np.mean(np.square(share)) for share in shares if len(share)]
    everything = np.concatenate(shares)
    return squares.mean(), np.abs(everything).mean(), len(everything), np.mean(norms)


SHARES = {
    1: [[[1, 2, 3, 4], [5, 6, 7, 8], [9, 10]]],
    2: [[[1, 2], [5, 6], [9]], [[3, 4], [7, 8], [10]]],
    # The ragged batch leaves two of four replicas without an example.
    4: [[[1], [5], [9]], [[2], [6], [10]], [[3], [7], []], [[4], [8], []]],
}


@pytest.mark.parametrize(
    ("replicas", "compiled"),
    covering(
        [2, 4, 1],
        [
            {"steps_per_execution": 2},
            {"micro_batches": 2},
            {"run_eagerly": True},
            {"jit_compile": True},
        ],
    ),
    ids=str,
)
@pytest.mark.in_test_all("test_probes.py has the other kinds of steps", after=1)
@pytest.mark.slow
def test_each_replica_has_its_own_numbers(replicas, compiled):
    history = fit(line(replicas, **compiled), ReplicaMetrics(["mae"]))
    expected = [by_hand(shares) for shares in SHARES[replicas]]
    if "run_eagerly" in compiled:
        # Without a graph the first replica has the whole batch.
        nothing = math.nan, math.nan, 0, math.nan
        expected = [by_hand(SHARES[1][0]), *[nothing] * (replicas - 1)]
    for replica, of_replica in enumerate(expected):
        found = [
            history[f"replica_{replica}/{name}"]
            for name in ("loss", "mae", "examples", "gradient_norm")
        ]
        np.testing.assert_allclose(np.ravel(found), of_replica, rtol=1e-5)
    losses = [loss for loss, _, examples, _ in expected if examples]
    np.testing.assert_allclose(history["replicas/loss_min"], [min(losses)], rtol=1e-5)
    np.testing.assert_allclose(history["replicas/loss_max"], [max(losses)], rtol=1e-5)
    np.testing.assert_allclose(
        history["replicas/loss_spread"], [max(losses) - min(losses)], rtol=1e-5, atol=1e-5
    )


def test_the_progress_bar_shows_only_the_mean(measured, capsys):
    """Which hides that one of two replicas has another loss."""
    callback = ReplicaMetrics()
    given = {"shuffle": False, "verbose": 2, "callbacks": [callback]}
    history = measured(callback).fit(X, Y, 4, **given).history
    assert "replica_0" not in capsys.readouterr().out
    np.testing.assert_allclose(history["loss"], [np.mean(X**2)], rtol=1e-6)
    assert history["replica_0/loss"][0] < 30 < 45 < history["replica_1/loss"][0]


def test_a_replica_without_examples_has_no_loss(measured):
    """It is NaN, and does not count in minimum and spread."""
    callback = ReplicaMetrics(["mae"])
    history = fit(measured(callback), callback, x=X[:1], y=Y[:1])
    assert math.isnan(history["replica_1/loss"][0])
    assert math.isnan(history["replica_1/mae"][0])
    assert math.isnan(history["replica_1/gradient_norm"][0])
    assert history["replica_1/examples"] == [0.0]
    assert history["replicas/loss_min"] == history["replicas/loss_max"] == [1.0]
    assert history["replicas/loss_spread"] == [0.0]


class SlowAtFirst(keras.layers.Layer):
    """Sleeps in its first call in training, while a step is compiled."""

    seconds = 0

    def call(self, x):
        self.seconds, seconds = 0, self.seconds
        time.sleep(seconds)
        return x


@pytest.mark.parametrize("compiled", [{"steps_per_execution": 2}, {"run_eagerly": True}])
@with_naps
@pytest.mark.in_test_all("one kind of step shows it", after=1)
def test_times_leave_out_the_step_that_was_compiled(compiled, nap):
    """The speeds of replicas add up, and the parts fit into the step."""
    layers = [keras.Input((1,)), slow := SlowAtFirst(), keras.layers.Dense(1)]
    model = on_replicas(keras.Sequential(layers), 2)
    model.compile("sgd", "mse", **compiled)
    slow.seconds = 20 * nap
    x, y = np.ones((16, 1), "float32"), np.zeros((16, 1), "float32")
    history = fit(model, ReplicaMetrics(), x=x, y=y, epochs=2)
    assert not slow.seconds
    for epoch in (0, 1):
        value = {k: v[epoch] for k, v in history.items()}
        # With the one that was compiled the four steps of an epoch would take more on average.
        assert 0 < value["replica_0/step_time"] < 5 * nap
        speeds = value["replica_0/examples_per_second"] + value["replica_1/examples_per_second"]
        np.testing.assert_allclose(speeds, 4 / value["replica_0/step_time"], rtol=1e-6)
        for replica in (0, 1):
            of = f"replica_{replica}/"
            parts = value[of + "compute_time"] + value[of + "sync_time"] + value[of + "data_wait"]
            assert 0 < parts < value[of + "step_time"]
            # Without a graph the first replica has the whole batch.
            whole = "run_eagerly" in compiled
            assert value[of + "examples"] == (16 * (replica == 0) if whole else 8)


@pytest.mark.slow
def test_metrics_mean_what_they_mean_in_compile():
    """Names, objects, and "accuracy", which depends on the predictions."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="softmax")])
    model = on_replicas(model, 2)
    compiled = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]
    model.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy", metrics=compiled)
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 3)).astype("float32"), random.integers(0, 4, 8)
    wanted = ["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top_2")]
    history = fit(model, ReplicaMetrics(wanted), x=x, y=y, batch_size=8)
    for name in ("accuracy", "top_2"):
        for replica, rows in enumerate((slice(0, 4), slice(4, 8))):
            alone = model.evaluate(x[rows], y[rows], verbose=0, return_dict=True)
            np.testing.assert_allclose(history[f"replica_{replica}/{name}"], alone[name])


def test_a_metric_that_is_built_late_is_averaged_over_its_classes():
    """F1 has no variables before it sees predictions."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Activation("linear")])
    model = on_replicas(model, 2)
    model.compile("sgd", "mse")
    x = np.array([[1, 0], [0, 1], [1, 0], [1, 0]], "float32")
    y = np.array([[1, 0], [0, 1], [1, 0], [0, 1]], "float32")
    metric = keras.metrics.F1Score()
    history = fit(model, ReplicaMetrics([metric]), x=x, y=y)
    # The second replica: class 0 has precision 1/2 and recall 1, class 1 has nothing.
    np.testing.assert_allclose(history["replica_0/f1_score"], [1.0], rtol=1e-6)
    np.testing.assert_allclose(history["replica_1/f1_score"], [1 / 3], rtol=1e-6)


@pytest.mark.in_test_all("metrics of several outputs are Keras's")
def test_several_outputs():
    inputs = keras.Input((1,))
    outputs = {"one": keras.layers.Identity()(inputs), "two": keras.layers.Rescaling(2.0)(inputs)}
    model = on_replicas(keras.Model(inputs, outputs), 2)
    model.compile("sgd", {"one": "mse", "two": "mse"})
    targets = {"one": Y[:4], "two": Y[:4]}
    history = fit(model, ReplicaMetrics({"two": ["mae"]}), x=X[:4], y=targets)
    np.testing.assert_allclose(history["replica_1/two_mae"], [7.0])
    with pytest.raises(ValueError, match="several outputs.*dict.*Received: metrics="):
        fit(model, ReplicaMetrics(["mae"]), x=X[:4], y=targets)
    with pytest.raises(ValueError, match="does not have.*'one', 'two'.*Received: output='six'"):
        fit(model, ReplicaMetrics({"six": ["mae"]}), x=X[:4], y=targets)


def test_the_csv_file_has_a_row_for_each_replica_and_measurement(measured, tmp_path):
    """A missing value is an empty field."""
    path = tmp_path / "folder" / "replicas.csv"
    callback = ReplicaMetrics(["mae"], path=path, every_steps=2)
    # Step 3 has a single example, so the second replica has none.
    fit(measured(callback), callback, x=X[:9], y=Y[:9], epochs=2)
    text = path.read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert text.endswith("\n")
    assert text.splitlines()[0].startswith("epoch,step,replica,worker,device,loss,mae,examples,")
    assert [(row["epoch"], row["step"], row["replica"]) for row in rows] == [
        (str(epoch), str(step), str(replica))
        for epoch in (0, 1)
        for step in (2, 3)
        for replica in range(2)
    ]
    assert rows[1]["device"] == "CPU:1"
    assert [row["loss"] for row in rows[2:4]] == ["81", ""]
    assert [row["examples"] for row in rows[2:4]] == ["1", "0"]


def test_the_same_callback_continues_its_file_and_a_new_one_replaces_it(measured, tmp_path):
    path = tmp_path / "replicas.csv"
    for _ in range(2):
        callback = ReplicaMetrics(path=path)
        model = measured(callback)
        for fits in (1, 2):
            assert len(fit(model, callback)["replica_0/loss"]) == 1
            assert len(path.read_text().splitlines()) == 1 + 2 * fits


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
def test_a_replica_that_lags_behind_is_named(caplog, nap):
    """The second replica really takes longer, in every batch."""
    caplog.clear()
    x = np.tile(np.array([[1], [1], [99], [99]], "float32"), (6, 1))
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1)(SlowWithLarge(nap)(inputs)))
    model = on_replicas(model, 2)
    model.compile(keras.optimizers.SGD(0.0), "mse")
    callback = ReplicaMetrics(every_steps=2)
    with caplog.at_level(logging.WARNING, "keras_multigpu"):
        history = fit(model, callback, x=x, y=np.zeros((24, 1)), epochs=2)
    assert callback.slowest[:3] == (1, 0, "CPU:1")
    assert callback.slowest.factor > 1.25
    assert callback.slowest.windows == 6
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 1
    assert re.match(r"Replica 1 \(CPU:1, worker 0\) lags behind: .* in 3 measurements", told[0])
    # The fast replica waits, which is not computing.
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

    history = fit(line(2), Guard(), ReplicaMetrics(["mae"]), x=X[[0, 1, 2, 3, 8, 9]], y=Y[:6])
    np.testing.assert_allclose(history["replica_0/loss"], [2.5])
    np.testing.assert_allclose(history["replica_0/mae"], [1.5])
    assert history["replica_0/examples"] == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every_steps": 0}, "`every_steps` is not a positive integer.*Received: every_steps=0"),
        ({"path": "a.txt"}, r"not a CSV file.*\.csv.*Received: path='a.txt'"),
        ({"metrics": "accuracy"}, "not a metric.*list of names.*Received: metrics='accuracy'"),
        ({"metrics": [3]}, r"not a metric.*Received: metrics=\[3\]"),
        ({"metrics": keras.metrics.Mean()}, "not a metric.*list of names.*Received: metrics=<Mean"),
        ({"metrics": ["acuracy"]}, "acuracy"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        ReplicaMetrics(**arguments)


def test_a_path_that_cannot_be_written_is_named_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cannot be written.*Choose another path.*Received: path="):
        ReplicaMetrics(path=tmp_path / "file" / "replicas.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ValueError, match="cannot be written: .*Is a directory"):
        ReplicaMetrics(path=tmp_path / "folder.csv")
