"""Which axis of a model's outputs counts examples, and how replicas' outputs become one.

An output has a row for each example, or several, and then the replicas' rows follow one
another, or their blocks do where it is several batches on top of one another. Or it has nothing
to do with the batch, as a table of weights, and then any replica's is the whole. Whatever else,
such as a mean over the batch, one device computes from all examples; replicas cannot, so it is
refused.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals, model_internals
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replica_pass.moved_axis import Trait
from keras_multigpu.training.replica_pass.rows_flow import RowsFlow
from keras_multigpu.training.shares import cut, symbolic, with_length

# A number of examples that no other axis has by accident, and that many numbers divide.
MANY = 24_240

FIRST_TO_LAST = 2**31 - 1

Counts = list[int | None]


class Blocks(int):
    """A number of rows for each example, of which all first ones stand before all second ones."""


def may_be_odd(outputs: Any, rows: int | None) -> bool:
    """Whether shapes leave open if a replica's outputs have one row for each of its rows.

    The number of rows is None if it is open.
    """
    shapes = [leaf.shape for leaf in keras.tree.flatten(outputs) if leaf is not None]
    return rows == 1 or any(
        not shape.rank or shape[0] != rows or rows in shape.as_list()[1:]
        for shape in map(tf.TensorShape, shapes)
    )


def counted(function: Callable[..., Any], x: Any, leaves: Any, rows: int | None) -> Counts:
    """How many rows each of a replica's outputs has for an example; see `rows_per_example`.

    The leaves are what the function has made of a replica's rows; their number is None if it is
    open.
    """
    try:
        with tf.init_scope(), graph_internals.single_device():
            outputs = outputs_of_many(function, x)
    except Exception:
        # A model may read the numbers, and so only run on some.
        if not tf.executing_eagerly() or rows is None:
            raise
        return [rows_for_each(leaf, rows) for leaf in leaves]
    return in_order(counts_of_many(outputs), function, x)


def rows_per_example(function: Callable[..., Any], x: Any) -> Counts:
    """How many rows each output of a function has for an example of `x`; 0 where it has none.

    Found by running the model on the shape of a batch of many; None where shapes do not tell.
    """
    return in_order(counts_of_many(outputs_of_many(function, x)), function, x)


def in_order(counts: Counts, function: Callable[..., Any], x: Any) -> Counts:
    """The counts, as `Blocks` where the rows of an example do not follow one another."""
    if all(count in (0, 1, None) for count in counts):
        return counts

    def follow(inputs: Any) -> Any:
        flow = RowsFlow(inputs)
        with keras.StatelessScope():
            outputs = keras.tree.flatten(function(inputs))
        flow.note_all(tf.compat.v1.get_default_graph().get_operations())
        traits.extend(None if leaf is None else flow.trait(leaf) for leaf in outputs)

    traits: list[Trait | None] = []
    with tf.init_scope(), graph_internals.single_device():
        many = keras.tree.map_structure(of_many, x)
        tf.function(follow, autograph=False).get_concrete_function(many)
    return [ordered(count, trait) for count, trait in zip(counts, traits, strict=True)]


def ordered(count: int | None, trait: Trait | None) -> int | None:
    """A number of rows for an example, with their order; an unknown one is refused."""
    if count in (0, 1, None) or trait is None or trait.blocks in (None, 1):
        return count
    if trait.blocks == count:
        return Blocks(count)
    raise value_error(
        "An output has several rows for each example, in an order that cannot be told.",
        "Expected the rows of an example one after another, as a reshape to `(-1, ...)` makes "
        "them, or whole batches one after another, as `ops.concatenate(views, axis=0)` does.",
        "Return one output for each of them, or put them along another axis.",
        rows=count,
    )


def outputs_of_many(function: Callable[..., Any], x: Any) -> Any:
    many = symbolic(keras.tree.map_structure(of_many, x))
    return model_internals.symbolic_call(function, many)


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
    parts: Sequence[Any], examples: Sequence[Any], counts: Counts, group: ReplicaGroup | None = None
) -> Any:
    """Replicas' outputs as those of the whole batch.

    Args:
        parts: What each replica predicts: a flat list of tensors and None.
        examples: How many examples it has. One with none has borrowed a row.
        counts: See `rows_per_example`.
        group: The replicas; None where they are the pieces of one replica.
    """
    leaves = [i for i, count in enumerate(counts) if count != 0 and parts[0][i] is not None]
    lengths = [tf.where(tf.convert_to_tensor(n) > 0, FIRST_TO_LAST, 0) for n in examples]
    kept = [
        [block for i in leaves for block in blocks_of(cut(part[i], 0, length), counts[i])]
        for part, length in zip(parts, lengths, strict=True)
    ]
    if group is None:
        blocks = iter([tf.concat(rows, axis=0) for rows in zip(*kept, strict=True)])
    else:
        blocks = iter(group.joined(kept))
    whole = list(parts[0])
    for i in leaves:
        own = [next(blocks) for _ in blocks_in(counts[i])]
        whole[i] = own[0] if len(own) == 1 else tf.concat(own, axis=0)
    return whole


def blocks_in(count: int | None) -> range:
    """The blocks of rows in which an output has a row for each example; mostly one."""
    return range(count if isinstance(count, Blocks) else 1)


def blocks_of(leaf: Any, count: int | None) -> list[Any]:
    number = len(blocks_in(count))
    return [leaf] if number == 1 else tf.split(leaf, number)


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


def refuse_several_rows(leaves: Sequence[Any], counts: Sequence[Any]) -> None:
    """Raise a `ValueError` for what a loss of the whole batch cannot be told."""
    for count, leaf in zip(counts, leaves, strict=False):
        if leaf is not None and count == 0:
            refuse_output(leaf.shape)
        if leaf is not None and count not in (1, None):
            raise value_error(
                "An output has several rows for each example, and the loss needs the whole batch.",
                "Expected one row for each example, which the loss gets from all replicas.",
                "Return one output for each of them, as two views, and let the loss put them "
                "together, or put them along another axis.",
                shape=tuple(leaf.shape),
                rows_for_each_example=count,
            )


def refuse_output(shape: Any) -> None:
    """Raise a `ValueError` because replicas cannot compute an output from their shares."""
    raise value_error(
        "An output of the model is computed from the batch as a whole.",
        "Expected outputs with one row, or several, for each example along their first axis, "
        "or outputs that do not depend on the inputs: each replica sees its share of the "
        "batch, and each micro-batch its own.",
        "Leave the output out, or run this model on one device: `kmg.strategy('one_device')`, "
        "without `micro_batches`.",
        shape=tuple(shape),
    )
