"""`keras-multigpu scale` on a real script that nothing was changed in."""

import os
import re
import sys
from pathlib import Path

import pytest
from helpers.processes_left import as_users_start_it, ended_process

from keras_multigpu.commands import main, scale
from keras_multigpu.commands.scale import usual_counts

SCRIPT = Path(__file__).parents[1] / "scaling" / "slow_data.py"


@pytest.mark.slow
def test_a_source_that_sleeps_is_named_and_nothing_of_the_users_is_written(tmp_path):
    """20 ms an example: 160 ms a step with a batch of 8, and 320 ms with twice as many.

    So long that a busy machine adds less.
    """
    words = ["scale", str(SCRIPT), "--arguments=8", "--replicas", "1", "2"]
    ended = ended_process(
        [sys.executable, "-m", "keras_multigpu", *words, "--rounds=1", "--seconds=1"],
        env=as_users_start_it(KMG_QUICK="1"),
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert sorted(os.listdir(tmp_path)) == ["scaling.md", "scaling.png"]
    text = (tmp_path / "scaling.md").read_text(encoding="utf-8")
    assert text == ended.stdout
    assert "logical CPU devices, which share" in text
    assert len(re.findall("First limit: waiting for data: on 2 replicas", text)) == 2
    rows = [line.split(" | ") for line in text.splitlines() if line[:3] in ("| 1", "| 2")]
    assert [row[:2] for row in rows] == [["| 1", "8"], ["| 2", "8"], ["| 1", "8"], ["| 2", "16"]]
    # The first batch may be ready.
    assert all(float(row[2]) > least for row, least in zip(rows, (110, 110, 110, 220), strict=True))
    # The gradients of ten weights, and the loss.
    assert [row[-1] for row in rows] == ["0 bytes |", "44 bytes |"] * 2
    assert "round 1 of 1, replicas: 2, global batch fixed: " in ended.stderr


@pytest.mark.slow
def test_a_script_without_fit_is_an_error(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("print('done')")
    assert main(["scale", str(script), "--rounds", "1"]) == 2
    error = capsys.readouterr().err
    assert "done\n" in error
    assert "The script cannot be measured." in error
    assert "The script ended without a call of `fit`." in error


def test_a_missing_script_is_an_error(capsys):
    assert main(["scale", "no_such.py"]) == 2
    assert "There is no such script." in capsys.readouterr().err


def test_all_gpus_are_measured():
    found = [usual_counts(gpus) for gpus in (0, 1, 2, 3, 8)]
    assert found == [[1, 2], [1], [1, 2], [1, 2, 3], [1, 2, 4, 8]]


@pytest.mark.slow
def test_a_script_that_hangs_is_an_error_that_says_where(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scale, "FIRST", 20.0)
    script = tmp_path / "script.py"
    script.write_text("import time\nprint('begins', flush=True)\ntime.sleep(600)")
    assert main(["scale", str(script), "--rounds", "1", "--seconds", "0"]) == 2
    error = capsys.readouterr().err
    assert "The script cannot be measured." in error
    assert "it hangs: no end after 20 s" in error
    # On a busy machine TensorFlow may still be imported.
    assert "begins" not in error or f'File "{script}", line 3' in error, error
