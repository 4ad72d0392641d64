"""The door through which a step of the user's own reaches all replicas.

Such a step calls loss objects, `keras.ops.mean` and `tf.GradientTape` by their public names,
and none of them can be told of other replicas. So they are exchanged while the step runs. Some
do something else where Keras or TensorFlow calls them, and messages name the user's line, so it is
also told here whose code runs.
"""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.python.eager.polymorphic_function import atomic_function
from tensorflow.python.framework import op_callbacks
from tensorflow.python.ops import custom_gradient, embedding_ops
from tensorflow.python.ops.control_flow_v2_func_graphs import ControlFlowFuncGraph
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

Exchange = tuple[Sequence[tuple[Any, str]], Callable[..., Any]]
"""Owners and the names of their attributes, and a replacement, given the original at first."""

_thread = threading.local()
_lock = threading.Lock()
_users: dict[Any, int] = {}
_saved: dict[Any, list[tuple[Any, str, Any]]] = {}


@contextlib.contextmanager
def exchanged(exchanges: Sequence[Exchange]) -> Iterator[None]:
    """Exchange functions for as long as anybody needs it.

    The replacements must leave threads alone that run no step. A place is always given the same
    ones, together with the same others.
    """
    # Steps of several models may overlap; the last one restores.
    places = tuple(place for those, _ in exchanges for place in those)
    with _lock:
        if not _users.setdefault(places, 0):
            _saved[places] = [(owner, name, getattr(owner, name)) for owner, name in places]
            for those, replacement in exchanges:
                for owner, name in those:
                    setattr(owner, name, replaced(getattr(owner, name), replacement))
        _users[places] += 1
    try:
        yield
    finally:
        with _lock:
            _users[places] -= 1
            if not _users[places]:
                for owner, name, original in _saved.pop(places):
                    setattr(owner, name, original)


def replaced(original: Any, replacement: Callable[..., Any]) -> Any:
    """What calls the replacement in place of a function, a method or a property."""
    function = original.fget if isinstance(original, property) else original

    def call(*args: Any, **kwargs: Any) -> Any:
        return replacement(function, *args, **kwargs)

    return property(call) if isinstance(original, property) else call


def called_by_library(depth: int = 1) -> bool:
    """Whether an exchanged function was called by Keras or TensorFlow for ends of their own.

    Args:
        depth: How many calls ago: 1 if the replacement itself asks.
    """
    frame: FrameType | None = sys._getframe(depth + 2)  # Past the call in `replaced`.
    # `keras.ops` only passes on what somebody else asks for.
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("keras.src.ops.", "keras.src.backend.")
    ):
        frame = frame.f_back
    # Metrics and optimizers take sums too, of what is theirs.
    module = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.startswith(("keras.", "tensorflow."))


def folder_of(module: Any, *parts: str) -> str:
    """The folder of a package, or one inside of it."""
    return os.path.join(os.path.dirname(module.__file__), *parts, "")


KERAS = folder_of(keras)
PASSED_THROUGH = (
    folder_of(tf),
    *(folder_of(keras, "src", name) for name in ("ops", "backend", "random", "utils")),
    os.path.join(Path(__file__).parents[1], ""),
    contextlib.__file__,
    functools.__file__,
)
"""Where code stands that does what others ask it to do."""

# `keras.ops.map` tries its function on the first row, to see what it returns.
FIRST_ROW = (folder_of(keras, "src", "backend", "tensorflow") + "core.py", "map")


def user_line(operation: tf.Operation | None = None) -> str | None:
    """The line of a user's code that makes an operation now, or made it; None if it is Keras's."""
    then = [] if operation is None else reversed(operation.traceback)
    lines = lines_now() if operation is None else ((e.filename, e.lineno, e.name) for e in then)
    for file, line, function in lines:
        if (file, function) == FIRST_ROW:
            return None
        if file.startswith(PASSED_THROUGH) or "__autograph_generated_file" in file:
            continue
        if file.startswith(KERAS):
            made_by_functional = file == folder_of(keras, "src", "models") + "functional.py"
            return "an operation of the functional model" if made_by_functional else None
        return f"{Path(file).name}:{line}"
    return None


