"""Replicas that run a split step: simulated on one device, or those of a group on their own."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.partition.layouts import REPLICATED, Block, Layout, Rows, Shard
from keras_multigpu.partition.local_step import Leaf, LocalStep
from keras_multigpu.partition.sizes import Size
from keras_multigpu.training.exchange import stages, sums
from keras_multigpu.training.exchange.exchange import Exchange
from keras_multigpu.training.replica_group import ReplicaGroup


class Simulation:
    """A step on simulated replicas.

    Args:
        function: The step, for one device.
        specs: The specs of its arguments; an open first axis is the batch's.
        replicas: How many there are.
        variables: Those that it may use.
        group: Replicas that run it on their devices, and exchange what a training would.
        shards: Whether replicas divide the variables, each along its longest axis.
    """

    def __init__(
        self,
        function: Any,
        specs: Sequence[tf.TensorSpec],
        replicas: int,
        variables: Sequence[tf.Variable] = (),
        group: ReplicaGroup | None = None,
        shards: bool = False,
    ) -> None:
        self.whole = tf.function(function, autograph=False).get_concrete_function(*specs)
        self.replicas, self.variables, self._group = replicas, list(variables), group
        leaves = []
        for number, spec in enumerate(specs):
            dims: list[Any] = [
                Size.of(f"open_{number}_{axis}") if dim is None else dim
                for axis, dim in enumerate(spec.shape)
            ]
            layout = Rows(0, (Block("batch"),))
            if spec.shape.rank and spec.shape[0] is None:
                dims[0] = Size.of("batch")
                leaves.append(Leaf(dims, layout))
            else:
                leaves.append(Leaf(dims))
        self.leaves = leaves
        self.layouts = [
            sharded(variable.shape, replicas) if shards else REPLICATED for variable in variables
        ]
        cuts = self.cuts = sums.Cuts(replicas)
        self.step = LocalStep(
            self.whole,
            leaves,
            [variable.handle for variable in self.variables],
            {"batch": Size.of("batch")},
            cuts,
            variables=self.layouts,
        )
        outcomes = []

        def local(replica: Any, counts: Any, *tensors: Any) -> Any:
            outcome = self.step(replica, counts, tensors[: len(specs)], tensors[len(specs) :])
            outcomes.append(outcome)
            assigned = [outcome.assigned[number] for number in sorted(outcome.assigned)]
            return [*outcome.outputs, *assigned]

        own = [tf.TensorSpec((), tf.int32), tf.TensorSpec((1, 3), tf.int32), *specs]
        for variable, layout in zip(self.variables, self.layouts, strict=True):
            shape = variable.shape.as_list()
            if isinstance(layout, Rows):
                shape[layout.axis] = None
            own.append(tf.TensorSpec(shape, variable.dtype))
        self.local = stages.trace_stages(local, own, cuts, False)
        self.outcome = outcomes[-1]

    def __call__(self, counts: Sequence[int], *arrays: Any) -> list[np.ndarray]:
        """Assign the variables; returns the step's results, put together."""
        given = []
        total = sum(counts)
        for replica, count in enumerate(counts):
            first = sum(counts[:replica])
            own = [
                tf.convert_to_tensor(array[first : first + count])
                if isinstance(leaf.layout, Rows)
                else tf.convert_to_tensor(array)
                for leaf, array in zip(self.leaves, arrays, strict=True)
            ]
            numbers = tf.constant([[count, first, total]], tf.int32)
            values = [
                own_rows(variable.read_value(), layout, replica, self.replicas)
                for variable, layout in zip(self.variables, self.layouts, strict=True)
            ]
            given.append([tf.constant(replica), numbers, *own, *values])
        # In a graph, as steps are: TensorFlow takes no int32 from a function that is called alone.
        run = tf.function(lambda *all_given: run_together(self.local, all_given, self._group))
        results = run(*given)
        outputs = []
        for place, layout in enumerate(self.outcome.layouts):
            parts = [result[place].numpy() for result in results]
            outputs.append(joined(parts, layout, counts))
        count = len(self.outcome.layouts)
        for place, number in enumerate(sorted(self.outcome.assigned)):
            parts, layout = [result[count + place] for result in results], self.layouts[number]
            is_whole = not isinstance(layout, Rows)
            self.variables[number].assign(parts[0] if is_whole else tf.concat(parts, layout.axis))
        return outputs


def sharded(shape: tf.TensorShape, replicas: int) -> Layout:
    """The rows of a variable's longest axis, in units of two; whole if there are too few."""
    length = max(shape, default=0)
    is_long = length >= 2 * replicas
    return Rows(list(shape).index(length), (Block(Shard(length, 2)),)) if is_long else REPLICATED


def own_rows(value: tf.Tensor, layout: Layout, replica: int, replicas: int) -> tf.Tensor:
    if not isinstance(layout, Rows):
        return value
    first, stop = layout.blocks[0].batch.bounds(replica, replicas)
    return tf.gather(value, tf.range(first, stop), axis=layout.axis)


def joined(parts: list[np.ndarray], layout: Any, counts: Sequence[int]) -> np.ndarray:
    if not isinstance(layout, Rows):
        return parts[0]
    pieces: list[np.ndarray] = []
    offsets = [0] * len(parts)
    for block in layout.blocks:
        for replica, part in enumerate(parts):
            alone = len(layout.blocks) == 1
            length = part.shape[layout.axis] if alone else counts[replica] * block.factor
            index = [slice(None)] * part.ndim
            index[layout.axis] = slice(offsets[replica], offsets[replica] + length)
            pieces.append(part[tuple(index)])
            offsets[replica] += length
    return np.concatenate(pieces, layout.axis)


def run_together(
    local: Any, given: Sequence[Sequence[tf.Tensor]], group: ReplicaGroup | None = None
) -> list[list[tf.Tensor]]:
    """The results of replicas that run stage by stage."""
    exchange = Exchange(["CPU:0"] * len(given)) if group is None else group.exchange
    results = local([[own] for own in given], sums.Sums(exchange))
    return [tf.nest.flatten(of_replica) for of_replica in results]
