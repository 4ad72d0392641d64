"""A trial of a step: it runs on one device, whole and in the parts of all replicas.

Nothing of the trial is kept. Only values that rounding changes little are compared. Weights are
not such: Adam divides a gradient by its size, so a gradient that is zero but for rounding moves its
weight as far as any other, in either direction. Adam's averages of gradients are, and they tell a
gradient from twice that gradient. So weights are compared where an optimizer keeps no state.
"""

import collections
import contextlib
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals, optimizer_internals
from keras_multigpu.partition.layouts import Rows as InRows
from keras_multigpu.training.exchange.stage import size_of
from keras_multigpu.training.replica_group import HOST, is_in_parts
from keras_multigpu.training.shares import Batch, Rows, batch_size_of, present_leaves
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.steps.unsplit import Unsplit
from keras_multigpu.training.variables.placement import optimizers_of

# The prefix of the names of results.
RESULT = "result"
# How many numbers of a value are compared.
MOST = 2**18
Key = tuple[str, int, int]
"""`RESULT` or "variable", its number, and the place of a part of it."""


class Tried(NamedTuple):
    """One value that a step yields.

    Attributes:
        value: A result, or by how much the step changes a variable.
        rounded: By how much rounding may change it.
        largest: If it is a part of more, the size of the largest number in that.
    """

    value: np.ndarray
    rounded: float = 0.0
    largest: float = 0.0


def tried(tensor: Any, before: np.ndarray | None = None) -> Tried:
    """A result, or the value of a variable after the step and before it."""
    # A string by itself is `bytes`, not an array.
    value = np.asarray(tensor.numpy())
    if not tf.as_dtype(value.dtype).is_floating:
        return Tried(value)
    rounded = 8 * float(ml_dtypes.finfo(value.dtype).eps) * largest_of(value)
    kept = in_float32(value)
    # A variable of an unknown shape, such as a queue that grows, may have another one now.
    if before is None or before.shape != kept.shape:
        return Tried(kept, rounded)
    # A change of float32 fits float32: large models have many.
    return Tried(kept - in_float32(before), rounded)


