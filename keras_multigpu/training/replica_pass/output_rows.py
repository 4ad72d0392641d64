"""Which axis of a model's outputs counts examples, and how replicas' outputs become one.

An output has a row for each example, or several, and then the replicas' rows follow one
another. Or it has nothing to do with the batch, as a table of weights, and then any replica's
is the whole. Whatever else, such as a mean over the batch, one device computes from all
examples; replicas cannot, so it is refused.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.shares import cut
from keras_multigpu.training.tracing import symbolic
from keras_multigpu.training.tracing import with_length

MANY = 24_240
"""A number of examples that no other axis has by accident, and that many numbers divide."""

FIRST_TO_LAST = 2**31 - 1

Counts = list[int | None]


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


def counted(function: Callable[..., Any], x: Any, leaves: Any, rows: int | None) -> Counts:
    """How many rows each of a replica's outputs has for an example; see `rows_per_example`.

    Args:
        function: The model, or what else makes the outputs of inputs.
        x: The specs of its inputs.
        leaves: What it has made of a replica's rows: a flat list of tensors and None.
        rows: The number of these rows; None if it is open.
    """
    if not may_be_odd(leaves, rows):
        return [1] * len(leaves)
    try:
        with tf.init_scope(), keras_internals.single_device():
            outputs = outputs_of_many(function, x)
    except Exception:
        # A model may read the numbers, and so only run on some.
        if not tf.executing_eagerly() or rows is None:
            raise
        return [rows_for_each(leaf, rows) for leaf in leaves]
    return counts_of_many(outputs)


def rows_per_example(function: Callable[..., Any], x: Any) -> Counts:
    """How many rows each output has for an example; 0 where it has none.

    Found by running the model on the shape of a batch of many; None where shapes do not tell.

    Args:
        function: The model, or what else makes the outputs of inputs.
        x: The specs of its inputs.
    """
    return counts_of_many(outputs_of_many(function, x))


def outputs_of_many(function: Callable[..., Any], x: Any) -> Any:
    """The shapes of the outputs for many examples."""
    many = symbolic(keras.tree.map_structure(of_many, x))
    return keras_internals.symbolic_call(function, many)


def counts_of_many(outputs: Any) -> Counts:
    """How many rows outputs for many examples have for each."""
    counts: Counts = []
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
    return with_length(spec, MANY)


def joined(
    parts: Sequence[Any],
    examples: Sequence[Any],
    counts: Counts,
    group: ReplicaGroup | None = None,
) -> Any:
    """Replicas' outputs as those of the whole batch.

    Args:
        parts: What each replica predicts: a flat list of tensors and None.
        examples: How many examples it has. One with none has borrowed a row.
        counts: See `rows_per_example`.
        group: The replicas; None where they are the pieces of one replica.
    """

    def whole(count: int | None, leaves: Sequence[Any]) -> Any:
        if leaves[0] is None or count == 0:
            return leaves[0]
        kept = [
            cut(leaf, 0, tf.where(tf.convert_to_tensor(number) > 0, FIRST_TO_LAST, 0))
            for leaf, number in zip(leaves, examples, strict=True)
        ]
        return tf.concat(kept, axis=0) if group is None else group.joined(kept)

    return [
        whole(count, leaves) for count, leaves in zip(counts, zip(*parts, strict=True), strict=True)
    ]


def refuse_computed(
    counts: Counts, parts: Sequence[Any], outputs: Any = None, rows: Sequence[tf.Tensor] = ()
) -> None:
    """Raise a `ValueError` where an output without rows is computed from the examples.

    Args:
        counts: See `rows_per_example`.
        parts: What each replica, or each piece, predicts, as lists of tensors.
        outputs: The same for one of them, in the graph that makes it; None without a graph.
        rows: The rows that it is made of, in this graph.
    """
    for index, count in enumerate(counts):
        leaf = parts[0][index]
        if count != 0 or leaf is None:
            continue
        if outputs is None:
            computed = any(not np.array_equal(leaf, part[index]) for part in parts)
        else:
            computed = depends_on(outputs[index], rows)
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
            "batch, and each micro-batch its own.",
            "Leave the output out, or run this model on one device: `kmg.strategy('one_device')`, "
            "without `micro_batches`.",
            shape=tuple(shape),
        )
    )
