"""`ReplicaValues`: a step's loss as if the examples of one replica were all.

A replica has its summand of a loss, which is a mean over all examples. The arithmetic between the
predictions and the loss uses their number: it divides by it, or by sums of masks and weights. It is
done once more with the replica's numbers; the predictions stay as they are.
"""

from collections.abc import Collection

import tensorflow as tf

from keras_multigpu.partition.conversions import Value
from keras_multigpu.partition.families import ELEMENTWISE
from keras_multigpu.partition.layouts import PARTIAL, REPLICATED, Rows
from keras_multigpu.partition.planner import is_known
from keras_multigpu.partition.replica import Replica
from keras_multigpu.partition.sizes import Size
from keras_multigpu.partition.splitter import Splitter

RESHAPING = {"ExpandDims", "Reshape", "Squeeze"}
# The operations that are computed again. If any other one is applied to a sum over examples, the
# loss is more than a sum over them.
ARITHMETIC = {
    "Add",
    "AddN",
    "AddV2",
    "Cast",
    "ConcatV2",
    "DivNoNan",
    "Identity",
    "Mean",
    "Mul",
    "Neg",
    "Pack",
    "RealDiv",
    "StopGradient",
    "Sub",
    "Sum",
    *RESHAPING,
}
# More operations than there are between predictions and a loss.
MAX_DEPTH = 200


class NoReplicaLoss(Exception):
    """The loss relates examples of several replicas."""


class ReplicaValues:
    """Computes what a step yields as if the examples of one replica were all.

    Args:
        examples: How many examples the replica has, in all pieces of its share.
        splitter: What added the replica's part of the step.
        batch: The name of the batch.
        given: The names of the tensors that the loss is computed from, which stay as they are; None
            if all rows stay.
    """

    def __init__(
        self, splitter: Splitter, examples: tf.Tensor, batch: str, given: Collection[str] | None
    ) -> None:
        replica = splitter.replica
        self._splitter, self._batch, self._given = splitter, batch, given
        self._replica = Replica(
            replica.index,
            {batch: examples},
            {batch: tf.zeros_like(examples)},
            {**replica.sizes, batch: examples},
            replica.batches,
            replica.compiled,
        )
        whole, own = replica.scalar(replica.batches[batch]), examples
        self._to_mean = tf.math.divide_no_nan(tf.cast(whole, tf.float64), tf.cast(own, tf.float64))
        self._known: dict[int, tuple[tf.Tensor, bool]] = {}

    def __call__(self, value: Value) -> tf.Tensor:
        """The value; raises `NoReplicaLoss` if it is more than a sum over examples."""
        if len(self._splitter.replica.own) > 1:
            # A replica has another part of each batch.
            raise NoReplicaLoss
        return self._own(value, 0)[0]

    def or_whole(self, value: Value) -> tf.Tensor:
        """The value, or that of all examples if a replica's own have none."""
        try:
            return self(value)
        except NoReplicaLoss:
            return self._splitter.convert(value, REPLICATED)

    def _own(self, value: Value, depth: int) -> tuple[tf.Tensor, bool]:
        """The value, and whether it differs from that of the step."""
        if id(value) not in self._known:
            self._known[id(value)] = self._computed(value, depth)
        return self._known[id(value)]

    def _computed(self, value: Value, depth: int) -> tuple[tf.Tensor, bool]:
        source = value.source
        if source is None or value.scope is None or not value.made_of or depth > MAX_DEPTH:
            if value.layout != PARTIAL:
                return value.local, False
            return self._splitter.exchange.sum_over_pieces(value.local), True
        sizes = value.scope.facts.value(source)
        if sizes is not None and is_known(sizes):
            names = {n for size in sizes.ravel() if isinstance(size, Size) for n in size.names}
            of_own = self._replica.tensor_of(sizes, source.dtype)
            return of_own, self._batch in names
        if isinstance(value.layout, Rows):
            return self._of_rows(value, source.op.type, depth)
        if value.layout == PARTIAL:
            return self._sum(value, source.op.type, depth), True
        return self._whole(value, source.op.type, depth)

    def _of_rows(self, value: Value, kind: str, depth: int) -> tuple[tf.Tensor, bool]:
        """Rows, which may be divided by a sum over examples."""
        assert value.source is not None
        stays = self._given is None or value.source.name in self._given
        if stays or kind not in ELEMENTWISE | RESHAPING:
            return value.local, False
        made_of = value.made_of[:1] if kind in RESHAPING else value.made_of
        inputs = [self._own(each, depth + 1) for each in made_of]
        if not any(is_other for _, is_other in inputs):
            return value.local, False
        if kind in RESHAPING:
            return tf.reshape(inputs[0][0], tf.shape(value.local)), True
        return self._splitter.again(value, [own for own, _ in inputs], whole=True), True

    def _sum(self, value: Value, kind: str, depth: int) -> tf.Tensor:
        """A sum over the examples of all pieces: of rows, or of other sums."""
        inputs = [self._own(each, depth + 1) for each in value.made_of]
        tensors = [own for own, _ in inputs]
        if any(each.layout == PARTIAL for each in value.made_of):
            return self._splitter.again(value, tensors, whole=True)
        other = any(is_other for _, is_other in inputs)
        part = self._splitter.again(value, tensors, whole=False) if other else value.local
        own = self._splitter.exchange.sum_over_pieces(part)
        # A replica has its summand of the mean over all.
        return own * tf.cast(self._to_mean, own.dtype) if kind == "Mean" else own

    def _whole(self, value: Value, kind: str, depth: int) -> tuple[tf.Tensor, bool]:
        """What all replicas have, including results of sums over all examples."""
        if any(isinstance(each.layout, Rows) for each in value.made_of):
            raise NoReplicaLoss
        inputs = [self._own(each, depth + 1) for each in value.made_of]
        if not any(is_other for _, is_other in inputs):
            return value.local, False
        if kind not in ARITHMETIC:
            raise NoReplicaLoss
        return self._splitter.again(value, [own for own, _ in inputs], whole=True), True
