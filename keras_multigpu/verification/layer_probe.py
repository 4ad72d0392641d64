"""Finds layers that treat a share of a batch otherwise than the whole batch.

On one device the model runs over the whole batch, and every layer's inputs and outputs are
recorded. Then it runs over one replica's rows. Each layer's output is compared with the
rows that were recorded, and replaced by them. So every layer is tested with inputs that are
right, and an error is found where it arises, not where it arrives. Where a layer's inputs
are wrong although all outputs before it were put right, the code that called it is at
fault: the `call` of a layer around it, or the `train_step`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.verification.participants import operations_of

Place: TypeAlias = keras.Operation | None
"""A layer or another operation of a model; None is the training step around them."""

Judgement: TypeAlias = tuple[Callable[[Any], Any], bool]
"""What to do with the outputs of a call, and whether its inputs were right."""


class Call:
    """One call of an operation in the run over the whole batch."""

    def __init__(self, operation: keras.Operation, inputs: list[np.ndarray]) -> None:
        self.operation = operation
        self.inputs = inputs
        self.outputs: list[np.ndarray] = []


class Rows(NamedTuple):
    """Some rows of a batch: the first, the one after the last, and how many it has."""

    start: int
    stop: int
    batch_size: int


class Replay:
    """What a run over some rows has shown."""

    def __init__(self, rows: Rows) -> None:
        self.rows = rows
        self.differing: list[Place] = []
        self.failing: Place = None
        self.error: Exception | None = None
        self.result: Any = None


class LayerProbe:
    """Watches all operations of a model from now on."""

    def __init__(self, model: keras.Model, exempt: list[keras.Layer], tolerance: float) -> None:
        self._exempt = exempt
        self._tolerance = tolerance
        self._recorded: list[Call] = []
        self._replay: Replay | None = None
        self._entered = 0
        # The operations that are running, and whether each came by the right inputs.
        self._running: list[tuple[keras.Operation, bool]] = []
        for operation in operations_of(model):
            vars(operation)["call"] = self._watched(operation, operation.call)

    def record(self, run: Callable[[], Any]) -> Any:
        """Run over the whole batch and remember what the operations did; what `run` returned."""
        self._recorded, self._replay, self._running = [], None, []
        return run()

    def replay(self, rows: Rows, run: Callable[[], Any]) -> Replay:
        """Run over some rows, and compare what the operations do."""
        self._replay, self._entered, self._running = Replay(rows), 0, []
        try:
            self._replay.result = run()
        except Exception as error:  # Where it arose is what we are looking for.
            self._replay.error = error
        return self._replay

    def _watched(self, operation: keras.Operation, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # In a graph tensors have no values to compare.
            if not tf.executing_eagerly():
                return call(*args, **kwargs)
            inputs = [part.numpy() for part in tensors_in((args, kwargs))]
            judge = self._recording if self._replay is None else self._comparing
            finish, inputs_are_right = judge(operation, inputs)
            self._running.append((operation, inputs_are_right))
            try:
                outputs = call(*args, **kwargs)
            except Exception as error:
                self._fails(operation, error)
                raise
            finally:
                self._running.pop()
            return finish(outputs)

        return watched

    def _recording(self, operation: keras.Operation, inputs: list[np.ndarray]) -> Judgement:
        call = Call(operation, inputs)
        self._recorded.append(call)

        def finish(outputs: Any) -> Any:
            call.outputs = [part.numpy() for part in tensors_in(outputs)]
            return outputs

        return finish, True

    def _comparing(self, operation: keras.Operation, inputs: list[np.ndarray]) -> Judgement:
        position, self._entered = self._entered, self._entered + 1
        if position >= len(self._recorded) or self._recorded[position].operation is not operation:
            # The code takes another path than over the whole batch.
            return lambda outputs: outputs, False
        call = self._recorded[position]
        right = self._equal_rows(inputs, call.inputs)
        place, place_is_right = self._running[-1] if self._running else (None, True)
        if not right and place_is_right:
            self._differs(place)
        return lambda outputs: self._put_right(call, outputs, right), right

    def _put_right(self, call: Call, outputs: Any, inputs_are_right: bool) -> Any:
        """The outputs that the whole batch had in these rows."""
        parts = tensors_in(outputs)
        if len(parts) != len(call.outputs):
            return outputs
        if inputs_are_right and not self._equal_rows([p.numpy() for p in parts], call.outputs):
            self._differs(call.operation)
        wanted = [
            self._rows_of(whole, p.shape) for p, whole in zip(parts, call.outputs, strict=True)
        ]
        replaced = iter([put_right(*pair) for pair in zip(parts, wanted, strict=True)])
        return keras.tree.map_structure(
            lambda leaf: next(replaced) if is_dense(leaf) else leaf, outputs
        )

    def _differs(self, place: Place) -> None:
        if self._replay is not None and place not in self._exempt:
            self._replay.differing.append(place)

    def _fails(self, operation: keras.Operation, error: Exception) -> None:
        """Remember the innermost operation that failed."""
        # The error passes the operations around it later.
        if self._replay is not None and self._replay.error is None:
            self._replay.failing, self._replay.error = operation, error

    def _rows_of(self, whole: np.ndarray, shape: Any) -> np.ndarray | None:
        return None if self._replay is None else rows_of(whole, tuple(shape), self._replay.rows)

    def _equal_rows(self, parts: list[np.ndarray], wholes: list[np.ndarray]) -> bool:
        return len(parts) == len(wholes) and all(
            equal(part, self._rows_of(whole, part.shape), self._tolerance)
            for part, whole in zip(parts, wholes, strict=True)
        )


def rows_of(whole: np.ndarray, shape: tuple[int, ...], rows: Rows) -> np.ndarray | None:
    """The rows of a recorded array that an array of this shape should equal.

    The axis of the examples is the one along which the shapes differ; it may hold several
    entries for each example. None where the array is not a selection of rows.
    """
    if whole.shape == shape:
        return whole
    if whole.ndim != len(shape):
        return None
    axes = [axis for axis in range(whole.ndim) if whole.shape[axis] != shape[axis]]
    each, rest = divmod(whole.shape[axes[0]], rows.batch_size)
    if len(axes) > 1 or rest or shape[axes[0]] != each * (rows.stop - rows.start):
        return None
    return np.take(whole, range(rows.start * each, rows.stop * each), axis=axes[0])


def equal(part: np.ndarray, wanted: np.ndarray | None, tolerance: float) -> bool:
    """Whether two arrays are equal, relative to the largest value."""
    if wanted is None:
        return False
    if part.dtype.kind in "OSU":
        return np.array_equal(part, wanted)
    part, wanted = part.astype(np.float64), wanted.astype(np.float64)
    atol = tolerance * np.abs(wanted).max(initial=0.0)
    return np.allclose(part, wanted, rtol=0.0, atol=atol, equal_nan=True)


def put_right(part: tf.Tensor, wanted: np.ndarray | None) -> tf.Tensor:
    """The wanted values, through which gradients flow as if they were the layer's own."""
    if wanted is None:
        return part
    if not part.dtype.is_floating:
        return tf.constant(wanted, part.dtype)

    @tf.custom_gradient
    def replaced(tensor: tf.Tensor) -> Any:
        return tf.constant(wanted, tensor.dtype), lambda gradient: gradient

    return replaced(part)


def tensors_in(structure: Any) -> list[tf.Tensor]:
    return [leaf for leaf in keras.tree.flatten(structure) if is_dense(leaf)]


def is_dense(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor)
