"""`ThroughputReport` in a resumed training, and with unusual models and arguments."""

import json
import logging

import keras
import pytest
from helpers.cpu_replicas import on_replicas
from helpers.stopped_runs import StopAt, Stopped
from test_throughput_report import X, Y, network

from keras_multigpu.callbacks import ResumableCheckpoint, ThroughputReport


def epochs_in(path):
    return [one["epoch"] for one in json.loads(path.read_text())["epochs"]]


@pytest.mark.in_test_all("test_end_time.py resumes reports")
def test_a_resumed_training_has_the_reports_of_all_epochs(tmp_path):
    """Stopped after two of three epochs; the operations are known in all of them."""
    path = tmp_path / "speed.json"

    def fit(*others):
        report = ThroughputReport(path=path, verbose=0)
        callbacks = [report, ResumableCheckpoint(tmp_path / "run"), *others]
        network(2).fit(X, Y, batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
        return report

    with pytest.raises(Stopped):
        fit(StopAt(2, hook="on_epoch_begin"))
    before = json.loads(path.read_text())["epochs"]
    report = fit()
    assert epochs_in(path) == [one.epoch for one in report.reports] == [0, 1, 2]
    assert json.loads(path.read_text())["epochs"][:2] == before
    assert [one.forward_flops for one in report.reports] == [24, 24, 24]


@pytest.mark.in_test_all("resuming continues the file, which is harder")
def test_a_second_fit_starts_a_new_file(tmp_path):
    """The file is that of the last `fit`."""
    path, model = tmp_path / "speed.json", network(1)
    report = ThroughputReport(path=path, verbose=0)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[report])
    model.fit(X, Y, epochs=3, initial_epoch=2, verbose=0, callbacks=[report])
    assert epochs_in(path) == [2]


@keras.saving.register_keras_serializable("tests")
class SeveralOnly(keras.layers.Layer):
    """Refuses a single example, with an error of any kind."""

    def call(self, x):
        assert x.shape[0] != 1, "no single examples"
        return x


@pytest.mark.in_test_all("test_forward_flops.py counts")
def test_training_continues_if_operations_cannot_be_counted(caplog):
    layers = [keras.Input((4,)), SeveralOnly(), keras.layers.Dense(1)]
    model = on_replicas(keras.Sequential(layers), 2)
    model.compile("sgd", "mse")
    report = ThroughputReport(verbose=0)
    with caplog.at_level(logging.DEBUG, "keras_multigpu"):
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[report])
    assert report.report.forward_flops is None
    told = [r.getMessage() for r in caplog.records if "cannot be counted" in r.getMessage()]
    assert len(told) == 1
    assert "no single examples" in told[0]
