"""A trial of a step: it runs on one device, whole and in the parts of all replicas.

Nothing of the trial is kept. Only values that rounding changes little are compared. Weights are
not such: Adam divides a gradient by its size, so a gradient that is zero but for rounding moves its
weight as far as any other, in either direction. Adam's averages of gradients are, and they tell a
gradient from twice that gradient. So weights are compared where an optimizer keeps no state.
"""

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals, optimizer_internals
from keras_multigpu.partition.facts import GraphFacts
from keras_multigpu.partition.layouts import Rows as InRows
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.shares import Batch, Rows, batch_size_of, present_leaves
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.variables.placement import optimizers_of

# The prefix of the names of results.
RESULT = "result"
Followers = Sequence[tuple[Collection[int], Collection[int]]]
Key = tuple[str, int]
"""`RESULT` and its number, or "variable" and its number."""


class Tried(NamedTuple):
    """One value that a step yields.

    Attributes:
        name: The variable's name, or `RESULT` and a number.
        value: A result, or by how much the step changes a variable.
        rounded: By how much rounding may change it.
    """

    name: str
    value: np.ndarray
    rounded: float = 0.0


def tried(name: str, value: np.ndarray, before: np.ndarray | None = None) -> Tried:
    """A result, or the value of a variable after the step and before it."""
    if not tf.as_dtype(value.dtype).is_floating:
        return Tried(name, value)
    rounded = 8 * float(ml_dtypes.finfo(value.dtype).eps) * largest_of(value)
    kept = in_float32(value)
    # A change of float32 fits float32: large models have many.
    return Tried(name, kept if before is None else kept - in_float32(before), rounded)


def in_float32(value: np.ndarray) -> np.ndarray:
    """Numbers of 16 bits as float32; others as they are."""
    return value.astype(np.promote_types(value.dtype, np.float32), copy=False)


def largest_of(values: np.ndarray) -> float:
    """The size of the largest finite number."""
    if not values.size:
        return 0.0
    # Without a copy of all: a variable may be large.
    with np.errstate(invalid="ignore"):
        ends = float(values.min()), float(values.max())
    if not np.isfinite(ends).all():
        finite = values[np.isfinite(values)]
        ends = float(finite.min(initial=0.0)), float(finite.max(initial=0.0))
    return max(map(abs, ends))


