"""A training step on the cores of TPUs, written from TensorFlow's documentation alone.

    host      values ──> push          shares of equal length          logs
                           │                  │                         ↑
    cores                copies ──> a core's part, which sums ──> copies, results

It has never run on a TPU. The tests run it on CPUs, under a `MirroredStrategy`. `TPUStrategy.run`
differs: it traces the function once for all cores, so a core's number is a tensor, and XLA compiles
it for known shapes, so all sizes must be constants.
"""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.partition.emission.exchange import ShardedAxis
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.runners.elsewhere import PROBES, Elsewhere
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.shares import Rows, present_leaves, shares_of
from keras_multigpu.training.steps.batches import PartInputs
from keras_multigpu.training.steps.partitioned_step import local_step
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.traced_step import TracedStep

# By default TensorFlow would give XLA dynamic shapes.
STATIC = tf.distribute.RunOptions(experimental_enable_dynamic_batch_size=False)


class TPUs(Elsewhere):
    """The cores of TPUs, which train on copies of the model's values."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy, "TPUs", strategy.num_replicas_in_sync, updated_there=True)

    def make_runner(self, request: StepRequest) -> "TPUStep":
        if request.probes:
            raise self.refusal(PROBES, "Leave out the callback")
        if request.pieces > 1:
            raise self.refusal("`micro_batches`", "Leave it out, and take smaller batches")
        leaves = present_leaves(request.spec)
        if not all(isinstance(leaf, tf.TensorSpec) and leaf.dtype != tf.string for leaf in leaves):
            raise self.refusal(
                "inputs that are not dense numbers", "Make them dense numbers in the dataset"
            )
        return TPUStep(request, self)

    def on_each(self, values: Sequence[Any]) -> Any:
        return self.strategy.experimental_distribute_values_from_function(
            lambda core: values[core.replica_id_in_sync_group]
        )

    def run(self, function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
        """Run a function on all cores; the first core's results, on the host."""
        found = self.strategy.run(function, tuple(arguments), options=STATIC)
        with tf.device(HOST):
            return tf.nest.map_structure(
                lambda each: tf.identity(self.strategy.experimental_local_results(each)[0]), found
            )

    def sum(self, tensor: tf.Tensor) -> tf.Tensor:
        """The sum of a tensor over all cores, each of which calls this."""
        context = tf.distribute.get_replica_context()
        # `tpu.cross_replica_sum` takes no 64-bit integers.
        sent = tf.cast(tensor, tf.int32 if tensor.dtype == tf.int64 else tensor.dtype)
        return tf.cast(context.all_reduce(tf.distribute.ReduceOp.SUM, sent), tensor.dtype)


class TPUStep(Runner):
    """A training step on TPUs, with equal shares on as many cores as the batch size allows.

    The other cores repeat the first one's share, and count for nothing. Padding the shares instead
    would put made-up rows into the moments of BatchNormalization.

    It is split for each batch size when that comes.
    """

    def __init__(self, request: StepRequest, tpus: TPUs) -> None:
        self._request, self._tpus = request, tpus
        self._traced = TracedStep(request)
        self._stored = tpus.copies([copies[0] for copies in self._traced.copies])
        self._function = tf.function(self._on_cores, autograph=False)

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Train on one batch; the new values stay on the TPUs until the host needs them."""
        cores, (whole,) = self._tpus.workers, shares
        size = int(whole.global_batch_size)
        divisors = [each for each in range(1, cores + 1) if size % each == 0]
        count = 1 if self.unsplit_because else max(divisors)
        if count < min(size, cores) and not self.unsplit_because:
            self._request.warn(
                f"A batch of {size} examples divides evenly over {count} of {cores} TPU cores: "
                f"each of these takes {size // count} examples.",
                key="TPU cores",
            )
        rows = shares_of(whole.data, count)
        rows += rows[:1] * (cores - count)
        self._tpus.copy_there()
        numbers = [tf.constant(number) for number in range(cores)]
        arguments = map(self._tpus.on_each, [numbers, *zip(*rows, strict=True)])
        try:
            return self._traced.with_structure(self._function(count, size, *arguments))
        except CannotSplit as reason:
            if count == 1:
                raise self._tpus.refusal(f"this step ({reason})", "Change that") from reason
            self.unsplit_because = reason
            self._request.warn_of_one_replica(reason)
            return self(shares)

    def _on_cores(self, count: int, size: int, *arguments: Any) -> list[Any]:
        """Run a step on all cores, `count` of which have examples, and return its results."""

        def on_core(number: tf.Tensor, *leaves: tf.Tensor) -> list[Any]:
            counts = number < count
            inputs = PartInputs(self._request.spec, shared=count > 1)
            exchange = OfCores(self._tpus, count, counts)
            step = local_step(self._traced, inputs, exchange)
            place = tf.where(counts, number, 0)
            own = size // count
            numbers = [[tf.constant(own), place * own, tf.constant(size)]]
            values = [copy.read_value() for copy in self._stored]
            outcome = step(place, numbers, leaves, values, whole_results=True)
            for place, new in outcome.assigned.items():
                # Each core assigns its own copy, because these have no `aggregation`.
                self._stored[place].assign(new)
            return outcome.outputs

        return self._tpus.run(on_core, arguments)


class OfCores:
    """Exchanges between the cores that have examples.

    Args:
        replicas: How many cores have examples.
        counts: Whether this core is one of them.
    """

    on_cpu, has_equal_shares, compiled = False, True, True

    def __init__(self, tpus: TPUs, replicas: int, counts: tf.Tensor) -> None:
        self._tpus, self.replicas, self._counts = tpus, replicas, counts
        self.places, self.pieces = replicas, 1

    def sum(self, tensor: tf.Tensor, due: tf.Tensor | None = None) -> tf.Tensor:
        if self.replicas == 1:
            return tensor
        return self._tpus.sum(tf.where(self._counts, tensor, tf.zeros_like(tensor)))

    def gather(self, tensor: tf.Tensor, axis: ShardedAxis) -> tf.Tensor:
        raise CannotSplit("TPU cores do not divide variables")

    def scatter(self, tensor: tf.Tensor, axis: ShardedAxis) -> tf.Tensor:
        raise CannotSplit("TPU cores do not divide variables")
