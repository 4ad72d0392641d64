"""The line of the user's program that an operation comes from."""

import functools
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LIBRARIES = ("keras", "tensorflow", "keras_multigpu")

# How an error of TensorFlow names an operation of the graph that it ran.
NODE = re.compile(r"{{node ([^}]+)}}")


def place_of(op: Any) -> str:
    """The innermost of the user's lines inside the step that made an operation: `train.py:31`.

    A gradient has the line of its forward operation. If all lines are Keras's, as in its layers, it
    is the operation's name.
    """
    forward = forward_of(op)
    return (None if forward is None else user_line(forward)) or user_line(op) or op.name


def line_of_error(message: str, operations: Iterable[Any]) -> str | None:
    """The user's line of that of these operations, or copies of them, whose error this is."""
    known = {op.name: op for op in operations}
    # An error in the data may name operations that happen to have the same names.
    named = [] if "IteratorGetNext" in message else NODE.findall(message)
    for name in named:
        while name:
            # A copy has the name of its condition before its own, and perhaps a number behind.
            op = known.get(name) or known.get(re.sub(r"_\d+$", "", name))
            if op is not None:
                place = place_of(op)
                return None if place == op.name else place
            name = name.partition("/")[2]
    return None


def user_line(op: Any) -> str | None:
    roots = library_folders()
    # An operation that Python has not made has no traceback.
    for frame in reversed(op.traceback or ()):
        name = frame.filename
        if any(name.startswith(root) for root in roots[:-1]) or name.startswith("<frozen"):
            continue
        # Beyond this package is only the caller of `fit`, which has not made the operation.
        return None if name.startswith(roots[-1]) else f"{Path(name).name}:{frame.lineno}"
    return None


def forward_of(op: Any) -> Any:
    """The operation that another one, by its name, is the gradient of."""
    mark = "gradient_tape/"
    if mark not in op.name:
        return None
    name = op.name.rpartition(mark)[2]
    while "/" in name:
        name = name.rpartition("/")[0]
        try:
            return op.graph.get_operation_by_name(name)
        except (KeyError, ValueError):
            continue
    return None


@functools.cache
def library_folders() -> tuple[str, ...]:
    """The folders of the libraries, this package's last."""
    files = [sys.modules[name].__file__ for name in LIBRARIES if name in sys.modules]
    return tuple(f"{Path(str(file)).parent}/" for file in files)
