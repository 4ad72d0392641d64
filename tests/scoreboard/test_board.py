"""`keras-multigpu scoreboard`: on CPU devices all of it but what only GPUs show; on GPUs, all."""

import json
import subprocess
import sys
import time

import pytest
from helpers.all_replicas import ALL_REPLICAS
from helpers.processes_left import PATIENCE, as_users_start_it, start_process

from keras_multigpu.commands import main
from keras_multigpu.scoreboard import board
from keras_multigpu.scoreboard.board import PARTS, Part, table
from keras_multigpu.scoreboard.overlap import Event, hidden_share

LIMIT = 1200
"""Seconds for a whole board; a third of it on two idle cores."""

BAD = "scoreboard.bad_part"


def filled(folder, *options, within=LIMIT, **more):
    """The rows of scoreboard.json, by part and name; none has failed."""
    command = [sys.executable, "-m", "keras_multigpu", "scoreboard", f"--within={within}", *options]
    process = start_process(
        command,
        # A part may print nothing for minutes, and has limits of its own.
        patience=2 * LIMIT,
        cwd=folder,
        env=as_users_start_it(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output = process.communicate(timeout=2 * LIMIT)[0]
    assert process.returncode == 0, output
    parts = json.loads((folder / "scoreboard.json").read_text(encoding="utf-8"))["parts"]
    assert (folder / "scoreboard.md").read_text(encoding="utf-8") in output
    return {part: {row["name"]: row for row in found["rows"]} for part, found in parts.items()}


@pytest.mark.skipif(not ALL_REPLICAS, reason="Several minutes: `make test-all` runs it.")
def test_a_whole_board_on_cpu_devices(tmp_path):
    """Over TensorFlow's own all-reduce; so on a machine with GPUs none fails for another reason."""
    found = filled(tmp_path)
    assert [*found] == [*PARTS]
    assert found["facts"]["devices"]["got"] == ["CPU:0", "CPU:1"]
    assert found["exactness"]["MLP"]["ok"] is True
    assert found["tf32"]["all trainings"]["skipped"] == "CPUs have no TF32"
    for part in ("dense", "transformer", "resnet50", "float16", "xla"):
        assert found[part]["ours: ms a step of 8"]["got"] > 0
        assert found[part]["ours: sums a step, of all devices"]["got"] > 0


@pytest.mark.slow
def test_facts_and_the_speed_of_a_network_on_cpu_devices(tmp_path):
    """The most telling of them; `make test-all` has all."""
    found = filled(tmp_path, "--only", "facts", "dense")
    assert found["facts"]["links"]["skipped"] == "there is no nvidia-smi"
    dense = found["dense"]
    assert {row["skipped"] for name, row in dense.items() if "peak MB" in name} == {
        "devices of a CPU share one memory"
    }
    ours = dense["ours: ms a step of 8"]["got"]
    assert dense["ours: examples a second"]["got"] == pytest.approx(8000 / ours)
    efficiency = dense["ours: efficiency, its least and most"]
    assert efficiency["skipped"] == "the devices share one chip"
    assert dense["ours: sums a step, of all devices"]["got"] > 0


@pytest.mark.slow
def test_what_fails_or_hangs_is_a_row_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    names = ["good", "raises", "half", "killed", "hangs", "good again"]
    monkeypatch.setitem(PARTS, "bad", Part(BAD, 4, names))
    assert main(["scoreboard", "--only", "bad", "--folder", str(tmp_path)]) == 1
    text = (tmp_path / "scoreboard.json").read_text(encoding="utf-8")
    rows = json.loads(text)["parts"]["bad"]["rows"]
    assert [(row["name"], row["got"], row["ok"]) for row in rows] == [
        ("good", 1, True),
        ("raises", "ValueError: no", False),
        ("half", 1, None),
        ("half", "the process ended with SIGABRT", False),
        ("killed", "the process ended with SIGKILL", False),
        ("hangs", "nothing for 4 s", False),
        ("good again", 2.5, None),
    ]
    out = capsys.readouterr().out
    assert "| bad | good | 1 | 1 | ok |" in out
    assert "Not as expected: bad: raises; bad: half; bad: killed; bad: hangs" in out


@pytest.mark.slow
def test_a_board_ends_in_time_and_says_what_it_skipped(tmp_path, monkeypatch):
    """Whatever hangs; and the parts that come after it."""
    monkeypatch.setitem(PARTS, "bad", Part(BAD, 600, ["hangs", "good again"]))
    began = time.monotonic()
    found = dict(board.fill(["bad", "xla"], tmp_path, 5, "1.2"))
    assert time.monotonic() - began < PATIENCE
    rows = [(row["name"], row["skipped"]) for part in found.values() for row in part]
    # A busy machine may need longer to start the process.
    assert rows[0][0] in ("hangs", "bad")
    assert rows[-1] == ("xla", "no time was left")
    assert {why for _, why in rows} == {"no time was left"}


@pytest.mark.slow
def test_a_part_that_cannot_begin_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setitem(PARTS, "bad", Part("scoreboard.no_such_part", 4))
    ((_, [row]),) = board.fill(["bad"], tmp_path, 100, "1.2")
    assert row["ok"] is False
    assert row["got"] == "ModuleNotFoundError: No module named 'scoreboard.no_such_part'"


def test_the_table_says_of_each_figure_what_it_is():
    rows = [
        {"name": "a", "got": [0.123456, "x|y"], "expected": "", "ok": None, "skipped": None},
        {"name": "b", "got": 2, "expected": "1", "ok": False, "skipped": None},
        {"name": "c", "got": None, "expected": "", "ok": None, "skipped": "a reason"},
    ]
    text = table({"keras_multigpu": "1.2", "date": "2026-01-02", "parts": {"part": {"rows": rows}}})
    lines = text.splitlines()
    assert lines[0] == "keras_multigpu 1.2, 2026-01-02"
    assert lines[-3:] == [
        "| part | a | 0.123, x/y |  | measured |",
        "| part | b | 2 | 1 | NOT OK |",
        "| part | c |  |  | skipped: a reason |",
    ]


def test_a_sum_is_hidden_as_long_as_another_kernel_runs(monkeypatch):
    """Of a sum from 10 to 30, 15 to 25 has kernels beside it; a copy does not compute."""

    def share(*events):
        return hidden_share([Event(*event) for event in events])

    sums = ("CollectiveReduceV2", 10, 30)
    assert share(sums, ("gemm", 15, 20), ("relu", 18, 25), ("gemm", 40, 90)) == 0.5
    assert share(sums, ("gemm", 0, 12), ("MemcpyD2H", 12, 30)) == 0.1
    assert share(sums, ("gemm", 0, 100)) == 1.0
    assert share(sums, ("gemm", 30, 100)) == 0.0


@pytest.mark.gpu
def test_several_gpus_train_as_one_does(tmp_path):
    """Plain Keras on one GPU, this package on all."""
    found = filled(tmp_path, "--only", "facts", "exactness", CUDA_VISIBLE_DEVICES=None)
    assert len(found["facts"]["devices"]["got"]) > 1
