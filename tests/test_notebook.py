"""The example notebook runs, and prints its stored output."""

import json
import re
import sys
from pathlib import Path

import pytest
from helpers.all_replicas import ALL_REPLICAS
from helpers.documented_code import same_text
from helpers.processes_left import as_users_start_it, ended_process

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
CELLS = [
    cell
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    if cell["cell_type"] == "code"
]

# Like a kernel, it shows the value of a last line without a semicolon. Each cell runs twice.
KERNEL = """
import ast, contextlib, io, json, sys

def run(source):
    *lines, last = ast.parse(source).body
    shows = isinstance(last, ast.Expr) and not source.endswith(";")
    exec(compile(ast.Module(lines if shows else [*lines, last], []), "cell", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names) if shows else None
    if hasattr(value, "_repr_png_"):
        assert value._repr_png_().startswith(b"\\x89PNG")
    elif value is not None:
        print(repr(value))

names = {"__name__": "__main__"}
for source in json.loads(sys.argv[1]):
    for _ in range(2):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            run(source)
        print(json.dumps(out.getvalue()))
"""


def stored(cell):
    """The text of a cell's outputs, without pictures."""
    texts = [
        output.get("text", output.get("data", {}).get("text/plain", ""))
        for output in cell["outputs"]
        if "image/png" not in output.get("data", {})
    ]
    return "\n".join("".join(text) for text in texts)


def without_times(text):
    return re.sub(r"\d+m?s(/step)?\b", "time", text)


@pytest.mark.skipif(not ALL_REPLICAS, reason="`make test-all` runs it, as most examples.")
def test_each_cell_prints_its_stored_output_and_can_run_again(tmp_path):
    """Except for the second `fit`, which continues the first."""
    sources = ["".join(cell["source"]) for cell in CELLS]
    ended = ended_process(
        [sys.executable, "-c", KERNEL, json.dumps(sources)],
        cwd=tmp_path,
        env=as_users_start_it(),
    )
    assert ended.returncode == 0, ended.stderr
    printed = [json.loads(line) for line in ended.stdout.splitlines()]
    for cell, first, again in zip(CELLS, printed[::2], printed[1::2], strict=True):
        assert same_text(without_times(stored(cell)), without_times(first)), first
        if ".fit(" not in "".join(cell["source"]):
            assert same_text(first, again)
