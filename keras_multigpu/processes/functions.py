"""Functions that another process calls, and their results.

Functions travel by name, as in `pickle`. For those of the running script its path travels too, and
the new process imports it. As with `multiprocessing`, the script's own work therefore has to be
under `if __name__ == "__main__":`.

cloudpickle would carry lambdas and notebook functions as well, but it copies whatever a function
refers to: a layer class of the script is then registered nowhere, so that a saved model does not
load in the other process, and a function that uses a strategy or a lock fails. So only
`function_request` uses it, for functions that cannot be imported.
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

CALL = f"from {__name__} import call_for_parent as call; call()"
"""The code of a process that calls the function of a request; see `call_for_parent`."""

CALL_OR_FAIL = f"import sys; from {__name__} import call_for_parent as call; sys.exit(call())"
"""The same, with exit code 1 if the function raised."""

_importing = False


def script() -> tuple[str, str] | None:
    """How to import the running script: `("module", name)` or `("file", path)`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    return ("file", os.path.abspath(path)) if path and os.path.exists(path) else None


def pickle_function(argument: str, function: Callable[..., Any], why: str) -> bytes:
    """Pickle a function; a `ValueError` with the reason `why` if it cannot be imported by name."""
    try:
        data = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _not_importable(argument, function, why) from error
    if b"__main__" in data and script() is None:
        raise _not_importable(argument, function, why)
    return data


def _not_importable(argument: str, function: object, why: str) -> ValueError:
    return value_error(
        f"`{argument}` cannot be imported by another process, which is needed because {why}.",
        "Expected a function at the top level of a .py file, not a lambda, a nested function, or "
        "one typed into a notebook.",
        "Move it to a file and import it (in a notebook: a cell that starts with "
        "`%%writefile my_model.py`).",
        **{argument: function},
    )


class Copied(NamedTuple):
    """A function copied by cloudpickle, and the notebook's classes that Keras knows by name."""

    function: Callable[..., Any]
    registered: dict[str, Any]


def function_request(argument: str, function: Callable[..., Any], why: str) -> bytes:
    """The request to call a function, which is copied if it cannot be imported."""
    try:
        return request(function=pickle_function(argument, function, why))
    except ValueError as not_importable:
        known = sys.modules["keras"].saving.get_custom_objects() if "keras" in sys.modules else {}
        registered = {name: one for name, one in known.items() if one.__module__ == "__main__"}
        try:
            import cloudpickle

            copied = cloudpickle.dumps(Copied(function, registered))
        except ImportError:
            not_importable.add_note("`pip install cloudpickle` lets it be copied instead.")
            raise not_importable from None
        except Exception as error:  # Any class may do anything here.
            raise value_error(
                f"`{argument}` cannot be copied to another process: {error}.",
                "Expected a function that uses modules, functions and data, which are copied "
                "with it, but no strategy, open file or lock.",
                "Make those inside the function.",
                **{argument: function},
            ) from error
        return request(function=copied, by_value=True)


def request(**parts: Any) -> bytes:
    """What `call_for_parent` reads in another process, which finds the same modules and script."""
    return pickle.dumps({"path": sys.path, "script": script(), **parts})


def refuse_while_importing(name: str) -> None:
    """Raise a `RuntimeError` if the script calls `name` while another process imports it."""
    if _importing:
        raise runtime_error(
            f"`{name}` was called while the script was being imported.",
            "Expected the script to do its work only when it is run itself.",
            'Put the call, and what else the script does, under `if __name__ == "__main__":`.',
            script=sys.modules[SCRIPT].__file__ if SCRIPT in sys.modules else None,
        )


class _Unpickler(pickle.Unpickler):
    """Looks up names of `__main__` in the script that the first process runs."""

    def __init__(self, data: bytes, place: tuple[str, str] | None) -> None:
        super().__init__(io.BytesIO(data))
        self._place = place

    def find_class(self, module_name: str, global_name: str) -> Any:
        if module_name == "__main__":
            module_name = _import_script(self._place).__name__
        return super().find_class(module_name, global_name)


def _import_script(place: tuple[str, str] | None) -> ModuleType:
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


def function_from(data: bytes, place: tuple[str, str] | None) -> Callable[..., Any]:
    """The function in a request, whose script is at `place`."""
    global _importing
    _importing = True
    try:
        found = _Unpickler(data, place).load()
    finally:
        _importing = False
    if not isinstance(found, Copied):
        return found
    for known, one in found.registered.items():
        from keras import saving

        package, _, name = known.rpartition(">")
        saving.register_keras_serializable(package, name)(one)
    return found.function


def call_for_parent() -> bool:
    """Call the function of the request in the file `argv[1]`; whether it raised.

    Its pickled result or error goes to the file `argv[2]`.
    """
    question, reply = map(Path, sys.argv[1:])
    parts = pickle.loads(question.read_bytes())
    # First of all: the functions may be in modules that the first process found there.
    sys.path[:] = parts["path"]
    result, error = _call(parts)
    reply.write_bytes(pickle.dumps((result, error)))
    return error is not None


def _call(request: dict[str, Any]) -> tuple[bytes, Exception | None]:
    try:
        value = function_from(request["function"], request["script"])()
        try:
            if not request.get("by_value"):
                return pickle.dumps(value), None
            import cloudpickle

            return cloudpickle.dumps(value), None
        except Exception as error:  # Any class may do anything here.
            raise value_error(
                f"What the function returned cannot be pickled: {error}.",
                "Expected a model, a history, arrays, or anything else that `pickle` knows.",
                "Return less, or write it to a file and return the path.",
                returned=type(value),
            ) from error
    except Exception as error:
        # Shows the error where it happened, in the output of this process.
        traceback.print_exc()
        return b"", transportable(error)


def result_from(reply: bytes) -> Any:
    """Unpickle what another process answered, with the classes of the running script."""
    place = script()
    if place:
        # The other process knows the script by this name.
        sys.modules.setdefault(
            place[1] if place[0] == "module" else SCRIPT, sys.modules["__main__"]
        )
    return pickle.loads(reply)


def transportable(error: Exception) -> Exception:
    """The error, or one like it that can be pickled, with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # Any class may do anything here.
        replacement = RuntimeError(f"{type(error).__name__}: {error}")
        replacement.add_note("".join(error.__notes__))
        return replacement
