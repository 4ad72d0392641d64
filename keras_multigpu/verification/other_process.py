"""Runs a comparison in a fresh process, where TensorFlow has not started yet.

Functions travel by name, as in `pickle`; those of the running script travel as the script's
path, and the new process imports it. So, as with `multiprocessing`, the script's own work
has to stand under `if __name__ == "__main__":`.
"""

import functools
import importlib
import importlib.util
import io
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import keras

from keras_multigpu import new_process
from keras_multigpu.checks import problem
from keras_multigpu.verification import in_this_process
from keras_multigpu.verification.batches import first_batches
from keras_multigpu.verification.batches import from_arrays
from keras_multigpu.verification.batches import to_arrays
from keras_multigpu.verification.verification import Verification

INSIDE = "KERAS_MULTIGPU_VERIFYING"
"""The environment variable that is set in the other process."""

SCRIPT = "__verified_script__"
"""The name under which the other process imports the script."""


def run(
    build_model: Callable[[], Any], data: Any, replicas: Sequence[int], steps: int
) -> Verification:
    """Compare in a new process, on logical CPU devices."""
    request = {
        "path": sys.path,
        "script": script(),
        "precision": (keras.config.floatx(), keras.config.dtype_policy().name),
        "build_model": pickled("build_model", build_model),
        "data": pickled("data", data) if callable(data) else None,
        "batches": None
        if callable(data)
        else [to_arrays(batch) for batch in first_batches(data, steps)],
        "replicas": tuple(replicas),
        "steps": steps,
    }
    result = ask(request)
    if isinstance(result, BaseException):
        raise result
    return result


def ask(request: dict[str, Any]) -> Any:
    """What `answer` returns in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        question, reply = Path(folder, "question"), Path(folder, "reply")
        question.write_bytes(pickle.dumps(request))
        ended = subprocess.run(
            new_process.command(__name__, str(question), str(reply)),
            env=new_process.environment(**{INSIDE: "1"}),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if reply.exists():
            return pickle.loads(reply.read_bytes())
    raise RuntimeError(
        problem(
            "The process that compares the models died.",
            "Expected it to finish.",
            "See what it wrote, below; it may have run out of memory.",
            exit_code=ended.returncode,
            wrote=ended.stderr[-2000:],
        )
    )


def script() -> tuple[str, str] | None:
    """How to import the running script: `("module", name)` or `("file", path)`."""
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:
        return "module", spec.name
    path = getattr(main, "__file__", None)
    return ("file", os.path.abspath(path)) if path and os.path.exists(path) else None


def pickled(argument: str, function: Callable[..., Any]) -> bytes:
    """A function as its name, or whatever else `pickle` makes of a callable."""
    try:
        data = pickle.dumps(function)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise unreachable(argument, function) from error
    if b"__main__" in data and script() is None:
        raise unreachable(argument, function)
    return data


def unreachable(argument: str, function: object) -> ValueError:
    """The error for a function that another process cannot import."""
    return ValueError(
        problem(
            f"`{argument}` cannot be imported by another process, which is needed because "
            "TensorFlow has started in this one with too few devices.",
            "Expected a function that stands at the top level of a .py file, and no lambda, no "
            "function inside another one, and none typed into a notebook.",
            "Move it to a file and import it (in a notebook: a cell that starts with "
            "`%%writefile my_model.py`), or restart Python and call `verify` first.",
            **{argument: function},
        )
    )


def refuse_if_inside() -> None:
    """Raise a `RuntimeError` where a script verifies while the other process imports it."""
    if os.environ.get(INSIDE):
        raise RuntimeError(
            problem(
                "`verify` was called while the script was being imported.",
                "Expected the script to do its work only when it is run itself.",
                'Put the call, and what else the script does, under `if __name__ == "__main__":`.',
                script=sys.modules[SCRIPT].__file__ if SCRIPT in sys.modules else None,
            )
        )


class Functions(pickle.Unpickler):
    """Reads functions by name, those of the running script from its file.

    Args:
        place: What `script` returned.
    """

    def __init__(self, file: Any, place: tuple[str, str] | None) -> None:
        super().__init__(file)
        self._place = place

    def find_class(self, module_name: str, global_name: str) -> Any:
        """What a name stands for."""
        if module_name == "__main__":
            module_name = import_script(self._place).__name__
        return super().find_class(module_name, global_name)


def import_script(place: tuple[str, str] | None) -> ModuleType:
    """Import the script that was running in the first process."""
    kind, name = place or ("module", "__main__")
    if kind == "module":
        return importlib.import_module(name)
    if SCRIPT not in sys.modules:
        spec = importlib.util.spec_from_file_location(SCRIPT, name)
        if spec is None or spec.loader is None:
            raise ImportError(f"{name} is no Python file.")
        sys.modules[SCRIPT] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[SCRIPT])
    return sys.modules[SCRIPT]


def answer(request: dict[str, Any]) -> Verification | BaseException:
    """What the other process does: the comparison, or what it raised."""
    sys.path[:] = request["path"]
    floatx, policy = request["precision"]
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    # First of all: importing the user's functions may start TensorFlow.
    in_this_process.devices_are_ready(max(request["replicas"]))
    try:
        build_model = function_from(request["build_model"], request["script"])
        if request["batches"] is None:
            data = function_from(request["data"], request["script"])
        else:
            data = functools.partial(iter, list(map(from_arrays, request["batches"])))
        return in_this_process.run(build_model, data, request["replicas"], request["steps"])
    except Exception as error:
        return transportable(error)


def function_from(name: bytes, place: tuple[str, str] | None) -> Callable[..., Any]:
    """The function that `pickled` has named."""
    return Functions(io.BytesIO(name), place).load()


def transportable(error: Exception) -> Exception:
    """The error, or one that can be pickled; with its traceback as a note."""
    error.add_note("".join(traceback.format_exception(error)))
    try:
        return pickle.loads(pickle.dumps(error))
    except Exception:  # Any class may do anything here.
        replacement = RuntimeError(f"{type(error).__name__}: {error}")
        replacement.add_note("".join(error.__notes__))
        return replacement


def main(question: str, reply: str) -> None:
    """Answer the question in one file by writing another."""
    result = answer(pickle.loads(Path(question).read_bytes()))
    Path(reply).write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
