"""New processes find their parent's modules, and ignore those in the working folder."""

import ast
import subprocess
from pathlib import Path

from helpers.processes_left import PATIENCE

import keras_multigpu
from keras_multigpu.processes import new_process

PACKAGE = Path(keras_multigpu.__file__).parent


def test_files_in_the_working_folder_do_not_shadow_the_standard_library(tmp_path, monkeypatch):
    """`tempfile` imports `random`. An interactive Python has `''` on its path."""
    (tmp_path / "random.py").write_text("raise SystemExit('the working folder was searched')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    ended = subprocess.run(
        new_process.command("tempfile"),
        env=new_process.environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_package_is_found_where_it_was_imported_from(monkeypatch):
    monkeypatch.setattr("sys.path", ["", "/somewhere"])
    path = new_process.environment(MORE="1")["PYTHONPATH"]
    assert path == f"/somewhere:{PACKAGE.parent}"


def test_a_new_process_does_not_inherit_the_cluster(monkeypatch):
    for name in ("TF_CONFIG", "SLURM_PROCID", "SLURM_STEP_NODELIST"):
        monkeypatch.setenv(name, "0")
        assert name not in new_process.environment()


def test_only_new_process_starts_python():
    with_python = {
        path.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    }
    assert with_python == {"new_process.py"}
