"""The door through which a step of the user's own reaches all replicas.

Such a step calls loss objects, `keras.ops.mean` and `tf.GradientTape` by their public names,
and none of them can be told of other replicas. So they are exchanged while the step runs.
"""

import contextlib
import sys
import threading
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

Exchange = tuple[Any, str, Callable[..., Any]]
"""Whose attribute, its name, and a function of the original that makes the replacement."""

_lock = threading.Lock()
_users: dict[Any, int] = {}
_saved: dict[Any, list[tuple[Any, str, Any]]] = {}


@contextlib.contextmanager
def exchanged(exchanges: Sequence[Exchange]) -> Iterator[None]:
    """Exchange functions for as long as anybody needs it.

    The replacements must leave threads alone that run no step. A place is always given the same
    ones, together with the same others: steps of several models may overlap, and the last one
    restores.
    """
    places = tuple((owner, name) for owner, name, _ in exchanges)
    with _lock:
        if not _users.setdefault(places, 0):
            _saved[places] = [(owner, name, getattr(owner, name)) for owner, name in places]
            for (owner, name, make), (_, _, original) in zip(
                exchanges, _saved[places], strict=True
            ):
                setattr(owner, name, make(original))
        _users[places] += 1
    try:
        yield
    finally:
        with _lock:
            _users[places] -= 1
            if not _users[places]:
                for owner, name, original in _saved.pop(places):
                    setattr(owner, name, original)


LOSSES = ((keras.losses.Loss, "__call__"),)
"""Where every loss object is called, unless its class has a `__call__` of its own."""

MEANS = ((tf, "reduce_mean"), (tf.math, "reduce_mean"))
"""Where means are taken, also by `keras.ops.mean`."""

SUMS = ((tf, "reduce_sum"), (tf.math, "reduce_sum"))
"""Where sums are taken, also by `keras.ops.sum`."""

VARIANCES = ((tf.math, "reduce_variance"),)
"""Where variances are taken, also by `keras.ops.var`."""

DEVIATIONS = ((tf.math, "reduce_std"),)
"""Where their roots are, also by `keras.ops.std`."""

MOMENTS = ((tf.nn, "moments"),)
"""Where both are taken, also by `keras.ops.moments`."""

GRADIENTS = ((tf.GradientTape, "gradient"),)
"""Where gradients come from."""


VARIABLES = ((keras.Variable, "assign"),)
"""Where every Keras variable gets a new value."""

ASSIGNMENTS = tuple(
    (ResourceVariable, name)
    for name in dir(ResourceVariable)
    if name.startswith(("assign", "scatter_", "batch_scatter"))
)
"""Where every `tf.Variable` gets a new value, whose class has no public name."""


def inside_a_layer() -> bool:
    """Whether a layer or model is being called on this thread.

    Keras opens a call context in the outermost call, and has no public name for it.
    """
    return global_state.get_global_attribute("current_call_ctx") is not None


@contextlib.contextmanager
def noted_operations(
    note: Callable[[str, Any, Any, Any], None], graph: tf.Graph | None = None
) -> Iterator[None]:
    """Call `note(kind, inputs, attributes, outputs)` for each operation of this thread.

    Args:
        note: The function.
        graph: The graph in which they are made; without one, what runs eagerly is noted, for
            a graph can be asked later what a tensor was made of, and nobody else remembers.
    """

    def callback(
        kind: Any,
        inputs: Any,
        attributes: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> Any:
        if graph is of_interest:
            note(tf.compat.as_str(kind), inputs, attributes, outputs)
        return outputs

    of_interest = graph
    op_callbacks.add_op_callback(callback)
    try:
        yield
    finally:
        op_callbacks.remove_op_callback(callback)


def called_by_library(depth: int = 1) -> bool:
    """Whether an exchanged function was called by Keras or TensorFlow for ends of their own.

    Metrics and optimizers take sums too, of what is theirs. `keras.ops` is only passed through.

    Args:
        depth: How many calls ago: 1 if the replacement itself asks.
    """
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("keras.src.ops.", "keras.src.backend.")
    ):
        frame = frame.f_back
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.startswith(("keras.", "tensorflow."))


PASSED_THROUGH = ("tensorflow.", "keras.src.ops.", "keras.src.backend.", "keras.src.utils.")
"""Modules that do what others ask them to do."""


def user_line() -> str | None:
    """The line of a user's code that makes the present operation; None if it is Keras's code."""
    frame: FrameType | None = sys._getframe(1)
    own = ("keras_multigpu.", "contextlib", "functools")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        (*PASSED_THROUGH, *own)
    ):
        frame = frame.f_back
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    if module == "keras.src.models.functional":
        return "an operation of the functional model"
    if frame is None or module.startswith("keras."):
        return None
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
