"""A trial of a step: it runs on one device, whole and in the parts of all replicas.

Nothing of the trial is kept. Only values that rounding changes little are compared. Weights are
not such: Adam divides a gradient by its size, so a gradient that is zero but for rounding moves its
weight as far as any other, in either direction. Adam's averages of gradients are, and they tell a
gradient from twice that gradient. So weights are compared where an optimizer keeps no state.
"""

import contextlib
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.partition.facts import GraphFacts
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout
from keras_multigpu.partition.layouts import Rows as InRows
from keras_multigpu.training.exchange.stages import run_in_turn, trace_stages
from keras_multigpu.training.exchange.sums import SumExchange
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.shares import Batch, batch_size_of, length_of, present_leaves
from keras_multigpu.training.steps.batches import PartArguments, PartInputs
from keras_multigpu.training.variables.placement import optimizers_of

# The prefix of the names of results.
RESULT = "result"
Followers = Sequence[tuple[Collection[int], Collection[int]]]


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
    wide = value.astype(np.float64)
    largest = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
    digits = float(ml_dtypes.finfo(value.dtype).eps)
    change = wide if before is None else wide - before.astype(np.float64)
    # A change of float32 fits float32: large models have many.
    kept = change.astype(np.promote_types(value.dtype, np.float32))
    return Tried(name, kept, 8 * digits * largest)


class Trial:
    """A split step that is tried on one device.

    Args:
        step: The step, a `SplitStep`.

    Attributes:
        rounds_sums: Whether replicas exchange fewer digits.
        hub: The device where it is tried.
    """

    def __init__(self, step: Any) -> None:
        self._step = step
        self._followers = followers_of(optimizers_of(step.model))
        self.parts: int = step.parts
        self.takes_any_size: bool = step.batches.takes_any_size
        self.rounds_sums = bool(step.group.sent_as)
        self.hub: str = step.group.hub
        self.facts: GraphFacts = step.local_step.facts

    def on_one_device(self, batch: Batch, nudge: tuple[float, int] | None = None) -> list[Tried]:
        """What the unsplit step yields; variables keep their values.

        Args:
            nudge: How far to move the last digits of variables and data before, and a seed.
        """
        step = self._step
        before = [copies[0].numpy() for copies in step.traced.copies]
        start = before
        if nudge is not None:
            start = list(nudged(before, *nudge))
            batch = keras.tree.map_structure(lambda leaf: nudged_leaf(leaf, *nudge), batch)
        try:
            for variable, value in zip(step.traced.variables, start, strict=True):
                variable.assign(value)
            with tf.device(self.hub), unoptimized():
                results = step.traced.whole(*batch)
            after = [step.traced.variables[number].numpy() for number in step.assigned]
        finally:
            for variable, value in zip(step.traced.variables, before, strict=True):
                variable.assign(value)
        return self._tried(results, start, after)

    def in_parts(self, batch: Batch) -> list[Tried]:
        """What the parts of all replicas yield, one after another; nothing is assigned."""
        given = self._arguments(batch, self.parts, self._step.inputs)
        with tf.device(self.hub), unoptimized():
            # New values are the same for all parts, and for eight replicas eight times as large.
            alike = {tensor.name for tensor in self._step.local.structured_outputs.new}
            found = run_in_turn(self._step.local, given, alike)
        results = []
        for place, layout in enumerate(self._step.layouts):
            parts = [each.outputs[place] for each in found]
            results.append(
                tf.concat(parts, layout.axis) if isinstance(layout, InRows) else parts[0]
            )
        after = [tensor.numpy() for tensor in found[0].new]
        return self._tried(results, [value.numpy() for value in given[0].values], after)

    def _arguments(self, batch: Batch, parts: int, inputs: PartInputs) -> list[PartArguments]:
        """The arguments for each part of a batch."""
        step, batches = self._step, self._step.batches
        values = [copies[0].read_value() for copies in step.traced.copies]
        data = tf.nest.flatten(present_leaves(batch), expand_composites=True)
        sizes: dict[str | None, Any] = dict.fromkeys(batches.names, batch_size_of(batch))
        for leaf, name in zip(present_leaves(batch), batches.of_leaves, strict=True):
            if name is not None:
                sizes[name] = length_of(leaf)
        totals = tf.constant([int(sizes[name]) for name in batches.names])
        lengths = inputs.lengths(data)
        given = []
        for number in range(parts):
            start, stop = share_bounds(totals, number, parts)
            counts = tf.stack([stop - start, start], axis=1)
            own = inputs.cut(data, start, stop)
            given.append(
                PartArguments(
                    tf.constant(number), counts, totals, counts[0, 0], lengths, own, values
                )
            )
        return given

    def _tried(
        self, results: Any, before: Sequence[np.ndarray], after: Sequence[np.ndarray]
    ) -> list[Tried]:
        step = self._step
        leaves = enumerate(tf.nest.flatten(results, expand_composites=True), start=1)
        # A string by itself is `bytes`, not an array.
        found = [
            tried(f"{RESULT} {n}", np.asarray(leaf.numpy()))
            for n, leaf in leaves
            if leaf is not None
        ]
        changed = {id(step.traced.copies[number][0]) for number in step.assigned}
        left = {
            each
            for kept, all_of in self._followers
            if changed.intersection(kept)
            for each in all_of
        }
        for number, new in zip(step.assigned, after, strict=True):
            variable = step.traced.copies[number][0]
            if id(variable) not in left:
                found.append(tried(variable.name.partition(":")[0], new, before[number]))
        return found

    def everything(self, batch: Batch, parts: int) -> dict[str, tuple[tf.Operation, np.ndarray]]:
        """The values of the step's tensors, by name, in the order in which they are computed.

        Args:
            parts: In how many parts to compute them; in one, no rule of the partition is used.
        """
        found: list[tuple[tf.Tensor, Layout]] = []
        inputs = PartInputs(self._step.batches, shared=parts > 1)
        local_step = self._step.local_step_of(SumExchange(parts), inputs)

        def local(*args: Any) -> list[tf.Tensor]:
            PartArguments(*args).run(local_step)
            scope = local_step.scope
            assert scope is not None
            made = [
                (tensor, scope.values[tensor.name])
                for op in scope.facts.operations
                for tensor in op.outputs
                if tensor.name in scope.values and tensor.dtype.is_floating
            ]
            made = [(tensor, value) for tensor, value in made if is_joinable(value.layout)]
            found[:] = [(tensor, value.layout) for tensor, value in made]
            return [tf.identity(value.local) for _, value in made]

        function = trace_stages(local, self._step.specs_of_arguments(inputs), False)
        given = self._arguments(batch, parts, inputs)
        with tf.device(self.hub), unoptimized():
            of_parts = run_in_turn(function, given)
        values = {}
        for (tensor, layout), *each in zip(found, *of_parts, strict=True):
            if isinstance(layout, InRows):
                values[tensor.name] = tensor.op, tf.concat(each, layout.axis).numpy()
            else:
                whole = tf.add_n(each) if layout == PARTIAL else each[0]
                values[tensor.name] = tensor.op, whole.numpy()
        return values


