"""The door to `keras.RematScope`: which function recomputes, and what Keras knows of a call."""

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

_of_keras = backend.core.remat
_recomputed: Any = None
_in_step: Callable[[], bool] = bool


def recompute_by(recomputed: Callable[[Any, Any, Any], Any], in_step: Callable[[], bool]) -> None:
    """Let something else than Keras recompute a function, and say when."""
    global _recomputed, _in_step
    _recomputed, _in_step = recomputed, in_step


def remat(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function whose results are not kept for its gradient, but computed again."""
    of_keras = _of_keras(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        eager, in_step = tf.executing_eagerly(), _in_step()
        if in_symbolic_scope() or (in_step and eager):
            # Shapes have no gradient. Without a graph Keras would draw again.
            return function(*args, **kwargs)
        if _recomputed is not None and (in_step or (kwargs and not eager)):
            return _recomputed(function, args, kwargs)
        # Plain Keras stays as it is, but where it can only raise.
        return of_keras(*args, **kwargs)

    return call


# Layers ask for it in a private method, whenever they are called; `keras.remat` may be called when
# one is made, before anything of this package is used.
backend.core.remat = remat

CALL = "current_call_ctx", "autocast_scope"
"""Where Keras keeps whether a layer trains, and the precision that it computes in."""


def call_under_way() -> dict[str, Any]:
    """What Keras knows of the call of layers that is under way."""
    return {name: global_state.get_global_attribute(name) for name in CALL}


@contextlib.contextmanager
def in_call(known: dict[str, Any]) -> Iterator[None]:
    """Let layers be called as if that call were still under way."""
    # Nothing public restores it: a layer called by itself would not train, and in float32.
    before = call_under_way()
    for name, value in ((name, known[name]) for name in CALL):
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def adding_layer(loss: Any, function: Any) -> keras.Layer | None:
    """The layer that has added a loss in the call that is under way, or in this function."""
    # Inside a `StatelessScope` a layer remembers its losses by their ids alone.
    call = global_state.get_global_attribute("current_call_ctx")
    outermost = getattr(function, "__self__", function) if call is None else call.entry_layer
    layers = layers_of(outermost) if isinstance(outermost, keras.Layer) else []
    return next((layer for layer in layers if id(loss) in layer._loss_ids), None)


def held_outside(graph: Any) -> dict[str, Any]:
    """The tensors of other graphs that a graph uses, by the names that they have in it."""
    return {inner.name: outer for outer, inner in getattr(graph, "captures", ())}


def in_this_graph(tensor: tf.Tensor) -> tf.Tensor:
    """What operations of the graph that is being traced get in the place of a tensor."""
    graph = tf.compat.v1.get_default_graph()
    return tensor if tensor.graph is graph else graph.capture(tensor)
