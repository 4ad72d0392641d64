"""`keras-multigpu` prints its help without TensorFlow, and returns the right exit codes."""

import subprocess
import sys

import pytest
from helpers.processes_left import PATIENCE, as_users_start_it

import keras_multigpu
from keras_multigpu.checks import require_positive_integer
from keras_multigpu.commands import demo, main
from keras_multigpu.commands.usage import UsageError

WITHOUT_TENSORFLOW = """
import sys
from keras_multigpu.commands import main
try:
    main(["--help"])
finally:
    assert not {"keras", "tensorflow", "numpy.f2py", "matplotlib"} & set(sys.modules)
"""


def test_help_names_the_commands_and_imports_no_keras():
    ended = subprocess.run(
        [sys.executable, "-c", WITHOUT_TENSORFLOW],
        env=as_users_start_it(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "demo" in ended.stdout
    assert "verify" in ended.stdout


@pytest.mark.parametrize(
    ("argv", "code", "printed"),
    [
        ([], None, "verify"),
        (["--help"], 0, "verify"),
        (["--version"], 0, f"keras-multigpu {keras_multigpu.__version__}\n"),
        (["unknown"], 2, "usage: keras-multigpu"),
        (["verify"], 2, "usage: keras-multigpu"),
        (["verify", "a:b"], 2, "usage: keras-multigpu"),
    ],
)
def test_the_exit_code_says_whether_the_command_was_understood(argv, code, printed, capsys):
    try:
        assert (main(argv), code) == (0, None)
    except SystemExit as exit:
        assert exit.code == code
    output = capsys.readouterr()
    assert printed in (output.err if code == 2 else output.out)


def test_a_usage_error_is_printed_without_a_traceback(monkeypatch, capsys):
    def run(arguments):
        raise UsageError("No. Expected yes. Say yes. Received: answer='no'")

    monkeypatch.setattr(demo, "run", run)
    assert main(["demo"]) == 2
    assert capsys.readouterr().err.startswith("keras-multigpu: No. Expected yes.")


def test_a_traceback_is_shown_for_errors_of_user_code(monkeypatch, capsys):
    """Whether they have the package's three parts or not. The exit code is 2."""

    def run(arguments):
        require_positive_integer("n", -1)

    for broken in (run, lambda arguments: 1 / 0):
        monkeypatch.setattr(demo, "run", broken)
        assert main(["demo"]) == 2
        assert "Traceback" in capsys.readouterr().err
