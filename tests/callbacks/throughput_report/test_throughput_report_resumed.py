"""`ThroughputReport` in a resumed training, and with unusual models and arguments."""

import json

import pytest
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
    assert all(one.step_flops for one in report.reports)


@pytest.mark.in_test_all("resuming continues the file, which is harder")
def test_a_second_fit_starts_a_new_file(tmp_path):
    """The file is that of the last `fit`."""
    path, model = tmp_path / "speed.json", network(1)
    report = ThroughputReport(path=path, verbose=0)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[report])
    model.fit(X, Y, epochs=3, initial_epoch=2, verbose=0, callbacks=[report])
    assert epochs_in(path) == [2]
