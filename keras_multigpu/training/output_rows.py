"""Which axis of a model's outputs counts examples, and how replicas' outputs become one.

An output has a row for each example, or several, and then the replicas' rows follow one
another. Or it has nothing to do with the batch, as a table of weights, and then any replica's
is the whole. Whatever else, such as a mean over the batch, one device computes from all
examples; replicas cannot, so it is refused.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem
from keras_multigpu.training.shares import cut
from keras_multigpu.training.tracing import symbolic

MANY = 24_240
"""A number of examples that no other axis has by accident, and that many numbers divide."""

FIRST_TO_LAST = 2**31 - 1


def may_be_odd(outputs: Any, rows: int | None) -> bool:
    """Whether shapes leave open if outputs have one row for each example.

    Args:
        outputs: What a replica predicts for its rows: tensors or specs.
        rows: The number of rows; None if it is open.
    """
    shapes = [leaf.shape for leaf in keras.tree.flatten(outputs) if leaf is not None]
    return rows == 1 or any(
        not shape.rank or shape[0] != rows or rows in shape.as_list()[1:]
        for shape in map(tf.TensorShape, shapes)
    )


def rows_per_example(model: keras.Model, x: Any) -> list[int | None]:
    """How many rows each output has for an example; 0 where it has none.

    Found by running the model on the shape of a batch of many; None where shapes do not tell.

    Args:
        model: The model.
        x: The specs of its inputs.
    """
    outputs = keras_internals.symbolic_call(model, symbolic(keras.tree.map_structure(of_many, x)))
    counts: list[int | None] = []
    for leaf in keras.tree.flatten(outputs):
        if leaf is not None and MANY in leaf.shape[1:]:
            refuse_output(leaf.shape)
        counts.append(rows_for_each(leaf, MANY))
    return counts


def rows_for_each(leaf: Any, examples: int) -> int | None:
    """How many rows a tensor has for each of some examples; 0 if they do not divide evenly."""
    if leaf is None or len(leaf.shape) == 0:
        return 0
    first = leaf.shape[0]
    return None if first is None else 0 if first % examples else first // examples


def of_many(spec: Any) -> Any:
    """The spec of many examples; scalars, None and ragged ones as they are."""
    if spec is None or isinstance(spec, tf.RaggedTensorSpec) or not spec.shape.rank:
        return spec
    return type(spec)([MANY, *spec.shape[1:]], spec.dtype)


def joined(parts: Sequence[Any], examples: Sequence[Any], counts: Sequence[int | None]) -> Any:
    """Replicas' outputs as those of the whole batch.

    Args:
        parts: What each replica predicts: a flat list of tensors and None.
        examples: How many examples it has. One with none has borrowed a row.
        counts: See `rows_per_example`.
    """

    def whole(count: int | None, leaves: Sequence[Any]) -> Any:
        if leaves[0] is None or count == 0:
            return leaves[0]
        kept = [
            cut(leaf, 0, tf.where(number > 0, FIRST_TO_LAST, 0))
            for leaf, number in zip(leaves, examples, strict=True)
        ]
        return tf.concat(kept, axis=0)

    return [
        whole(count, leaves) for count, leaves in zip(counts, zip(*parts, strict=True), strict=True)
    ]


def refuse_computed(
    counts: Sequence[int | None], run_pass: Any, specs: tuple[Any, Any], parts: Sequence[Any]
) -> None:
    """Raise a `ValueError` where an output without rows is computed from the examples.

    Args:
        counts: See `rows_per_example`.
        run_pass: The pass over a replica's rows; has no graph if it runs eagerly.
        specs: The specs of its first arguments: the values of variables, and rows.
        parts: What each replica predicts, as lists of tensors.
    """
    graph = getattr(run_pass, "graph", None)
    for index, count in enumerate(counts):
        leaf = parts[0][index]
        if count != 0 or leaf is None:
            continue
        if graph is None:
            computed = any(not np.array_equal(leaf, part[index]) for part in parts)
        else:
            output = keras.tree.flatten(graph.structured_outputs.y_pred)[index]
            values, rows = (len(tf.nest.flatten(spec, expand_composites=True)) for spec in specs)
            computed = depends_on(output, graph.inputs[values : values + rows])
        if computed:
            refuse_output(leaf.shape)


def depends_on(output: tf.Tensor, sources: Sequence[tf.Tensor]) -> bool:
    """Whether a tensor of a graph is computed from one of some others."""
    found, todo = set(), [output.op]
    wanted = {source.op.name for source in sources}
    while todo:
        operation = todo.pop()
        if operation.name in wanted:
            return True
        if operation.name not in found:
            found.add(operation.name)
            todo += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
    return False


def refuse_output(shape: Any) -> None:
    """Raise a `ValueError` because replicas cannot compute an output from their shares."""
    raise ValueError(
        problem(
            "An output of the model is computed from the batch as a whole.",
            "Expected outputs with one row, or several, for each example along their first axis, "
            "or outputs that do not depend on the inputs: each replica sees its share of the "
            "batch.",
            "Leave the output out, or run this model on one device: `kmg.strategy('one_device')`.",
            shape=tuple(shape),
        )
    )
