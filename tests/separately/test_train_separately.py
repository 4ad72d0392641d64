"""Jobs run in parallel, each in its own slot, and their results come back in the order given."""

import functools
import os

import numpy as np
import pytest
import separate_jobs as jobs
from helpers.naps import with_naps

import keras_multigpu as kmg
from keras_multigpu.processes import functions


def test_results_come_back_in_order(capsys):
    """Even with more jobs than slots. Each result has the job's name and output."""
    work = [functools.partial(jobs.square, number) for number in range(5)]
    results = kmg.train_separately(work, devices=2)
    assert [result.value for result in results] == [0, 1, 4, 9, 16]
    assert [result.name for result in results] == [f"square({number})" for number in range(5)]
    assert results[3].output == "the square of 3"
    assert {result.device for result in results} == {"CPU:0", "CPU:1"}
    printed = capsys.readouterr().out.splitlines()
    assert printed[:2] == ["[1/5] square(0) on CPU:0 started", "[2/5] square(1) on CPU:1 started"]
    assert sum("ended after" in line for line in printed) == 5


@with_naps
def test_as_many_jobs_run_at_once_as_there_are_slots(nap):
    """Two jobs overlap, but never three."""
    work = [functools.partial(jobs.span, 4 * nap)] * 4
    spans = [result.value for result in kmg.train_separately(work, devices=2)]
    at_once = [sum(began <= moment < ended for began, ended in spans) for moment, _ in spans]
    assert max(at_once) == 2


def test_each_job_has_its_own_cores():
    """It runs as many threads as it has cores, and this process keeps all of its own."""
    cores = sorted(os.sched_getaffinity(0))
    one, other = kmg.train_separately([jobs.place] * 2, devices=["CPU:0", "CPU:1"])
    if len(cores) > 1:
        assert sorted(one.value[0] + other.value[0]) == cores
    assert one.value[1] == ["-1", *[str(len(one.value[0]))] * 2]
    assert sorted(os.sched_getaffinity(0)) == cores


def test_a_job_that_fails_does_not_stop_the_others(capsys):
    """Its error comes back with its type and traceback, which is also printed."""
    failed, fine = kmg.train_separately(
        [functools.partial(jobs.fail, "no such fold"), functools.partial(jobs.square, 3)], devices=2
    )
    assert fine.value == 9 and fine.error is None
    with pytest.raises(LookupError, match="no such fold"):
        failed.value  # noqa: B018
    assert "in fail" in failed.error.__notes__[0]
    printed = capsys.readouterr().out
    assert "fail('no such fold') on CPU:0 FAILED after" in printed
    assert "raise LookupError(text)" in printed


def test_a_process_that_dies_is_reported():
    (result,) = kmg.train_separately([jobs.die], devices=1)
    with pytest.raises(RuntimeError, match="of die ended with signal SIGKILL.*memory ran out"):
        result.value  # noqa: B018


def test_a_result_that_cannot_be_pickled_is_reported():
    (result,) = kmg.train_separately([jobs.not_picklable], devices=1)
    with pytest.raises(ValueError, match="returned cannot be pickled"):
        result.value  # noqa: B018


def test_scripts_run_with_their_arguments(tmp_path):
    """As by `python SCRIPT ARGUMENTS`; their output is kept."""
    script = tmp_path / "one.py"
    script.write_text("import sys\nprint(__name__, sys.argv[1:])\nsys.exit(len(sys.argv) - 1)")
    fine, failed = kmg.train_separately([script, [script, "--fold", 3]], devices=2)
    assert (fine.value, fine.output) == (None, "__main__ []")
    with pytest.raises(RuntimeError, match="ended with exit code 2") as error:
        failed.value  # noqa: B018
    assert error.value.__notes__ == ["__main__ ['--fold', '3']"]


@pytest.mark.slow
def test_models_and_histories_come_back():
    """The model predicts as it did in its process, and can continue to train."""
    (result,) = kmg.train_separately([jobs.train], devices=1)
    model, history = result.value["model"], result.value["history"]
    x = np.arange(16.0).reshape(8, 2)
    np.testing.assert_allclose(model.predict(x, verbose=0), result.value["prediction"], rtol=1e-6)
    assert len(history.history["loss"]) == 2
    assert isinstance(model, kmg.DistributedModel) and int(model.optimizer.iterations) == 4
    assert model.fit(x, x[:, :1], verbose=0).history["loss"][0] < history.history["loss"][0]


@pytest.mark.parametrize(
    ("work", "what"),
    [
        ([], "`jobs` is not a non-empty list"),
        ("train.py", "`jobs` is not a non-empty list"),
        (jobs.place, "`jobs` is not a non-empty list"),
        ([3.5j], "is neither a function nor a script"),
        ([[]], "is neither a function nor a script"),
        (["/nowhere/train.py"], "is a script that does not exist"),
        ([lambda: None], r"`jobs\[0\]` cannot be imported by another process.*one of its own"),
    ],
)
def test_bad_jobs_are_refused(work, what):
    with pytest.raises(ValueError, match=what):
        kmg.train_separately(work)


def test_jobs_of_a_script_without_a_main_guard_are_refused(monkeypatch):
    """A job's process would import the script and start more jobs, endlessly."""
    monkeypatch.setattr(functions, "_importing", True)
    with pytest.raises(RuntimeError, match='if __name__ == "__main__"'):
        kmg.train_separately([jobs.place])
