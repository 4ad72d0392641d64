"""Functions that another process is to call, and their results.

Functions travel by name, as in `pickle`; those of the running script travel as the script's
path, and the new process imports it. So, as with `multiprocessing`, the script's own work
has to be under `if __name__ == "__main__":`.

cloudpickle would carry lambdas and functions of notebooks as well. But it copies what a function
refers to: a layer of the script's is then registered nowhere, so that a saved model does not load
in the other process, and a function that uses a strategy or a lock of its script fails. So only
`sent` uses it, for functions that have no other way.
"""

import importlib
import importlib.util
import io
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from keras_multigpu.checks import runtime_error, value_error

SCRIPT = "__verified_script__"
"""The name under which the other process imports the script."""

_importing = False


def script() -> tuple[str, str] | None:
    """How to import the running script: `("module", name)` or `("file", path)`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    return ("file", os.path.abspath(path)) if path and os.path.exists(path) else None


def pickled(argument: str, function: Callable[..., Any], why: str) -> bytes:
    """A function as its name, or whatever else `pickle` makes of a callable.

    A `ValueError` if another process cannot import it, with the reason why one has to.
    """
    try:
        data = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _unreachable(argument, function, why) from error
    if b"__main__" in data and script() is None:
        raise _unreachable(argument, function, why)
    return data


class Copied(NamedTuple):
    """A function that is copied, with the classes that Keras knows by name."""

    function: Callable[..., Any]
    registered: dict[str, Any]


def registered_here() -> dict[str, Any]:
    """What the notebook has given Keras's `register_keras_serializable`."""
    if "keras" not in sys.modules:
        return {}
    known = sys.modules["keras"].saving.get_custom_objects()
    return {name: one for name, one in known.items() if one.__module__ == "__main__"}


def sent(argument: str, function: Callable[..., Any], why: str) -> dict[str, Any]:
    """Parts of a request: a function as `pickled` has it, or copied if it cannot be imported."""
    try:
        return {"function": pickled(argument, function, why)}
    except ValueError as unreachable:
        try:
            copied = Copied(function, registered_here())
            return {"function": dumped(copied, by_value=True), "by_value": True}
        except ImportError:
            unreachable.add_note("`pip install cloudpickle` lets it be copied instead.")
            raise unreachable from None
        except Exception as error:  # Any class may do anything here.
            raise value_error(
                f"`{argument}` cannot be copied to another process: {error}.",
                "Expected a function that uses modules, functions and data, which are copied "
                "with it, but no strategy, open file or lock.",
                "Make those inside of the function.",
                **{argument: function},
            ) from error


def dumped(value: Any, by_value: bool) -> bytes:
    """A pickle, with copies of all that has been typed into a notebook if that is wanted."""
    if not by_value:
        return pickle.dumps(value)
    import cloudpickle

    return cloudpickle.dumps(value)


def _unreachable(argument: str, function: object, why: str) -> ValueError:
    return value_error(
        f"`{argument}` cannot be imported by another process, which is needed because {why}.",
        "Expected a function at the top level of a .py file, not a lambda, a function inside "
        "another one, or one typed into a notebook.",
        "Move it to a file and import it (in a notebook: a cell that starts with "
        "`%%writefile my_model.py`).",
        **{argument: function},
    )


def refuse_while_importing(name: str) -> None:
    """Raise a `RuntimeError` where a script calls `name` while another process imports it."""
    if _importing:
        raise runtime_error(
            f"`{name}` was called while the script was being imported.",
            "Expected the script to do its work only when it is run itself.",
            'Put the call, and what else the script does, under `if __name__ == "__main__":`.',
            script=sys.modules[SCRIPT].__file__ if SCRIPT in sys.modules else None,
        )


class Functions(pickle.Unpickler):
    """Reads functions by name, those of the running script from where `script` says."""

    def __init__(self, file: Any, place: tuple[str, str] | None) -> None:
        super().__init__(file)
        self._place = place

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "__main__":
            module_name = _import_script(self._place).__name__
        return super().find_class(module_name, global_name)


def _import_script(place: tuple[str, str] | None) -> ModuleType:
    """Import the script that was running in the first process."""
    kind, name = place or ("module", "__main__")
    if kind == "module":
        return importlib.import_module(name)
    if SCRIPT not in sys.modules:
        spec = importlib.util.spec_from_file_location(SCRIPT, name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is not a Python file.")
        sys.modules[SCRIPT] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[SCRIPT])
    return sys.modules[SCRIPT]


def function_from(name: bytes, place: tuple[str, str] | None) -> Callable[..., Any]:
    """The function that `pickled` has named."""
    global _importing
    _importing = True
    try:
        found = Functions(io.BytesIO(name), place).load()
    finally:
        _importing = False
    if not isinstance(found, Copied):
        return found
    for known, one in found.registered.items():
        from keras import saving

        package, _, own = known.rpartition(">")
        saving.register_keras_serializable(package, own)(one)
    return found.function


def request(**parts: Any) -> bytes:
    """What `answered` reads in another process, which finds the same modules and script."""
    return pickle.dumps({"path": sys.path, "script": script(), **parts})


def answered(answer: Callable[[dict[str, Any]], Any]) -> Any:
    """What another process runs: it reads the request in one file, and writes the answer."""
    question, reply = map(Path, sys.argv[1:])
    parts = pickle.loads(question.read_bytes())
    # Before the answer, which reads functions of modules that the first process found there.
    sys.path[:] = parts["path"]
    given = answer(parts)
    reply.write_bytes(pickle.dumps(given))
    return given


def result_from(reply: bytes) -> Any:
    """What a function has returned in another process, with the classes of the running script."""
    place = script()
    if place:
        # By this name the other process knows the script.
        sys.modules.setdefault(
            place[1] if place[0] == "module" else SCRIPT, sys.modules["__main__"]
        )
    return pickle.loads(reply)


def transportable(error: Exception) -> Exception:
    """The error, or one that can be pickled; with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # Any class may do anything here.
        replacement = RuntimeError(f"{type(error).__name__}: {error}")
        replacement.add_note("".join(error.__notes__))
        return replacement
