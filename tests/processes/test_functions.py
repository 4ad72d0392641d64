"""Functions of the running script reach another process, and its classes stay the same."""

import pickle
import sys
from types import ModuleType, SimpleNamespace

import pytest

from keras_multigpu.processes import functions


@pytest.fixture
def main(monkeypatch):
    """A module that pretends to be the running script."""
    module = ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_a_script_is_found_by_its_path_or_by_its_name(main, tmp_path):
    """As in `python train.py` and `python -m train`; code typed into Python is not a script."""
    assert functions.script() is None
    main.__file__ = str(tmp_path / "train.py")
    assert functions.script() is None
    (tmp_path / "train.py").touch()
    assert functions.script() == ("file", str(tmp_path / "train.py"))
    main.__spec__ = SimpleNamespace(name="train")
    assert functions.script() == ("module", "train")


def test_functions_that_another_process_cannot_import_are_refused(main):
    """A lambda, and a function typed into a notebook."""
    with pytest.raises(ValueError, match="`build_model` cannot be imported by another process"):
        functions.pickle_function("build_model", lambda: None, "so it is")
    main.__file__ = "<stdin>"
    exec("def typed(): pass", vars(main))
    with pytest.raises(ValueError, match="%%writefile"):
        functions.pickle_function("data", main.typed, "so it is")


@pytest.mark.parametrize("name", ["a_module", functions.SCRIPT])
def test_classes_of_the_script_are_those_of_main(main, monkeypatch, name, tmp_path):
    main.__spec__ = SimpleNamespace(name=name)
    main.Point = type("Point", (), {"__module__": name})
    there = ModuleType(name)
    there.Point = main.Point
    monkeypatch.setitem(sys.modules, name, there)
    reply = pickle.dumps(main.Point())
    monkeypatch.delitem(sys.modules, name)
    assert type(functions.result_from(reply)) is main.Point


def test_an_error_that_cannot_be_pickled_is_described():
    """Its class takes two arguments, which `pickle` does not know."""

    class OwnError(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    error = functions.transportable(OwnError(1, 2))
    assert (type(error), str(error)) == (RuntimeError, "OwnError: 1 and 2")
    assert "OwnError: 1 and 2" in error.__notes__[0]
