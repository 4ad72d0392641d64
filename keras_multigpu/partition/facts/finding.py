"""Finds the `Facts` of a program, operation by operation."""

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.facts.facts import Dims, Elements, Facts
from keras_multigpu.partition.facts.lengths import LENGTHS
from keras_multigpu.partition.facts.list_elements import note_elements
from keras_multigpu.partition.facts.values import VALUES
from keras_multigpu.partition.program import COMPILED, LOOP, Operation, Program
from keras_multigpu.partition.sizes import AnySize, terms_of

# Larger values are not tracked. The gradient of `concat` packs hundreds of shapes into one value.
MOST_ENTRIES = 2048
INTEGERS = (tf.int32, tf.int64, tf.bool)


def find_facts(
    program: Program,
    dims: Sequence[Dims],
    batches: Mapping[str, AnySize],
    values: Mapping[int, np.ndarray] | None = None,
) -> Facts:
    """Find what is known of the tensors of a program, and of the programs in it.

    Args:
        program: The program.
        dims: The lengths of the axes of each input; None to take TensorFlow's.
        batches: The size of each batch, by name: a number if the step was traced for it.
        values: The known values of inputs, by place.
    """
    facts, known = Facts(program, batches), values or {}
    for place, (tensor, own) in enumerate(zip(program.inputs, dims, strict=True)):
        facts.note(tensor, own, known.get(place))
    walk(facts, program)
    return facts


def walk(facts: Facts, program: Program) -> None:
    for op in program.operations:
        for tensor in op.outputs:
            facts.forget_value(tensor)
            facts.elements.pop(tensor, None)
        if op.type == LOOP:
            find_in_loop(facts, op)
        elif op.inner:
            find_inside(facts, op)
        else:
            find_results(facts, op)


def find_results(facts: Facts, op: Operation) -> None:
    """Note what is known of the outputs of an operation."""
    found: Sequence[Dims] | None = None
    if op.type in LENGTHS and any(not t.shape.is_fully_defined() for t in op.outputs):
        found = LENGTHS[op.type](op, facts)
    for place, tensor in enumerate(op.outputs):
        facts.note(tensor, found[place] if found and place < len(found) else None)
    note_elements(op, facts)
    if op.outputs and op.outputs[0].dtype in INTEGERS and op.type in VALUES:
        for tensor, value in zip(op.outputs, VALUES[op.type](op, facts) or (), strict=False):
            if value is not None and np.size(value) <= MOST_ENTRIES:
                if all(fits(entry, tensor.dtype) for entry in np.ravel(value)):
                    facts.note_value(tensor, value)


def enter(
    facts: Facts,
    program: Program,
    dims: Sequence[Dims],
    values: Sequence[np.ndarray | None],
    elements: Sequence[Elements | None],
) -> None:
    """Walk through an inner program, given what is known of its inputs."""
    for place, tensor in enumerate(program.inputs):
        facts.forget_value(tensor)
        facts.note(tensor, dims[place], values[place])
        facts.elements[tensor] = elements[place]
    walk(facts, program)


def find_inside(facts: Facts, op: Operation) -> None:
    inputs = op.inputs if op.type == COMPILED else op.inputs[1:]
    for inner in op.inner:
        enter(
            facts,
            inner,
            [facts.dims(tensor) for tensor in inputs],
            [facts.value(tensor) for tensor in inputs],
            [facts.elements.get(tensor) for tensor in inputs],
        )
    for place, tensor in enumerate(op.outputs):
        results = [inner.outputs[place] for inner in op.inner]
        value = facts.value(results[0]) if len(results) == 1 else None
        facts.note(tensor, common([facts.dims(result) for result in results]), value)
        elements = [facts.elements.get(result) for result in results]
        if all(each == elements[0] for each in elements):
            facts.elements[tensor] = elements[0]


def find_in_loop(facts: Facts, op: Operation) -> None:
    condition, body = op.inner
    dims = [facts.dims(tensor) for tensor in op.inputs]
    values = [
        facts.value(tensor) if is_kept else None
        for tensor, is_kept in zip(op.inputs, body.passed_through, strict=True)
    ]
    elements = [facts.elements.get(tensor) for tensor in op.inputs]
    while True:
        enter(facts, body, dims, values, elements)
        wider = [
            common([own, facts.dims(out)]) for own, out in zip(dims, body.outputs, strict=True)
        ]
        after = [
            joined_elements(own, facts.elements.get(out))
            for own, out in zip(elements, body.outputs, strict=True)
        ]
        if wider == dims and after == elements:
            break
        dims, elements = wider, after
    enter(facts, condition, dims, values, elements)
    for place, tensor in enumerate(op.outputs):
        facts.note(tensor, dims[place], values[place])
        facts.elements[tensor] = elements[place]


def fits(entry: AnySize | None, dtype: tf.DType) -> bool:
    """Whether an entry has no number beyond its type, where TensorFlow starts over from below."""
    most = 2 ** (8 * dtype.size - 1)
    return entry is None or all(-most <= number < most for _, number in terms_of(entry))


def common(found: Sequence[Dims]) -> Dims:
    """The lengths that several tensors have in common."""
    first = found[0]
    if any(dims is None or first is None or len(dims) != len(first) for dims in found):
        return None
    return [
        each[0] if all(dim == each[0] for dim in each) else None
        for each in zip(*found, strict=True)
    ]


def joined_elements(one: Elements | None, other: Elements | None) -> Elements | None:
    """What is known of the elements of a list that is either of two."""
    if one is None or other is None:
        return one or other
    return one.joined(other)
