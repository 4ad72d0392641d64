"""The step of a model as one device runs it, whatever strategy its variables live under."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import (
    graph_internals,
    optimizer_internals,
    remat_internals,
    variable_internals,
)
from keras_multigpu.training.shares import Batch, as_given
from keras_multigpu.training.steps.rematerialization import recomputed
from keras_multigpu.training.variables.adjusted_schedule import adjustments
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.training.variables.storage import for_one_device

_thread = threading.local()

one_at_a_time = threading.RLock()
"""Held while a model's variables are those of one device, so that no other thread sees these."""


def traces_one_device() -> bool:
    """Whether this thread is tracing a model's step as one device runs it."""
    return bool(getattr(_thread, "traces", False))


remat_internals.recompute_by(recomputed, traces_one_device)


@contextlib.contextmanager
def one_device(model: Any, variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Make the model's step that of one device."""
    with one_at_a_time, graph_internals.single_device(), plain_storages(variables):
        with optimizer_internals.on_one_device(optimizers_of(model)):
            # So that a call of Keras's own step in the model's step is not distributed again.
            before, _thread.traces = traces_one_device(), True
            try:
                yield
            finally:
                _thread.traces = before


def trace_for_one_device(model: Any, function: Callable[[Any], Any], spec: Batch) -> Any:
    """The graph of a step, as one device runs it."""
    form = getattr(type(spec), "_make", tuple)

    def step(*parts: Any) -> Any:
        # XLA has to know shapes, so TensorFlow builds the gradient of a loop differently for it.
        with graph_internals.written_for_xla() if model.jit_compile else contextlib.nullcontext():
            return function(as_given(form(parts)))

    with one_device(model, known_variables(model)):
        return tf.function(step, autograph=False).get_concrete_function(*spec)


def known_variables(model: Any) -> list[keras.Variable]:
    """All Keras variables that a step may use, without repetition."""
    optimizers = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    everything = [*model.variables, *model.metrics_variables, *optimizers]
    everything += adjustments(getattr(model, "optimizer", None))
    everything.append(variable_internals.global_seed_state())
    return list({id(variable): variable for variable in everything}.values())


@contextlib.contextmanager
def plain_storages(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Replace each variable's copies by the first one, and parts by their stand-in."""
    known = list(variables)
    storages = variable_internals.storages_of(known)
    variable_internals.set_storages(known, [for_one_device(storage) for storage in storages])
    try:
        yield
    finally:
        variable_internals.set_storages(known, storages)
