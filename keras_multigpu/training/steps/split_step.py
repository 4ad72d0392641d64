"""The step of one device, split over the replicas.

                    Keras's step, or the user's     a replica's part      new values,
    specs of  ───>  traced once for one       ───>  one graph that   ───> assigned
    a batch         device, unmodified              all replicas run      together

What a replica needs of the others are sums between the stages of its graph; see `partition`.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import (
    graph_internals,
    optimizer_internals,
    variable_internals,
)
from keras_multigpu.partition.layouts import Block
from keras_multigpu.partition.layouts import Rows as InRows
from keras_multigpu.partition.local_step import Leaf, LocalStep
from keras_multigpu.partition.sizes import Size
from keras_multigpu.training.exchange.stages import totals, traced
from keras_multigpu.training.replica_group import Copies, Replica, ReplicaGroup, copies_in
from keras_multigpu.training.shares import (
    Batch,
    Rows,
    cut,
    gathered,
    is_one_row,
    present,
)
from keras_multigpu.training.variables.placement import optimizers_of

if TYPE_CHECKING:
    from keras_multigpu.training.replication import Replication

BATCH = "batch"
_thread = threading.local()


def traces_one_device() -> bool:
    """Whether a step is being traced as one device runs it."""
    return bool(getattr(_thread, "traces", False))


class Sums:
    """Exchanges between replicas, at which their graph is cut into stages."""

    def __init__(self, group: ReplicaGroup) -> None:
        self.replicas = group.count

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        return tensor if self.replicas == 1 else totals([tensor])[0]


class SplitStep:
    """A step of a model, traced for one device and split over replicas.

    Args:
        model: The model, whose variables are where they belong.
        replication: Its replicas.
        spec: The specs of a global batch.
        function: The model's step.
        joins: Whether the results are rows, of which the whole is wanted.
    """

    def __init__(
        self,
        model: keras.Model,
        replication: "Replication",
        spec: Batch,
        function: Callable[[Any], Any],
    ) -> None:
        self._model, self._group, self._spec = model, replication.group, spec
        known = known_variables(model, replication)
        self._whole = traced_for_one_device(model, known, spec, function)
        self._copies = copies_of_captured(self._whole, known)
        handles = [copies[0].handle for copies in self._copies]
        self._leaves = present(spec)
        leaves, specs = [], []
        for leaf in self._leaves:
            for tensor in tf.nest.flatten(leaf, expand_composites=True):
                leaves.append(described(tensor, is_shared(leaf), len(leaves)))
                specs.append(tensor)
        self._step = LocalStep(
            self._whole, leaves, handles, {BATCH: Size.of(BATCH)}, Sums(self._group)
        )
        outcomes = []

        def local(replica: Any, counts: Any, data: Any, values: Any) -> Any:
            outcome = self._step(replica, counts, data, values)
            outcomes.append(outcome)
            self._assigned = sorted(outcome.assigned)
            return outcome.outputs, [outcome.assigned[number] for number in self._assigned]

        values = [tf.TensorSpec(copies[0].shape, copies[0].dtype) for copies in self._copies]
        numbers = tf.TensorSpec((), tf.int32), tf.TensorSpec((1, 3), tf.int32)
        jit = bool(model.jit_compile)
        self._local = traced(local, (*numbers, specs, values), jit)
        self._layouts = outcomes[-1].layouts

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Run the step on a batch; its results, as one device gives them."""
        results = self._run(shares)
        joined = []
        for place, layout in enumerate(self._layouts):
            parts = [outputs[place] for outputs, _ in results]
            if isinstance(layout, InRows):
                joined.append(self._joined(parts, layout))
            else:
                joined.append(parts[0])
        flat = iter(joined)
        return tf.nest.map_structure(
            lambda leaf: None if leaf is None else next(flat),
            self._whole.structured_outputs,
            expand_composites=True,
        )

    def _run(self, shares: Sequence[Rows]) -> Any:
        examples = [tf.cast(rows.examples, tf.int32) for rows in shares]
        total = tf.cast(shares[0].global_batch_size, tf.int32)
        wholes = self._shared_leaves(shares)

        def on_replica(replica: Replica) -> Any:
            values = self._group.read(self._copies, replica)
            rows = shares[replica.id]
            own = examples[replica.id]
            before = tf.add_n([tf.constant(0), *examples[: replica.id]])
            data = []
            for place, (leaf, tensor) in enumerate(
                zip(self._leaves, present(rows.data), strict=True)
            ):
                if place in wholes:
                    tensor = wholes[place]
                elif not is_shared(leaf):
                    tensor = cut(tensor, 0, rows.examples)
                data += tf.nest.flatten(tensor, expand_composites=True)
            numbers = tf.reshape(tf.stack([own, before, total]), [1, 3])
            return self._local(tf.constant(replica.id), numbers, data, values)

        results = self._group.run(on_replica)
        places = [self._copies[number] for number in self._assigned]
        # Nothing is assigned before every replica has computed all that it assigns.
        made = [tensor for _, assigned in results for tensor in assigned]
        with tf.control_dependencies([tf.identity(tensor) for tensor in made]):
            for replica, (_, assigned) in zip(self._group.replicas, results, strict=True):
                self._group.assign(places, assigned, replica)
        return results

    def _shared_leaves(self, shares: Sequence[Rows]) -> dict[int, Any]:
        """What every replica needs whole: tensors made of several, as ragged ones are."""
        places = [n for n, leaf in enumerate(self._leaves) if is_composite(leaf)]
        if not places or self._group.count == 1:
            return {}
        whole = present(gathered(shares, self._spec))
        return {place: whole[place] for place in places}

    def _joined(self, parts: list[tf.Tensor], layout: InRows) -> tf.Tensor:
        if len(parts) == 1:
            return parts[0]
        if layout.axis:
            order = [layout.axis, *(a for a in range(parts[0].shape.rank) if a != layout.axis)]
            parts = [tf.transpose(part, order) for part in parts]
        with tf.device(self._group.hub):
            (whole,) = self._group.joined([[part] for part in parts])
        if layout.axis:
            back = [order.index(axis) for axis in range(len(order))]
            whole = tf.transpose(whole, back)
        return whole


