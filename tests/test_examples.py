"""Every file of `examples/` runs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"

# The arguments of `main`: one short epoch on two replicas. Each returns an accuracy.
ARGUMENTS = {
    "own_train_step": {"epochs": 1, "replicas": 2},
    "train_on_replicas": {"epochs": 1, "replicas": 2},
}

RUN = f"""
import importlib, json, sys
sys.path.insert(0, {str(EXAMPLES)!r})
for name, arguments in {ARGUMENTS!r}.items():
    result = importlib.import_module(name).main(**arguments)
    print("result", json.dumps([name, result]))
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each `main` returned; all run in one process because TensorFlow starts slowly."""
    ended = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=tmp_path_factory.mktemp("examples"),
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stdout.splitlines() if line.startswith("result ")]
    return dict(json.loads(line.removeprefix("result ")) for line in lines)


def test_no_example_is_left_out():
    """A new file needs a line in `ARGUMENTS`."""
    assert {path.stem for path in EXAMPLES.glob("*.py")} == ARGUMENTS.keys()


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_example_learns_something(name, results):
    """After one epoch it does better than the tenth that guessing would get right."""
    assert results[name] > 0.3
