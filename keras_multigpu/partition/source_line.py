"""Which line of the user's program an operation comes from."""

import functools
import sys
from pathlib import Path

import tensorflow as tf

LIBRARIES = ("keras", "tensorflow", "keras_multigpu")


def place_of(op: tf.Operation) -> str:
    """Where an operation comes from: `train.py:31`, or its name where Keras has made it."""
    return line_of(op) or op.name


def line_of(op: tf.Operation) -> str | None:
    """The innermost line of the user's inside of the step that made an operation, `train.py:31`.

    A gradient has the line of what it is the gradient of. None where no line of the user's is
    inside of the step, as where Keras's own layers do all of it.
    """
    forward = forward_of(op)
    found = own_line(forward) if forward is not None else None
    return found or own_line(op)


def own_line(op: tf.Operation) -> str | None:
    roots = folders()
    # Where Python has made none of it, there is nothing.
    for frame in reversed(op.traceback or ()):
        name = frame.filename
        if any(name.startswith(root) for root in roots[:-1]) or name.startswith("<frozen"):
            continue
        # The caller of `fit` has not made the operation.
        return None if name.startswith(roots[-1]) else f"{Path(name).name}:{frame.lineno}"
    return None


def forward_of(op: tf.Operation) -> tf.Operation | None:
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
def folders() -> tuple[str, ...]:
    """Where the libraries are; this package last."""
    files = [sys.modules[name].__file__ for name in LIBRARIES if name in sys.modules]
    return tuple(f"{Path(str(file)).parent}/" for file in files)
