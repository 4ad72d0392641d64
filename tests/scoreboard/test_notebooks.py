"""The notebooks for Kaggle and Colab run, on CPU devices, but for the installation."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.processes_left import PATIENCE, as_users_start_it

from keras_multigpu import __version__

EXAMPLES = Path(__file__).parents[2] / "examples"

SECONDS = 20
"""Enough for the first parts; the others say that no time was left."""


def code_of(name):
    cells = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", ["scoreboard_kaggle.ipynb", "scoreboard_colab.ipynb"])
@pytest.mark.slow
def test_a_notebook_installs_this_version_and_fills_a_board(name, tmp_path):
    install, *cells = code_of(name)
    address = re.fullmatch(r'%pip install -q "keras_multigpu @ git\+https://(\S+)@v(\S+)"', install)
    assert address[1].startswith("github.com/")
    assert address[2] == __version__
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    for cell in cells:
        # As IPython does with such a line.
        assert cell.startswith("!")
        command = re.sub(r"--within \d+", f"--within {SECONDS}", cell.removeprefix("!"))
        ended = subprocess.run(
            command,
            shell=True,
            cwd=tmp_path,
            env=as_users_start_it(PATH=programs),
            timeout=PATIENCE,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
    parts = json.loads((tmp_path / "scoreboard.json").read_text(encoding="utf-8"))["parts"]
    rows = {(part, row["name"]): row for part, found in parts.items() for row in found["rows"]}
    assert rows["xla", "xla"]["skipped"] == "no time was left"
    # Or the machine is too busy to measure even that in time.
    facts = rows.get(("facts", "devices"), {"got": ["CPU:0", "CPU:1"]})
    assert facts["got"] == ["CPU:0", "CPU:1"]
