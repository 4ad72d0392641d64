"""What a rule returns for an operation, and what it may ask for.

A rule is a function `rule(op, ins, facts) -> Plan | None`. It is asked where an input of the
operation does not lie replicated; None means that it does not know, and then the inputs are
gathered. A rule may not look at who uses the results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.layouts import REPLICATED, Block, Layout, Rows
from keras_multigpu.partition.site import Site
from keras_multigpu.partition.sizes import AnySize, Size


class Facts(Protocol):
    """What is known of the tensors of the graph before the step runs.

    Attributes:
        batches: The size of each batch, by name.
    """

    batches: Mapping[str, AnySize]

    def dims(self, tensor: tf.Tensor) -> list[AnySize | None] | None:
        """The length of each axis, None where it is unknown; None if even their number is."""

    def value(self, tensor: tf.Tensor) -> np.ndarray | None:
        """The value of a small tensor of integers: an array of `AnySize`; None if not known.

        Single entries may be None.
        """

    def length(self, blocks: tuple[Block, ...]) -> AnySize:
        """The global length of an axis of such blocks."""


Emit = Callable[[Site, list[tf.Tensor]], list[tf.Tensor]]


@dataclass(frozen=True)
class Plan:
    """How a replica computes its part of an operation.

    Args:
        need: How the inputs have to lie.
        out: How the outputs lie then.
        emit: Adds a replica's part to a graph; by default, the operation itself.
        combine: A reduction ("Max", "Min", "Prod", "All", "Any") over replicas, which makes the
            whole of what they have.
    """

    need: tuple[Layout, ...]
    out: tuple[Layout, ...]
    emit: Emit | None = None
    combine: str | None = None


Rule = Callable[[tf.Operation, tuple[Layout, ...], Facts], Plan | None]

RULES: dict[str, Rule] = {}
"""The rule for each type of operation that has one."""


def rule(*types: str) -> Callable[[Rule], Rule]:
    """Enter a function as the rule for these types of operations."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(types, function))
        return function

    return enter


def rows_of(ins: Sequence[Layout], *places: int) -> Rows | None:
    """The first input that lies in rows, of all or of those at these places."""
    chosen = [ins[place] for place in places if place < len(ins)] if places else ins
    return next((layout for layout in chosen if isinstance(layout, Rows)), None)


def static_axes(facts: Facts, tensor: tf.Tensor, rank: int | None) -> list[int] | None:
    """The axes that a tensor names, counted from the first; None if they are not known."""
    value = facts.value(tensor)
    if value is None or rank is None:
        return None
    axes = list(np.ravel(value))
    if any(axis is None or isinstance(axis, Size) for axis in axes):
        return None
    return [int(axis) % rank for axis in axes] if rank else []


def only(need: dict[int, Layout], count: int) -> tuple[Layout, ...]:
    """These layouts at these places, and replicated at the others."""
    return tuple(need.get(place, REPLICATED) for place in range(count))