def is_composite(leaf: Any) -> bool:
    return not isinstance(leaf, (tf.Tensor, tf.TensorSpec))


def is_shared(leaf: Any) -> bool:
    """Whether every replica gets a leaf of the batch whole."""
    return is_composite(leaf) or not leaf.shape.rank or is_one_row(leaf)


def described(spec: tf.TensorSpec, shared: bool, number: int) -> Leaf:
    """What the partition has to know of a tensor of the batch."""
    if spec.shape.rank is None:
        return Leaf(None)
    dims: list[Any] = [
        Size.of(f"axis_{axis}_of_{number}") if length is None else length
        for axis, length in enumerate(spec.shape)
    ]
    if shared:
        return Leaf(dims)
    return Leaf([Size.of(BATCH), *dims[1:]], InRows(0, (Block(BATCH),)))


def known_variables(model: keras.Model, replication: "Replication") -> list[keras.Variable]:
    """All Keras variables that a step may use, each once."""
    optimizers = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    everything = [*model.variables, *model.metrics_variables, *optimizers]
    everything += replication.placement.untracked
    everything += [variable_internals.global_seed_state()]
    return list({id(variable): variable for variable in everything}.values())


@contextlib.contextmanager
def plain_storages(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Let each variable be the first of its copies, as on one device."""
    known = list(variables)
    storages = variable_internals.storages_of(known)
    variable_internals.set_storages(known, [copies_in(storage)[0] for storage in storages])
    try:
        yield
    finally:
        variable_internals.set_storages(known, storages)


def traced_for_one_device(
    model: keras.Model,
    variables: Sequence[keras.Variable],
    spec: Batch,
    function: Callable[[Any], Any],
) -> Any:
    """The step's graph, as one device runs it."""

    def step(*parts: Any) -> Any:
        return function(keras.utils.pack_x_y_sample_weight(*parts))

    with graph_internals.single_device(), plain_storages(variables):
        with optimizer_internals.on_one_device(optimizers_of(model)):
            _thread.traces = True
            try:
                return tf.function(step, autograph=False).get_concrete_function(*spec)
            finally:
                _thread.traces = False


def copies_of_captured(whole: Any, known: Sequence[keras.Variable]) -> list[Copies]:
    """The copies of the variables that a graph uses."""
    copies = [copies_in(s) for s in variable_internals.storages_of(list(known))]
    by_handle = {id(each[0].handle): each for each in copies}
    for variable in whole.graph.variables:
        by_handle.setdefault(id(variable.handle), (variable,))
    captured = [each for each in whole.captured_inputs if each.dtype == tf.resource]
    return [by_handle[id(handle)] for handle in captured if id(handle) in by_handle]
