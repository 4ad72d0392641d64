"""A training step on the cores of TPUs, written against TensorFlow's documentation alone.

    host      values ──> push          shares of equal length          logs, metrics
                           │                  │                             ↑
    cores                copies ──> pass ──> sum ──> update ──> copies, sums

Nobody has seen it run on a TPU. The tests run it on CPUs, under a `MirroredStrategy`.
`TPUStrategy.run` differs: it traces the function once for all cores, so that a core's number is a
tensor, and XLA compiles it as a whole, for shapes that are known.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.training.exchange.stages import called_directly, summing
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.replica_pass.loss_reduction import NeedsWholeBatch
from keras_multigpu.training.replica_pass.passes import Layout, Outcome, TrainingPass, Update
from keras_multigpu.training.replica_pass.pure_model import Values
from keras_multigpu.training.servers.connection import ASSIGNS, NO_SUM, WHOLE_BATCH, Elsewhere
from keras_multigpu.training.shares import (
    COUNT,
    Batch,
    Rows,
    batch_size_of,
    filled,
    present,
    shares_of,
)
from keras_multigpu.training.steps.step import Result, UpdatingStep
from keras_multigpu.training.update import loss_scale
from keras_multigpu.training.variables.catching_scope import AssignsWeights

logger = logging.getLogger("keras_multigpu")

# Without it TensorFlow would give XLA shapes that may change.
STATIC = tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=False)


class TPUs(Elsewhere):
    """The cores of TPUs, which train on copies of the values; the model stays on the host."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, "TPUs", strategy.num_replicas_in_sync, updated_there=True)

    def on_each(self, values: Sequence[Any]) -> Any:
        """Values of which each core has one."""
        return self.strategy.experimental_distribute_values_from_function(
            lambda core: values[core.replica_id_in_sync_group]
        )

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """What a function returns on the first core, on the host; called in a `tf.function`."""
        found = self.strategy.run(function, tuple(arguments), options=STATIC)
        with tf.device(HOST):
            return tf.nest.map_structure(
                lambda each: tf.identity(self.strategy.experimental_local_results(each)[0]), found
            )

    def sum(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """The sums of tensors over all cores; called by each of them."""
        context = tf.distribute.get_replica_context()
        sent = [tf.cast(each, sent_as(each.dtype)) for each in tensors]
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, sent)
        return [tf.cast(each, own.dtype) for each, own in zip(summed, tensors, strict=True)]

    def gather(self, tensor: tf.Tensor, cores: int) -> tf.Tensor:
        """The rows of the first cores, one after another; called by all of them."""
        context = tf.distribute.get_replica_context()
        everyones = context.all_gather(tf.cast(tensor, sent_as(tensor.dtype)), axis=0)
        return tf.cast(everyones[: cores * tensor.shape[0]], tensor.dtype)


class TPUTrainStep(UpdatingStep):
    """A training step on TPUs, with shares of equal length on as many cores as these allow.

    The other cores compute what the first does, and count for nothing: rows that were made up to
    fill the shares would be in the moments of BatchNormalization, and in all else that a layer
    takes over its rows.
    """

    def __init__(self, replica_pass: TrainingPass, tpus: TPUs) -> None:
        super().__init__(replica_pass)
        known = self._variables
        parts = known.trainable, self._optimizer_variables, known.others, [known.global_seed]
        self._tpus = tpus
        self._copies = [tpus.copies(part) for part in parts]
        self._run_pass = called_directly(replica_pass.run)
        self._update = called_directly(replica_pass.update)
        self._function = tf.function(self._on_cores, autograph=False)
        self._made: tuple[Outcome, Layout]
        self._said = False

    def __call__(self, shares: Sequence[Rows]) -> dict[str, Any]:
        """Train on one batch; its values stay on the TPUs until the host asks for them."""
        cores, (whole,) = self._tpus.workers, shares
        size: Any = batch_size_of(whole.data)
        count = max(each for each in range(1, cores + 1) if size % each == 0)
        if count < min(size, cores) and not self._said:
            logger.warning(
                "A batch of %d examples divides evenly over %d of %d TPU cores: each of these "
                "takes %d examples.",
                *(size, count, cores, size // count),
            )
            self._said = True
        rows = [present(each.data) for each in shares_of(whole.data, count)]
        rows += rows[:1] * (cores - count)
        self._tpus.push()
        numbers = [tf.constant(number) for number in range(cores)]
        arguments = map(self._tpus.on_each, [numbers, *zip(*rows, strict=True)])
        losses, metrics = self._function(count, *arguments)
        update = Update([], [], [], losses, metrics, tf.zeros(()))
        # Of the outcome, which is one of a graph, nothing is asked.
        result = Result(update, *self._made, whole.examples)
        return self._tracked(shares, [result], ((None, None, None), None))

    def _on_cores(self, count: int, *arguments: Any) -> Any:
        """One step on all cores, of which so many have examples; its losses, and metrics' sums."""

        def on_core(number: tf.Tensor, *leaves: tf.Tensor) -> Any:
            with summing(self._tpus.sum):
                return self._on_core(count, number, filled(self._spec, leaves))

        return self._tpus.run(on_core, arguments)

    def _on_core(self, count: int, number: tf.Tensor, data: Batch) -> Any:
        trainable, optimizer, others, (seed,) = (
            [tf.convert_to_tensor(copy) for copy in part] for part in self._copies
        )
        size: Any = batch_size_of(data)
        examples = tf.where(number < count, tf.constant(size, COUNT), tf.constant(0, COUNT))
        rows = Rows(data, examples, tf.constant(count * size, COUNT))
        values = Values(trainable, others, seed)
        scale = loss_scale(self._model.optimizer, self._optimizer_variables, optimizer)
        try:
            outcome, layout = self._run_pass(values, rows, number, scale)
        except NeedsWholeBatch:
            raise self._tpus.refusal(self._model, NO_SUM) from None
        except AssignsWeights:
            raise self._tpus.refusal(self._model, ASSIGNS) from None
        if layout.metrics.gathered:
            raise self._tpus.refusal(self._model, WHOLE_BATCH)
        self._made = outcome, layout
        packs = layout.packing.summed(outcome.packs, self._tpus.sum)
        slices = [
            tf.IndexedSlices(
                self._tpus.gather(each.values, count),
                self._tpus.gather(each.indices, count),
                each.dense_shape,
            )
            for each in outcome.slices
        ]
        update = self._update(layout, values, packs, slices, optimizer)
        first, second, third, last = self._copies
        changed = [third[index] for index in (*layout.changed, *self._variables.seeds)]
        new = [*update.trainable, *update.optimizer, *update.others, *outcome.seeds]
        new.append(outcome.global_seed)
        for copy, value in zip([*first, *second, *changed, *last], new, strict=True):
            # Each core assigns its own copy, for these have no `aggregation`.
            copy.assign(value)
        return update.losses, update.metrics


def sent_as(dtype: tf.DType) -> tf.DType:
    """The dtype in which TPUs sum: `tpu.cross_replica_sum` takes no 64-bit integers."""
    return tf.int32 if dtype == tf.int64 else dtype