def sample(value: Tried) -> Tried:
    """At most `MOST` numbers, from all over a value.

    All changes that one device makes, kept until the parts make them, would be as large as the
    optimizer's state.
    """
    numbers = value.value
    step = -(-numbers.size // MOST)
    # An odd step meets each column of a matrix, as most widths are even.
    return value if step <= 1 else value._replace(value=numbers.ravel()[:: step | 1].copy())


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

    Memory holds one model there, and never more than a few slots and new values. What is compared
    waits on the host, as a sample.
    """

    def __init__(self, step: PartitionedStep) -> None:
        request = step.traced.request
        self.step = step
        # What no device has to hold whole may fit none.
        in_parts = request.options.shard == "weights"
        self.device = HOST if in_parts else request.group.first_device
        self._compared = self._find_compared()

    def warn(self, reason: str) -> None:
        """Log that the step runs without having been compared."""
        request = self.step.traced.request
        request.warn(f"The self-check of `{request.name}` was left out: {reason}.")

    def _find_compared(self) -> set[int]:
        """The numbers of the variables that are compared."""
        traced, assigned = self.step.traced, set(self.step.assigned)
        left: set[int | None] = set()
        for optimizer in optimizers_of(traced.request.model):
            remembered, moved = (
                set(map(traced.number_of, each))
                for each in optimizer_internals.remembered_and_moved(optimizer)
            )
            left |= moved if remembered & assigned else set()
        return assigned - left

    @cached_property
    def _unsplit(self) -> Unsplit:
        return Unsplit(self.step.traced)

    def name_of(self, key: Key) -> str:
        """What messages call a value."""
        kind, number, _ = key
        if kind == RESULT:
            return f"{RESULT} {number}"
        name: str = self.step.traced.copies[number][0].name
        return name.partition(":")[0]

    def on_one_device(
        self,
        batch: Batch,
        take: Callable[[Key, Tried], None],
        nudge: tuple[float, int] = (0.0, 0),
    ) -> None:
        """Compute what the unsplit step yields; variables keep their values.

        Args:
            nudge: How far to move the last digits of variables and data before, and a seed.
        """
        start = Start(self.step, *nudge)

        def end(number: int) -> None:
            if number in self._compared:
                whole = tried(self.step.traced.variables[number], start.value(number))
                for place, part in enumerate(self._parts(number, whole)):
                    take(("variable", number, place), sample(part))
            start.restore(number)

        batch = keras.tree.map_structure(lambda leaf: nudged_leaf(leaf, *nudge), batch)
        data = tf.nest.flatten(present_leaves(batch), expand_composites=True)
        with tf.device(self.device), graph_internals.unoptimized(), contextlib.closing(start):
            self._take_results(self._unsplit(data, start.begin, end), take)

    def _parts(self, number: int, whole: Tried) -> list[Tried]:
        """A variable as parts of the step leave it: in the rows of replicas, or whole."""
        layout, copies = self.step.variables[number], self.step.copies[number]
        if not isinstance(layout, InRows):
            return [whole]
        ends = np.cumsum([part.shape[layout.axis] for part in copies])[:-1]
        largest = largest_of(whole.value)
        # Copies, because each is dropped once it has been compared.
        rows = [np.array(each) for each in np.split(whole.value, ends, layout.axis)]
        return [Tried(each, whole.rounded, largest) for each in rows]

    def in_parts(self, batch: Batch, take: Callable[[Key, Tried], None]) -> None:
        """Compute what the parts of all replicas yield, one value after another; assign nothing."""
        step = self.step
        data = tf.nest.flatten(present_leaves(batch), expand_composites=True)
        rows_of = {n: lay for n, lay in enumerate(step.variables) if isinstance(lay, InRows)}
        values = [
            None if number in rows_of else copies[0].read_value()
            for number, copies in enumerate(step.copies)
        ]
        total = tf.constant(batch_size_of(batch))
        rows, before = Rows(batch, total, total), tf.zeros_like(total)
        given = step.arguments(0, rows, before, data, values, pieces=step.parts)
        for number, part in enumerate(given):
            pairs = zip(values, step.copies, strict=True)
            own = [held[int(part.place)].read_value() if v is None else v for v, held in pairs]
            given[number] = part._replace(values=own)

        def taken(numbers: Sequence[int], place: int, new: tf.Tensor) -> None:
            for number in numbers:
                before = step.copies[number][place].numpy()
                take(("variable", number, place), sample(tried(new, before)))

        # New values are many, and those of whole variables the same for all parts.
        made = step.local.structured_outputs
        users = collections.defaultdict[str, list[int]](list)
        in_rows = dict[str, int]()
        for number, tensor in zip(step.assigned, made.new, strict=True):
            users[tensor.name] += [number] if number in self._compared else []
            if number in rows_of:
                in_rows[tensor.name] = size_of(step.copies[number][0])
        unused = tf.nest.flatten([made.barrier, made.seen], expand_composites=True)
        takers: dict[str, Any] = {tensor.name: None for tensor in unused if tensor is not None}
        takers |= {name: partial(taken, own) if own else None for name, own in users.items()}
        with tf.device(self.device), graph_internals.unoptimized():
            found = step.local.run_in_turn(given, takers, in_rows)
        outputs = zip(*(part.outputs for part in found), strict=True)
        results = [
            tf.concat(parts, layout.axis) if isinstance(layout, InRows) else parts[0]
            for layout, parts in zip(step.layouts, outputs, strict=True)
        ]
        self._take_results(results, take)

    def _take_results(self, results: Any, take: Callable[[Key, Tried], None]) -> None:
        leaves = tf.nest.flatten(results, expand_composites=True)
        # Those of the parts have no place for None.
        for number, leaf in enumerate((leaf for leaf in leaves if leaf is not None), start=1):
            take((RESULT, number, 0), sample(tried(leaf)))


class Start:
    """The values from which one device starts, for the time that it needs them.

    Args:
        step: The step.
        digits: How far to move their last digits.
        seed: Chooses those that move up.
    """

    def __init__(self, step: PartitionedStep, digits: float, seed: int) -> None:
        self._step, self._digits, self._seed = step, digits, seed
        self._kept: dict[int, Any] = {}

    def begin(self, number: int) -> None:
        """Let a variable have its value."""
        variable, copies = self._step.traced.variables[number], self._step.traced.copies[number]
        is_other = self._digits > 0 or is_in_parts(copies[0])
        if is_other or number in self._step.assigned:
            with tf.device(HOST):
                # The copy of another replica has the same value.
                others = [copy for copy in copies if copy is not variable]
                self._kept[number] = others[0] if others else tf.identity(variable)
                if is_other:
                    variable.assign(self.value(number))

    def value(self, number: int) -> np.ndarray:
        """The value; made again rather than kept, as a large model has many."""
        value = np.asarray(self._kept[number].numpy())
        return nudged(value, self._digits, self._seed, number) if self._digits else value

    def restore(self, number: int) -> None:
        """Let a variable have what it had before: a stand-in nothing."""
        value = self._kept.pop(number, None)
        if is_in_parts(value):
            self._step.traced.variables[number].empty()
        elif value is not None:
            self._step.traced.variables[number].assign(value)

    def close(self) -> None:
        """Restore all variables, even after an error."""
        for number in list(self._kept):
            self.restore(number)


def nudged(value: np.ndarray, digits: float, seed: int, number: int) -> np.ndarray:
    """A value with other last digits, if it is of floats; `seed` and `number` choose which."""
    if not tf.as_dtype(value.dtype).is_floating:
        return value
    draws, wide = np.random.default_rng((seed, number)), in_float32(value)
    signs = np.asarray(2 * draws.integers(0, 2, value.shape, np.int8) - 1)
    # A whole number may be an index or a label.
    signs[wide == np.round(wide)] = 0
    moved = wide * (1 + wide.dtype.type(digits) * signs.astype(wide.dtype))
    return moved.astype(value.dtype)


def nudged_leaf(leaf: Any, digits: float, seed: int) -> Any:
    """A leaf of a batch, with other last digits if it is a tensor of floats."""
    if not digits or not isinstance(leaf, tf.Tensor) or not leaf.dtype.is_floating:
        return leaf
    return tf.constant(nudged(leaf.numpy(), digits, seed, 0))
