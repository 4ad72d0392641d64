"""Where the replicas are in a step that does not end, as text: the sums that they have come to."""

import re
from collections.abc import Sequence

import tensorflow as tf

from keras_multigpu.partition.source_line import place_of
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.steps.partitioned_step import PartitionedStep

NAMED = 3
"""How many layers of a sum are named."""

OTHERS = "loss or metrics"
"""What is in no layer, and of no line of the user's."""

GRADIENT = "gradient_tape/"
"""Begins the scope in which TensorFlow makes gradients of what is in the scope after it."""


def whereabouts(runner: Runner) -> str:
    """How far the replicas of this process are in a step that runs; empty if it has no sums."""
    progress, step = runner.progress, runner.step
    if progress is None or step is None or not (exchanges := step.local.exchanged):
        return ""
    group, layers, count = step.traced.request.group, LayersOf(step), len(exchanges)
    reached = progress.reached(count)
    found = []
    for number in sorted(set(reached), reverse=True):
        here = zip(group.replicas, reached, strict=True)
        who = [group.device_of(each.id) for each, own in here if own == number]
        where = f"none of {count} sums"
        if number > 0:
            kind, cuts = exchanges[number - 1]
            where = f"{kind} {number} of {count} ({layers.names(cuts)})"
        have = "has" if len(who) == 1 else "have"
        found.append(f"{' and '.join(who)} {have} come to {where}")
    # A replica counts an exchange once it has what all gave to the one before.
    last = max(reached) - 1
    if last > 0:
        kind, cuts = exchanges[last - 1]
        found.append(f"all replicas to {kind} {last} ({layers.names(cuts)})")
    return ", ".join(found)


class LayersOf:
    """The layers of what a step exchanges.

    Operations are in the scope of their layer, to which TensorFlow adds a number. Which layer that
    is, the variables tell that are used there.
    """

    def __init__(self, step: PartitionedStep) -> None:
        model, traced = step.traced.request.model, step.traced
        paths = {traced.number_of(each): each.path for each in model.variables}
        self._known = {op.name: op for op in step.program.all_operations()}
        self._layers: dict[str, str] = {}
        for op in self._known.values():
            for number in {each.variable for each in op.inputs} & paths.keys() - {None}:
                layer = paths[number].rpartition("/")[0]
                if found := re.match(rf"(.*/)?{re.escape(layer.split('/')[-1])}(_\d+)?/", op.name):
                    self._layers.setdefault(found[0], layer)

    def names(self, cuts: Sequence[tf.Operation]) -> str:
        """What travels together in an exchange: the names of layers, or the user's lines."""
        found = list(dict.fromkeys(map(self._name, cuts)))
        more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
        return ", ".join(found[:NAMED]) + more

    def _name(self, cut: tf.Operation) -> str:
        made = cut.inputs[0].op
        # An optimizer may have scaled a gradient, or added it to others.
        for op in [made, *makers(made), *(op for each in makers(made) for op in makers(each))]:
            if GRADIENT in op.name and (layer := self._layer(op.name)):
                return f"gradients of {layer}"
        # What the split has added is in no layer: what takes its sum is.
        level, seen = [made], {made, cut}
        while level:
            for op in (op for op in level if "/" in op.name and op.name in self._known):
                place = self._layer(op.name) or place_of(self._known[op.name])
                if place != op.name:
                    return place
            level = [user for op in [*level, cut] for user in users(op) if user not in seen]
            seen.update(level)
        return OTHERS

    def _layer(self, name: str) -> str | None:
        """The layer in whose scope an operation is."""
        scope = name.rpartition(GRADIENT)[2]
        while scope := scope[: scope.rstrip("/").rfind("/") + 1]:
            # A layer may use its variables in a scope inside its own.
            found = [layer for own, layer in self._layers.items() if own.startswith(scope)]
            if scope in self._layers or len(found) == 1:
                return self._layers.get(scope) or found[0]
        return None


def makers(op: tf.Operation) -> list[tf.Operation]:
    return [tensor.op for tensor in op.inputs]


def users(op: tf.Operation) -> list[tf.Operation]:
    return [user for tensor in op.outputs for user in tensor.consumers()]
