"""`keras.RematScope`: which function recomputes, and Keras's state during a call."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_multigpu.keras_internals.model_internals import layers_of

# Keras 3.16 has the operations of a backend in `ops`.
operations = backend.ops if hasattr(backend, "ops") else backend.core

_of_keras = operations.remat
_recomputed: Any = None
_in_step: Callable[[], bool] = bool


def recompute_by(recomputed: Callable[[Any, Any, Any], Any], in_step: Callable[[], bool]) -> None:
    """Replace Keras's recomputation wherever `in_step` returns true."""
    global _recomputed, _in_step
    _recomputed, _in_step = recomputed, in_step


def remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose intermediate results are recomputed for its gradient."""
    of_keras = _of_keras(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        eager, in_step = tf.executing_eagerly(), _in_step()
        if in_symbolic_scope() or (in_step and eager):
            # Shapes have no gradient, and without a graph Keras would draw new random numbers.
            return function(*args, **kwargs)
        if _recomputed is not None and (in_step or (kwargs and not eager)):
            return _recomputed(function, args, kwargs)
        # Plain Keras stays as it is, except where it would raise.
        return of_keras(*args, **kwargs)

    return call


# Layers look it up at each call. `keras.remat` may be called before anything of this package is
# used.
operations.remat = remat

CALL = "current_call_ctx", "autocast_scope"
"""Keras's global state with the `training` argument and the precision of a call."""


def call_under_way() -> dict[str, Any]:
    """Keras's state of the current call of layers."""
    return {name: global_state.get_global_attribute(name) for name in CALL}


@contextlib.contextmanager
def in_call(known: dict[str, Any]) -> Iterator[None]:
    """Call layers as part of that call; a new one would neither train nor use its precision."""
    before = call_under_way()
    for name, value in ((name, known[name]) for name in CALL):
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def adding_layer(loss: Any, function: Any) -> keras.Layer | None:
    """The layer that added a loss in the current call, or in this function."""
    # In a `StatelessScope` a layer keeps only the ids of its losses.
    call = global_state.get_global_attribute("current_call_ctx")
    outermost = getattr(function, "__self__", function) if call is None else call.entry_layer
    layers = layers_of(outermost) if isinstance(outermost, keras.Layer) else []
    return next((layer for layer in layers if id(loss) in layer._loss_ids), None)


def held_outside(graph: Any) -> dict[str, Any]:
    """The tensors of other graphs that a graph captures, by their names inside it."""
    return {inner.name: outer for outer, inner in getattr(graph, "captures", ())}


def in_this_graph(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor as operations of the current graph can use it."""
    graph = tf.compat.v1.get_default_graph()
    return tensor if tensor.graph is graph else graph.capture(tensor)