def followers_of(optimizers: Sequence[keras.optimizers.Optimizer]) -> Followers:
    """For each optimizer, its averages of gradients, and the variables that these alone move."""

    def ids(variables: Sequence[keras.Variable]) -> set[int]:
        return {id(copies_of(variable)[0]) for variable in variables}

    pairs = [optimizer_internals.remembered_and_moved(optimizer) for optimizer in optimizers]
    return [(ids(remembered), ids(moved)) for remembered, moved in pairs]


def is_joinable(layout: Layout) -> bool:
    """Whether the whole is easily made of parts in this layout."""
    return layout in (REPLICATED, PARTIAL) or (
        isinstance(layout, InRows) and len(layout.blocks) == 1
    )


def nudged(values: Sequence[np.ndarray], digits: float, seed: int) -> Iterator[np.ndarray]:
    draws = np.random.default_rng(seed)
    for value in values:
        if tf.as_dtype(value.dtype).is_floating:
            wide = value.astype(np.float64)
            signs = draws.choice([-1.0, 1.0], size=value.shape)
            # A whole number may be an index or a label.
            signs[wide == np.round(wide)] = 0.0
            yield (wide * (1.0 + digits * signs)).astype(value.dtype)
        else:
            yield value


def nudged_leaf(leaf: Any, digits: float, seed: int) -> Any:
    """A leaf of a batch, with other last digits if it is a tensor of floats."""
    if not isinstance(leaf, tf.Tensor) or not leaf.dtype.is_floating:
        return leaf
    (found,) = nudged([leaf.numpy()], digits, seed)
    return tf.constant(found)


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Run graphs as they are: TensorFlow's optimizer takes longer than one run."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        kept = {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
        tf.config.optimizer.set_experimental_options(kept)
