"""Errors in three parts, and the argument checks that raise them."""

import ast
import collections
from pathlib import Path

import pytest

import keras_multigpu
from keras_multigpu.checks import (
    in_one_line,
    problem,
    require_choice,
    require_ending,
    require_positive_integer,
)

RAISING = ("problem", "value_error", "type_error", "runtime_error", "error_of", "usage_error")


def test_a_problem_has_three_parts_and_the_values_received():
    """The sentences come in order, then each value's `repr`."""
    text = problem("It came.", "Expected that.", "Do this.", size=3, name="x")
    assert text == "It came. Expected that. Do this. Received: size=3, name='x'"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("No.", "ValueError: No."),
        ("", "ValueError"),
        ("Made of\n values\n", "ValueError: Made of values"),
        (
            "Exception encountered when calling M.call().\n\n\x1b[1mBad.\x1b[0m\n\n"
            "Arguments received by M.call():\n  x=1",
            "ValueError: Bad.",
        ),
        (
            "Graph execution error:\n\nDetected at node loss/a defined at (most recent call "
            "last):\n<stack traces unavailable>\nA label of 4.\n\t [[{{node loss/a}}]] [Op:__f_7]",
            "ValueError: A label of 4.",
        ),
    ],
)
def test_what_an_error_says_takes_a_line(text, line):
    assert in_one_line(ValueError(text)) == line


def test_a_known_choice_is_accepted():
    require_choice("kind", "one", ["one", "two"])
    require_choice("kind", "two", (choice for choice in ("one", "two")))


def test_an_unknown_choice_is_named_with_all_known_ones():
    """The message names the argument, every known value and the value received."""
    with pytest.raises(ValueError) as error:
        require_choice("kind", "three", ["one", "two"])
    assert str(error.value) == (
        "`kind` has an unknown value. Expected one of 'one', 'two'. Received: kind='three'"
    )


@pytest.mark.parametrize("value", [1, 2, 10**9])
def test_positive_integers_are_accepted(value):
    require_positive_integer("devices", value)


@pytest.mark.parametrize("value", [0, -1, 1.0, "1", None, True, [1]])
def test_anything_but_a_positive_integer_is_refused(value):
    """The message names the argument and the value received."""
    with pytest.raises(ValueError, match="`devices` is not a positive integer.*Received: devices="):
        require_positive_integer("devices", value)


def test_a_tilde_stands_for_the_home_folder(tmp_path, monkeypatch):
    """In a path to write to. An unknown user's `~name` stays as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert require_ending("~/a.PNG", ".png", "No PNG.") == tmp_path / "a.PNG"
    assert str(require_ending("~nobody_/a.png", ".png", "No PNG.")) == "~nobody_/a.png"


def test_no_error_message_is_written_twice():
    """Two places that refuse the same thing call one function."""
    places = collections.defaultdict(list)
    package = Path(keras_multigpu.__file__).parent
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in RAISING:
                texts = tuple(map(ast.unparse, node.args))
                # Names alone refer to a message that is written elsewhere.
                if any(not isinstance(text, ast.Name) for text in node.args):
                    places[texts].append(f"{path.relative_to(package)}:{node.lineno}")
    assert [found for found in places.values() if len(found) > 1] == []
