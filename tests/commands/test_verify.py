"""`keras-multigpu verify`: imports and exit codes."""

import pytest
from verification import verified_models

from keras_multigpu.commands import main

MODELS = verified_models.__name__
DATA = ["--data", f"{MODELS}:data"]


@pytest.mark.slow
def test_a_training_that_differs_exits_with_one(capsys):
    """Or crashes, which is faster to try."""
    argv = ["verify", f"{MODELS}:fails_elsewhere", *DATA]
    assert main([*argv, "--replicas", "2", "--steps", "1"]) == 1
    assert "2 replicas: ValueError: It only works at home." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (MODELS, "The name given as the model is incomplete."),
        (":right", "The name given as the model is incomplete."),
        ("no_such_module:right", "cannot be imported: No module named 'no_such_module'."),
        ("models.py:right", "Write the module as `import` does"),
        (f"{MODELS}:wrong", f"module '{MODELS}' has no attribute 'wrong'."),
        (f"{MODELS}:__name__", f"cannot be called: '{MODELS}' is not a callable object."),
        (f"{MODELS}:compiled", "cannot be called: missing a required argument: 'model'."),
    ],
)
def test_a_bad_name_exits_with_two(name, message, capsys):
    assert main(["verify", name, *DATA]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Expected" in error
    assert f"Received: name='{name}'" in error


def test_a_model_that_fails_exits_with_two(capsys):
    """Not with 1, because replicas do not differ then. One line says why."""
    assert main(["verify", f"{MODELS}:not_compiled", *DATA]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "`build_model` returned a model that is not compiled." in line


@pytest.mark.parametrize("replicas", ["two", "1", "2,4", ""])
def test_bad_replicas_exit_with_two(replicas, capsys):
    with pytest.raises(SystemExit) as exit:
        main(["verify", f"{MODELS}:right", *DATA, "--replicas", replicas])
    assert exit.value.code == 2
    assert "Expected an integer of at least 2" in capsys.readouterr().err