class Trial:
    """A split step that is tried on one device.

    Memory holds one model there, and then what one device changes in what is compared: on the host,
    where memory is cheaper. Beside it there are never more than a few new values.

    Args:
        step: The step.
        hub: The device where it is tried.
        warn: Logs a warning.
    """

    def __init__(self, step: PartitionedStep, hub: str, warn: Callable[[str], None]) -> None:
        self._step, self.hub, self._warn = step, hub, warn
        self.parts: int = step.parts
        self.takes_any_size: bool = step.batch.takes_any_size
        self.facts: GraphFacts = step.facts
        self._compared = self._find_compared()

    def warn(self, reason: str) -> None:
        """Log that the step runs without having been compared."""
        self._warn(f"The self-check of `{self._step.traced.request.name}` was left out: {reason}.")

    def _find_compared(self) -> set[int]:
        """The numbers of the variables that are compared."""
        step = self._step
        first = {number: id(step.traced.copies[number][0]) for number in step.assigned}
        changed = set(first.values())
        left = {
            each
            for kept, all_of in followers_of(optimizers_of(step.traced.request.model))
            if changed.intersection(kept)
            for each in all_of
        }
        return {number for number, each in first.items() if each not in left}

    def on_one_device(
        self,
        batch: Batch,
        nudge: tuple[float, int] | None = None,
        keys: Collection[Key] | None = None,
    ) -> dict[Key, Tried]:
        """What the unsplit step yields; variables keep their values.

        Args:
            nudge: How far to move the last digits of variables and data before, and a seed.
            keys: What to return; by default everything that is compared.
        """
        step, found = self._step, {}
        starts: dict[int, np.ndarray] = {}
        numbers = step.assigned if nudge is None else range(len(step.traced.copies))
        with self._kept_values(numbers) as before:
            if nudge is not None:
                for number, value in enumerate(nudged(map(before, numbers), *nudge)):
                    step.traced.variables[number].assign(value)
                    if keys is not None and ("variable", number) in keys:
                        starts[number] = value
                batch = keras.tree.map_structure(lambda leaf: nudged_leaf(leaf, *nudge), batch)
            with tf.device(self.hub), graph_internals.unoptimized():
                results = step.traced.whole(*batch)
            for key, one in self._results(results):
                if keys is None or key in keys:
                    found[key] = one
            for number in sorted(self._compared):
                if keys is None or ("variable", number) in keys:
                    start = starts[number] if number in starts else before(number)
                    found["variable", number] = self._changed(
                        number, step.traced.variables[number], start
                    )
        return found

    @contextlib.contextmanager
    def _kept_values(self, numbers: Iterable[int]) -> Iterator[Callable[[int], np.ndarray]]:
        """Restore variables at the end; gives a function that reads a value from before."""
        traced, kept = self._step.traced, dict[int, Any]()
        for number in numbers:
            variable = traced.variables[number]
            # The copy of another replica has the same value.
            others = [copy for copy in traced.copies[number] if copy is not variable]
            kept[number] = others[0] if others else variable.numpy()

        def before(number: int) -> np.ndarray:
            value = kept[number]
            return np.asarray(value.numpy() if isinstance(value, tf.Variable) else value)

        try:
            yield before
        finally:
            for number, value in kept.items():
                traced.variables[number].assign(value)

    def in_parts(self, batch: Batch, take: Callable[[Key, Tried], None]) -> None:
        """Compute what the parts of all replicas yield; nothing is assigned.

        Args:
            take: Gets the values one after another.
        """
        step = self._step
        data = tf.nest.flatten(present_leaves(batch), expand_composites=True)
        values = [copies[0].read_value() for copies in step.traced.copies]
        total = tf.constant(batch_size_of(batch))
        rows, before = Rows(batch, total, total), tf.zeros_like(total)
        given = step.arguments(0, rows, before, data, values, pieces=self.parts)

        def taken(numbers: Sequence[int], new: tf.Tensor) -> None:
            for number in numbers:
                old = values[number].numpy()
                take(("variable", number), self._changed(number, new, old))

        # New values are the same for all parts, and for eight replicas eight times as large.
        users: dict[str, list[int]] = {}
        for number, tensor in zip(step.assigned, step.local.structured_outputs.new, strict=True):
            users.setdefault(tensor.name, []).append(number)
        alike = {}
        for name, numbers in users.items():
            own = [number for number in numbers if number in self._compared]
            alike[name] = partial(taken, own) if own else None
        with tf.device(self.hub), graph_internals.unoptimized():
            found = step.local.run_in_turn(given, alike)
        results = []
        for place, layout in enumerate(step.layouts):
            parts = [each.outputs[place] for each in found]
            results.append(
                tf.concat(parts, layout.axis) if isinstance(layout, InRows) else parts[0]
            )
        for key, one in self._results(results):
            take(key, one)

    def _results(self, results: Any) -> Iterator[tuple[Key, Tried]]:
        leaves = tf.nest.flatten(results, expand_composites=True)
        # Those of the parts have no place for None.
        for number, leaf in enumerate((leaf for leaf in leaves if leaf is not None), start=1):
            # A string by itself is `bytes`, not an array.
            yield (RESULT, number), tried(f"{RESULT} {number}", np.asarray(leaf.numpy()))

    def _changed(self, number: int, new: Any, before: np.ndarray) -> Tried:
        name = self._step.traced.copies[number][0].name.partition(":")[0]
        return tried(name, np.asarray(new.numpy()), before)


def followers_of(optimizers: Sequence[keras.optimizers.Optimizer]) -> Followers:
    """For each optimizer, its averages of gradients, and the variables that these alone move."""

    def ids(variables: Sequence[keras.Variable]) -> set[int]:
        return {id(copies_of(variable)[0]) for variable in variables}

    pairs = [optimizer_internals.remembered_and_moved(optimizer) for optimizer in optimizers]
    return [(ids(remembered), ids(moved)) for remembered, moved in pairs]


def nudged(values: Iterable[np.ndarray], digits: float, seed: int) -> Iterator[np.ndarray]:
    """Values with other last digits, where they are floats."""
    draws = np.random.default_rng(seed)
    for value in values:
        if tf.as_dtype(value.dtype).is_floating:
            wide = in_float32(value)
            signs = np.asarray(2 * draws.integers(0, 2, value.shape, np.int8) - 1)
            # A whole number may be an index or a label.
            signs[wide == np.round(wide)] = 0
            yield (wide * (1 + wide.dtype.type(digits) * signs.astype(wide.dtype))).astype(
                value.dtype
            )
        else:
            yield value


def nudged_leaf(leaf: Any, digits: float, seed: int) -> Any:
    """A leaf of a batch, with other last digits if it is a tensor of floats."""
    if not isinstance(leaf, tf.Tensor) or not leaf.dtype.is_floating:
        return leaf
    (found,) = nudged([leaf.numpy()], digits, seed)
    return tf.constant(found)