def lines_now() -> Iterator[tuple[str, int, str]]:
    """The files, lines and functions that run, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name
        frame = frame.f_back


LOSSES = ((keras.losses.Loss, "__call__"),)
"""Where every loss object is called, unless its class has a `__call__` of its own."""

ADDED = ((keras.layers.Layer, "losses"),)
"""Where the losses that layers have added are read."""

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


TAPES = ((tf.GradientTape, "__enter__"),)
"""Where tapes begin to record."""


def watches_variables(tape: tf.GradientTape) -> bool:
    """Whether a tape watches each variable that is read, which it does not tell."""
    return bool(tape._watch_accessed_variables)


CUSTOM_GRADIENTS = (
    (custom_gradient, "_graph_mode_decorator"),
    (custom_gradient, "_eager_mode_decorator"),
)
"""Where functions that were decorated with `tf.custom_gradient` are called."""

TURNS = ((tf.distribute.ReplicaContext, "merge_call"),)
"""Where a replica waits for the others; in one process they run then, on the same layers."""

VARIABLES = ((keras.Variable, "assign"),)
"""Where every Keras variable gets a new value."""

ASSIGNMENTS = tuple(
    (ResourceVariable, name)
    for name in dir(ResourceVariable)
    if name.startswith(("assign", "scatter_", "batch_scatter"))
)
"""Where every `tf.Variable` gets a new value, whose class has no public name."""


def outside(
    read: Callable[..., Any],
    original: Callable[..., Any],
    variable: tf.Variable,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """A function of a `tf.Variable`: `read` of the value, which the caller of the graph gives."""
    graph = tf.compat.v1.get_default_graph()
    # Branches and bodies of loops are graphs inside of the one that reads.
    while isinstance(graph, ControlFlowFuncGraph):
        graph = graph.outer_graph
    # A `tf.function` inside may be called from elsewhere too.
    here = graph is getattr(_thread, "reads_outside", None)
    if not here or not isinstance(variable, ResourceVariable):
        return original(variable, *args, **kwargs)
    spec = tf.TensorSpec(variable.shape, variable.dtype)
    value = graph.capture_call_time_value(variable.read_value, spec, key=id(variable))
    return read(value, *args, **kwargs)


READS: list[Exchange] = [
    ([(owner, name)], functools.partial(outside, read))
    for owner, name, read in (
        (ResourceVariable, "_read_variable_op", lambda value, no_copy=False: value),
        (ResourceVariable, "sparse_read", tf.gather),
        (ResourceVariable, "gather_nd", tf.gather_nd),
        # By which TensorFlow looks up rows where the variable is.
        (embedding_ops, "_colocate_with", lambda value: contextlib.nullcontext()),
    )
]
"""Where the value of every `tf.Variable` comes from."""


@contextlib.contextmanager
def variables_read_outside() -> Iterator[None]:
    """Let the caller of the graph that is being made read TensorFlow's variables for it."""
    # XLA compiles a graph for one device, which cannot read the variables of another.
    before = getattr(_thread, "reads_outside", None)
    _thread.reads_outside = tf.compat.v1.get_default_graph()
    try:
        with exchanged(READS):
            yield
    finally:
        _thread.reads_outside = before


def inside_a_layer() -> bool:
    """Whether a layer or model is being called on this thread."""
    # Keras opens a call context in the outermost call, and has no public name for it.
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
        # TensorFlow takes what is returned, and would have a list where nobody looks.
        return list(outputs)

    of_interest = graph
    op_callbacks.add_op_callback(callback)
    try:
        with exchanged(CALLS):
            yield
    finally:
        op_callbacks.remove_op_callback(callback)


def noted_call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The making of a call of a function, which is noted like all operations."""
    outputs = original(*args, **kwargs)
    if outputs and op_callbacks.should_invoke_op_callbacks():
        made = outputs[0].op
        op_callbacks.invoke_op_callbacks(
            made.type, tuple(made.inputs), (), outputs, made.name, made.graph
        )
    return outputs


CALLS: list[Exchange] = [([(atomic_function, "make_call_op_in_graph")], noted_call)]
"""Where a graph gets a call of a function, the only operation that TensorFlow does not tell."""

BODIES = {
    **dict.fromkeys(("PartitionedCall", "StatefulPartitionedCall"), ("f",)),
    **dict.fromkeys(("If", "StatelessIf"), ("then_branch", "else_branch")),
    **dict.fromkeys(("While", "StatelessWhile"), ("body",)),
}
"""Under which names operations keep the functions that they call."""


def bodies(kind: str, output: tf.Tensor) -> list[Any]:
    """The graphs of the functions that an operation calls, from one of its outputs."""
    if kind not in BODIES or not tf.is_symbolic_tensor(output):
        return []
    names = [output.op.get_attr(name).name for name in BODIES[kind]]
    functions = map(output.graph._get_function, names)
    # Those that TensorFlow defines in its old way, as for `ctc_loss`, have none.
    return [function.graph for function in functions if hasattr(function, "graph")]
