"""`Unsplit`: a step as one device runs it, with the updates of large variables one after another.

    forward and backward pass ──> update of some variables ──> update of others ──> ...

TensorFlow reads all variables before anything else, so that all of an optimizer's slots would have
to be whole at a time.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.training.exchange.cuts import sources
from keras_multigpu.training.exchange.stage import Stage, definitions_of, size_of
from keras_multigpu.training.steps.traced_step import TracedStep

# How many bytes of variables an update changes, unless a single one has more.
AT_ONCE = 2**25
# The update of what results or several updates need.
COMMON = -1


class Unsplit:
    """A traced step that runs in parts: first what its updates have in common, then each of them.

    Args:
        traced: The step.
    """

    def __init__(self, traced: TracedStep) -> None:
        self._whole = traced.whole
        number_of = {id(handle): number for number, handle in enumerate(traced.handles)}
        inputs, captured = self._whole.graph.inputs, self._whole.captured_inputs
        of_captured = zip(inputs[len(inputs) - len(captured) :], captured, strict=True)
        self._numbers = {t.name: number_of[id(h)] for t, h in of_captured if id(h) in number_of}
        updates, size = dict[str, int](), 0
        for name, number in self._numbers.items():
            updates[name] = size // AT_ONCE
            size += size_of(traced.variables[number])
        self._stages = stages_of(self._whole, updates)

    def __call__(
        self, data: Sequence[tf.Tensor], begin: Callable[[int], None], end: Callable[[int], None]
    ) -> list[tf.Tensor]:
        """The tensors of the step's results.

        Args:
            data: The tensors of the batch.
            begin: Called with the number of each variable, before the first part that uses it.
            end: Called with it after the last one.
        """
        inputs = self._whole.graph.inputs
        given = zip(inputs, [*data, *self._whole.captured_inputs], strict=True)
        known = {placeholder.name: value for placeholder, value in given}
        last = {name: stage for stage in self._stages for name in stage.inputs}
        begun: set[str] = set()
        results = [each.name for each in results_of(self._whole.graph)]
        for stage in self._stages:
            for name in stage.inputs:
                if name in self._numbers and name not in begun:
                    begun.add(name)
                    begin(self._numbers[name])
            known |= stage.call_eagerly(known)
            for name in stage.inputs:
                if last[name] is stage and name in self._numbers:
                    end(self._numbers[name])
                elif last[name] is stage and name not in results:
                    del known[name]
        return [known[name] for name in results]


def stages_of(whole: Any, updates: Mapping[str, int]) -> list[Stage]:
    """A traced function in parts, which run one after another.

    Args:
        updates: The number of the update of each variable, by the name of its handle.
    """
    graph = whole.graph
    update_of = updates_alone(graph, updates)
    for tensor in graph.inputs:
        update_of.pop(tensor.op.name, None)
    stages = collections.defaultdict[int, Stage](Stage)
    for operation in graph.get_operations():
        if operation.name in update_of:
            stages[update_of[operation.name]].operations.append(operation)
    found = [stages[update] for update in sorted(stages)]
    results = [tensor.name for tensor in results_of(graph)]
    for stage, definition in zip(found, definitions_of(whole, found, results), strict=True):
        stage.define(definition)
    return found


def results_of(graph: Any) -> list[tf.Tensor]:
    """The results of a traced function, which may be there before its last assignment."""
    # TensorFlow returns an Identity of each, which waits for all assignments.
    return [tensor.op.inputs[0] for tensor in graph.outputs]


def updates_alone(graph: Any, updates: Mapping[str, int]) -> dict[str, int]:
    """The update for which alone an operation runs, or `COMMON`, for all that anything needs."""
    waiting = {tensor.op.name for tensor in graph.outputs}
    operations = [op for op in graph.get_operations() if op.name not in waiting]
    users = collections.Counter(source.name for op in operations for source in set(sources(op)))
    found = collections.defaultdict[str, set[int]](set)
    for tensor in results_of(graph):
        found[tensor.op.name].add(COMMON)
    ready = [op for op in operations if not users[op.name]]
    while ready:
        op = ready.pop()
        if op.inputs and not found[op.name]:
            # The last assignment of a variable.
            found[op.name] = {updates.get(op.inputs[0].name, COMMON)}
        if len(found[op.name]) > 1:
            found[op.name] = {COMMON}
        for source in set(sources(op)):
            found[source.name] |= found[op.name]
            users[source.name] -= 1
            if not users[source.name]:
                ready.append(source)
    return {name: update for name, own in found.items() for update in own}
