"""A step that is tried: run on one device, whole and in the parts of all replicas, without a trace.

What is compared has to change little where numbers are rounded otherwise. A weight does not: Adam
divides a gradient by its size, so one that is zero but for rounding moves its weight as far as any,
in either direction. What Adam remembers of the gradient does, and says more: a gradient of twice
its size moves a weight as far, too. So weights are compared where the optimizer remembers nothing.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.partition.facts import GraphFacts
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Layout
from keras_multigpu.partition.layouts import Rows as InRows
from keras_multigpu.partition.local_step import LocalStep
from keras_multigpu.training.exchange.stages import for_all
from keras_multigpu.training.replica_group import Copies, copies_of
from keras_multigpu.training.shares import Batch

RESULT = "result"
"""What names of results begin with."""
Followers = Sequence[tuple[Collection[int], Collection[int]]]


@dataclasses.dataclass
class Tried:
    """What a step yields.

    Attributes:
        names: What each value is called.
        values: Results as they are, and of variables by how much they change.
        rounded: By how much the last digits of each may differ.
    """

    names: list[str] = dataclasses.field(default_factory=list)
    values: list[np.ndarray] = dataclasses.field(default_factory=list)
    rounded: list[float] = dataclasses.field(default_factory=list)

    def add(self, name: str, value: np.ndarray, before: np.ndarray | None = None) -> None:
        """Add a result, or what a variable is after the step and was before."""
        self.names.append(name)
        if not tf.as_dtype(value.dtype).is_floating:
            self.values.append(value)
            self.rounded.append(0.0)
            return
        wide = value.astype(np.float64)
        largest = float(np.abs(wide[np.isfinite(wide)]).max(initial=0.0))
        digits = float(ml_dtypes.finfo(value.dtype).eps)
        self.values.append(wide if before is None else wide - before.astype(np.float64))
        self.rounded.append(8 * digits * largest)


@dataclasses.dataclass
class Trial:
    """A split step, and what it takes to try it.

    Attributes:
        whole: The unsplit step.
        local: What each replica runs.
        assigned: The numbers of the variables that it assigns.
        variables: The variables of the unsplit step.
        follow: The variables that are not compared; see `following`.
        rounds_sums: Whether replicas exchange fewer digits.
        hub: The device where it is tried.
        given: The values of variables, and the arguments for each part of a batch.
        traced_again: Traces a part again, with tensors chosen from it as results; with the
            arguments for each part.
    """

    whole: Any
    local: Any
    layouts: Sequence[Layout]
    assigned: Sequence[int]
    copies: Sequence[Copies]
    variables: Sequence[tf.Variable]
    follow: Followers
    parts: int
    takes_any_number: bool
    rounds_sums: bool
    hub: str
    facts: GraphFacts
    given: Callable[[Batch, int], tuple[list[tf.Tensor], list[tuple[Any, ...]]]]
    traced_again: Callable[
        [Batch, int, Callable[[LocalStep], list[tf.Tensor]]], tuple[Any, list[tuple[Any, ...]]]
    ]

    def on_one_device(self, batch: Batch, nudge: tuple[float, int] | None = None) -> Tried:
        """What the unsplit step yields; variables are then as they were.

        Args:
            nudge: By how much to change the last digits of variables and data before, and a seed.
        """
        before = [copies[0].numpy() for copies in self.copies]
        start = before
        if nudge is not None:
            start = list(nudged(before, *nudge))
            batch = keras.tree.map_structure(lambda leaf: nudged_leaf(leaf, *nudge), batch)
        try:
            for variable, value in zip(self.variables, start, strict=True):
                variable.assign(value)
            with tf.device(self.hub), unoptimized():
                results = self.whole(*batch)
            after = [self.variables[number].numpy() for number in self.assigned]
        finally:
            for variable, value in zip(self.variables, before, strict=True):
                variable.assign(value)
        return self._tried(results, start, after)

    def in_parts(self, batch: Batch) -> Tried:
        """What the parts of all replicas yield, one after another; nothing is assigned."""
        values, given = self.given(batch, self.parts)
        with tf.device(self.hub), unoptimized():
            pieces = for_all(self.local, given)
        results = []
        for place, layout in enumerate(self.layouts):
            parts = [outputs[place] for outputs, *_ in pieces]
            results.append(
                tf.concat(parts, layout.axis) if isinstance(layout, InRows) else parts[0]
            )
        after = [tensor.numpy() for tensor in pieces[0][1]]
        return self._tried(results, [value.numpy() for value in values], after)

    def _tried(
        self, results: Any, before: Sequence[np.ndarray], after: Sequence[np.ndarray]
    ) -> Tried:
        found = Tried()
        for place, leaf in enumerate(tf.nest.flatten(results, expand_composites=True)):
            if leaf is not None:
                found.add(f"{RESULT} {place + 1}", leaf.numpy())
        changed = {id(self.copies[number][0]) for number in self.assigned}
        left = {
            each for kept, all_of in self.follow if changed.intersection(kept) for each in all_of
        }
        for number, new in zip(self.assigned, after, strict=True):
            variable = self.copies[number][0]
            if id(variable) not in left:
                found.add(variable.name.partition(":")[0], new, before[number])
        return found

    def everything(self, batch: Batch, parts: int) -> dict[str, tuple[tf.Operation, np.ndarray]]:
        """The values of the step's tensors, by name, in the order in which they are computed.

        The step cannot run any more then.

        Args:
            parts: In how many parts to compute them; in one, no rule of the partition is used.
        """
        found: list[tuple[tf.Tensor, Layout]] = []

        def chosen(step: LocalStep) -> list[tf.Tensor]:
            assert step.scope is not None
            made = [
                (tensor, step.scope.values[tensor.name])
                for op in step.scope.facts.operations
                for tensor in op.outputs
                if tensor.name in step.scope.values and tensor.dtype.is_floating
            ]
            made = [(tensor, value) for tensor, value in made if is_joinable(value.layout)]
            found[:] = [(tensor, value.layout) for tensor, value in made]
            return [tf.identity(value.local) for _, value in made]

        function, given = self.traced_again(batch, parts, chosen)
        with tf.device(self.hub), unoptimized():
            of_parts = for_all(function, given)
        values = {}
        for (tensor, layout), *each in zip(found, *of_parts, strict=True):
            if isinstance(layout, InRows):
                values[tensor.name] = tensor.op, tf.concat(each, layout.axis).numpy()
            else:
                whole = tf.add_n(each) if layout == PARTIAL else each[0]
                values[tensor.name] = tensor.op, whole.numpy()
        return values


def following(optimizers: Sequence[keras.optimizers.Optimizer]) -> Followers:
    """Of each optimizer what it remembers of gradients, and what follows from that alone."""

    def ids(variables: Sequence[keras.Variable]) -> set[int]:
        return {id(copies_of(variable)[0]) for variable in variables}

    pairs = [optimizer_internals.remembered_and_moved(optimizer) for optimizer in optimizers]
    return [(ids(remembered), ids(moved)) for remembered, moved in pairs]


def is_joinable(layout: Layout) -> bool:
    """Whether parts that lie so are easily made the whole."""
    return layout in (REPLICATED, PARTIAL) or (
        isinstance(layout, InRows) and len(layout.blocks) == 1
    )


def nudged(values: Sequence[np.ndarray], digits: float, seed: int) -> Iterator[np.ndarray]:
    draws = np.random.default_rng(seed)
    for value in values:
        if tf.as_dtype(value.dtype).is_floating:
            wide = value.astype(np.float64)
            signs = draws.choice([-1.0, 1.0], size=value.shape)
            # Whole numbers may be names of something, which others are not.
            signs[wide == np.round(wide)] = 0.0
            yield (wide * (1.0 + digits * signs)).astype(value.dtype)
        else:
            yield value


def nudged_leaf(leaf: Any, digits: float, seed: int) -> Any:
    """A leaf of a batch with other last digits, if it is a tensor of floats."""
    if not isinstance(leaf, tf.Tensor) or not leaf.dtype.is_floating:
        return leaf
    (found,) = nudged([leaf.numpy()], digits, seed)
    return tf.constant(found)


@contextlib.contextmanager
def unoptimized() -> Iterator[None]:
    """Let TensorFlow run graphs as they are: to optimise one takes longer than to run it once."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    try:
        yield
    finally:
        kept = {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
        tf.config.optimizer.set_experimental_options(kept)
