"""`Plan`: how replicas share one operation. `RULES`: a function for each type that makes plans.

A rule is a function `rule(op, ins, facts) -> Plan | None`, where `ins` are the layouts of the
inputs, not all of them replicated. None means that the inputs have to be gathered. A rule may not
look at the users of the results.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from keras_multigpu.partition.facts.facts import Facts
from keras_multigpu.partition.layouts import REPLICATED, Layout, Rows
from keras_multigpu.partition.program import Operation
from keras_multigpu.partition.replica import Replica

Emit = Callable[[Replica, list[tf.Tensor]], list[tf.Tensor]]


@dataclass(frozen=True)
class Plan:
    """How a replica computes its part of an operation.

    Args:
        need: The layouts in which it takes its inputs.
        out: The layouts that its outputs then have.
        emit: Adds a replica's part to the default graph; by default, the operation itself. Values
            are exchanged by `need` and `combine` alone.
        combine: A reduction ("Max", "Min", "Prod", "All", "Any") over the replicas' results, which
            makes the whole result.
        variables: The layouts in which it takes variables, by number, if it needs certain ones.
        assigned: The layouts in which it leaves those that it assigns.
    """

    need: tuple[Layout, ...]
    out: tuple[Layout, ...]
    emit: Emit | None = None
    combine: str | None = None
    variables: Mapping[int, Layout] = field(default_factory=dict)
    assigned: Mapping[int, Layout] = field(default_factory=dict)

    @property
    def exchanges(self) -> bool:
        """Whether replicas exchange anything besides what `need` gathers or sums."""
        return self.combine is not None


Rule = Callable[[Operation, tuple[Layout, ...], Facts], Plan | None]

RULES: dict[str, Rule] = {}
"""The rules by the type of operation."""


def rows_of(ins: Sequence[Layout], *places: int) -> Rows | None:
    """The first layout in rows: of all inputs, or of those at these places."""
    chosen = [ins[place] for place in places if place < len(ins)] if places else ins
    return next((layout for layout in chosen if isinstance(layout, Rows)), None)


def only(need: dict[int, Layout], count: int) -> tuple[Layout, ...]:
    """These layouts at these places, and replicated at the others."""
    return tuple(need.get(place, REPLICATED) for place in range(count))


def with_local_shape(op: Operation, place: int, layout: Layout) -> Emit:
    """Adds the operation, with the shape of a replica's part as the input at this place."""

    def emit(replica: Replica, inputs: list[tf.Tensor]) -> list[tf.Tensor]:
        shape = inputs[place]
        if isinstance(layout, Rows):
            # A scalar stands for any shape.
            is_known = shape.shape.rank == 1
            shape = replica.local_shape(shape, layout) if is_known else tf.constant(-1, shape.dtype)
        return replica.run(op, [*inputs[:place], shape, *inputs[place + 1 :]])

    return emit
