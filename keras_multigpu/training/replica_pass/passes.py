"""The two passes over one replica's rows, as pure functions.

A pass takes values and rows and returns tensors. What has to be summed over replicas is
packed, so that one all-reduce carries gradients, losses and moving statistics together.
"""

import contextlib
import itertools
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.training.exchange.packing import Packing
from keras_multigpu.training.exchange.sparse_gradients import added_up
from keras_multigpu.training.exchange.sparse_gradients import concatenated
from keras_multigpu.training.exchange.sparse_gradients import has_distinct_rows
from keras_multigpu.training.exchange.sparse_gradients import is_sparse
from keras_multigpu.training.exchange.sparse_gradients import of_table
from keras_multigpu.training.exchange.sparse_gradients import square_norm
from keras_multigpu.training.exchange.sparse_gradients import square_norm_of_all
from keras_multigpu.training.replica_pass import moving_statistics
from keras_multigpu.training.replica_pass.additive_metrics import AdditiveMetrics
from keras_multigpu.training.replica_pass.loss_reduction import LossShares
from keras_multigpu.training.replica_pass.output_rows import Counts
from keras_multigpu.training.replica_pass.output_rows import counted
from keras_multigpu.training.replica_pass.output_rows import joined
from keras_multigpu.training.replica_pass.output_rows import may_be_odd
from keras_multigpu.training.replica_pass.output_rows import refuse_computed
from keras_multigpu.training.replica_pass.pure_model import Forward
from keras_multigpu.training.replica_pass.pure_model import PureModel
from keras_multigpu.training.replica_pass.pure_model import Rows
from keras_multigpu.training.replica_pass.pure_model import Values
from keras_multigpu.training.shares import batch_size_of
from keras_multigpu.training.shares import cut
from keras_multigpu.training.shares import rows
from keras_multigpu.training.tracing import specs_of
from keras_multigpu.training.tracing import tensors_of
from keras_multigpu.training.update.optimizer_update import updated


class Summands(NamedTuple):
    """What one replica adds to the sums over replicas."""

    gradients: list[Any]
    losses: list[tf.Tensor]
    others: list[tf.Tensor]
    metrics: list[tf.Tensor]


class Outcome(NamedTuple):
    """What a pass over a replica's rows returns: summands packed, sparse ones apart.

    There are predictions only where something outside of the pass needs them.
    """

    packs: list[tf.Tensor]
    slices: list[tf.IndexedSlices]
    seeds: list[tf.Tensor]
    global_seed: tf.Tensor
    y_pred: Any
    attached: list[Any]
    pieces: list[tf.Tensor] = []


class Update(NamedTuple):
    """New values of a replica's variables, and the sums that are for all.

    `done` exists once all the others do.
    """

    trainable: list[tf.Tensor]
    optimizer: list[tf.Tensor]
    others: list[tf.Tensor]
    losses: list[tf.Tensor]
    metrics: list[tf.Tensor]
    done: tf.Tensor


class ReplicaPass:
    """What both passes share: summands in, packs out, and back again.

    Args:
        model: The model, built.
        metrics: The metrics that replicas update; None in prediction.
        keeps: Whether predictions are needed outside of the pass, whatever the metrics need.
    """

    def __init__(
        self,
        model: keras.Model,
        metrics: AdditiveMetrics | None,
        keeps: bool,
    ) -> None:
        self.pure = PureModel(model)
        self.model = model
        self.metrics = metrics
        self._keeps = keeps or metrics is None or model.run_eagerly
        self._in_parts = model.replication.group.count > 1
        self._counts: Counts | None = None
        self._packing = Packing([])
        self._sizes: list[int] = []
        self._contributed: list[int] = []
        self.changed_indices: list[int] = []

    def outcome(
        self,
        summands: Summands,
        start: Values,
        end: Values,
        share: Rows,
        replica: Any,
        predictions: Any,
    ) -> Outcome:
        """Pack one replica's results; a replica without examples adds nothing."""
        slices = [gradient for gradient in summands.gradients if is_sparse(gradient)]
        dense = summands.gradients[: len(summands.gradients) - len(slices)]
        others = self._contributions(start, end, share, replica)
        summands = summands._replace(gradients=dense, others=others)
        flat = [tensor for part in summands for tensor in part]
        self._sizes = [len(part) for part in summands]
        self._packing = Packing(flat)
        packs = [zero_unless(share.examples > 0, pack) for pack in self._packing.pack(flat)]
        return Outcome(
            packs, slices, *self.seeds_of(self.pure.unseeded(end, replica)), *predictions
        )

    def seen(self, share: Rows, y_pred: Any) -> tuple[list[tf.Tensor], tuple[Any, list[Any]]]:
        """What some rows add to the metrics, and their predictions where these are needed."""
        leaves, size = keras.tree.flatten(y_pred), batch_size_of(share.data)
        size = size if isinstance(size, int) else None
        summands: list[tf.Tensor] = []
        if self.metrics is not None:
            counts = self.counts_of(specs_of(share.x), leaves, size) if self._in_parts else []
            # What is the same for all rows would be counted with each part of them.
            if any(
                count == 0 and leaf is not None for count, leaf in zip(counts, leaves, strict=False)
            ):
                self.metrics.see_whole()
            summands = self.metrics.of_rows(share, y_pred)
            # Where shapes leave doubts, somebody has to look at the predictions.
            self._keeps |= self.metrics.gathered or may_be_odd(leaves, size)
        return summands, with_attached(y_pred) if self._keeps else (None, [])

    def counts_of(self, x: Any, leaves: list[Any], rows: int | None) -> Counts:
        """How many rows each output has for an example, found once; see `counted`."""
        if not may_be_odd(leaves, rows):
            return [1] * len(leaves)
        if self._counts is None:
            self._counts = counted(self.model, x, leaves, rows)
        return self._counts

    def agreed(
        self,
        start: Values,
        end: Values,
        share: Rows,
        replica: Any,
        total: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> Values:
        """The values that all replicas have after their passes, with the seeds of one device.

        Args:
            start: The replica's values before its pass.
            end: Those after it.
            share: Its rows of the batch.
            replica: Its index.
            total: Sums tensors over replicas.
        """
        own = self._contributions(start, end, share, replica)
        packing = Packing(own)
        packs = [zero_unless(share.examples > 0, pack) for pack in packing.pack(own)]
        common = self.pure.unseeded(end, replica)
        others = list(common.others)
        for index, value in zip(self._contributed, packing.unpack(total(packs)), strict=True):
            others[index] = moving_statistics.merged(start.others[index], value)
        return common._replace(others=others)

    def changed_by(self, start: Values, end: Values) -> list[int]:
        """Where the variables stand that have other values than before; seeds excluded."""
        return [
            index
            for index, (old, new) in enumerate(zip(start.others, end.others, strict=True))
            if new is not old and not self.pure.is_seed(self.pure.others[index])
        ]

    def _contributions(
        self, start: Values, end: Values, share: Rows, replica: Any
    ) -> list[tf.Tensor]:
        """What the replica adds to variables that its pass has changed; remembers which."""
        self._contributed = self.changed_indices = self.changed_by(start, end)
        return [
            moving_statistics.contribution(
                self.pure.others[index],
                start.others[index],
                end.others[index],
                share.fraction,
                replica,
            )
            for index in self._contributed
        ]

    def seeds_of(self, values: Values) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The states of seed generators among the values, and that of Keras's global one."""
        return [values.others[index] for index in self.seed_indices], values.global_seed

    @property
    def seed_indices(self) -> list[int]:
        """Where the seeds stand among the other variables."""
        return [i for i, variable in enumerate(self.pure.others) if self.pure.is_seed(variable)]

    def sums(self, packs: Sequence[tf.Tensor]) -> Summands:
        """The summed packs, taken apart."""
        flat = iter(self._packing.unpack(packs))
        return Summands(*(list(itertools.islice(flat, size)) for size in self._sizes))

    def first_loss(self, packs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The first of `sums(packs).losses`, by itself."""
        return self._packing.one(packs, self._sizes[0])

    def square_norm(
        self, packs: Sequence[tf.Tensor], slices: Sequence[tf.IndexedSlices]
    ) -> tf.Tensor:
        """The sum of the squares of all gradients, from packs and sparse gradients."""
        dense = self._packing.beginnings(packs, self._sizes[0])
        squares = [2.0 * tf.nn.l2_loss(tf.cast(part, tf.float32)) for part in dense]
        return tf.add_n([tf.zeros(()), *squares, *map(square_norm, slices)])

    def merged_others(self, values: Values, sums: Summands) -> list[tf.Tensor]:
        """The new values of the changed variables, equal on all replicas."""
        return [
            moving_statistics.merged(values.others[index], total)
            for index, total in zip(self._contributed, sums.others, strict=True)
        ]


class TrainingPass(ReplicaPass):
    """Forward and backward pass over a replica's rows, in pieces if asked.

    Args:
        model: The compiled model.
        metrics: See `ReplicaPass`.
        keeps: See `ReplicaPass`.
        micro_batches: In how many pieces the rows are taken.
        context: Makes a context for the forward pass over some rows.
        measures_pieces: Whether to note the square norm of each piece's gradient.
    """

    def __init__(
        self,
        model: keras.Model,
        metrics: AdditiveMetrics,
        keeps: bool = True,
        micro_batches: int = 1,
        context: Callable[[Rows], contextlib.AbstractContextManager[None]] | None = None,
        measures_pieces: bool = False,
    ) -> None:
        super().__init__(model, metrics, keeps)
        self._in_parts |= micro_batches > 1
        self._measures_pieces = measures_pieces
        self._micro_batches = micro_batches
        self.context = context or (lambda rows: contextlib.nullcontext())
        self._dense: list[int] = []
        self._sparse: list[int] = []
        self.reductions: list[str] = []

    def run(
        self, values: Values, share: Rows, replica: Any, divisors: Any, loss_scale: Any
    ) -> Outcome:
        """The pass itself.

        Args:
            values: The values of the replica's variables.
            share: Its rows of the batch.
            replica: Its index.
            divisors: See `LossShares`.
            loss_scale: A factor for the loss whose gradient is taken.
        """
        start = self.pure.seeded(values, replica)
        norms: list[tf.Tensor] = []
        if self._micro_batches == 1:
            summands, end, predictions = self._piece(start, share, divisors, loss_scale)
        else:
            summands, end, predictions = self._pieces(start, share, divisors, loss_scale, norms)
        outcome = self.outcome(summands, start, end, share, replica, predictions)
        return outcome._replace(pieces=norms)

    def count(self, values: Values, share: Rows, replica: Any) -> list[tf.Tensor]:
        """This replica's summands of the divisors of masked and weighted losses."""
        values = self.pure.seeded(values, replica)
        with self.pure.scope(values, share.fraction, again=True) as scope, self.context(share):
            forward = self.pure.forward(share.x, True, scope)
            shares = LossShares(self.model, share.fraction, counting=True)
            shares.total(share.data, forward.y_pred)
        present = tf.cast(share.examples > 0, tf.float32)
        return [divisor * present for divisor in shares.local_divisors]

    def _piece(
        self, values: Values, share: Rows, divisors: Any, loss_scale: Any
    ) -> tuple[Summands, Values, Any]:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values.trainable)
            again = self._micro_batches > 1
            with self.pure.scope(values, share.fraction, again) as scope, self.context(share):
                forward = self.pure.forward(share.x, True, scope)
                loss, shares = self._loss(forward, share, divisors)
                end = self.pure.new_values(scope, values)
            scaled = loss * loss_scale
        gradients = self.connected(tape.gradient(scaled, values.trainable))
        metrics, predictions = self.seen(share, forward.y_pred)
        return Summands(gradients, [loss, *shares], [], metrics), end, predictions

    @property
    def with_gradients(self) -> list[keras.Variable]:
        """The variables that have a gradient, in the order of the gradients."""
        return [self.pure.trainable[index] for index in self._dense + self._sparse]

    def connected(self, gradients: Sequence[Any]) -> list[Any]:
        """The gradients that exist, dense ones first; remembers whose they are."""
        known = [i for i, gradient in enumerate(gradients) if gradient is not None]
        self._sparse = [i for i in known if is_sparse(gradients[i])]
        self._dense = [i for i in known if i not in self._sparse]
        self._distinct = {i for i in self._sparse if has_distinct_rows(gradients[i])}
        return [
            *(tf.reshape(gradients[i], self.pure.trainable[i].shape) for i in self._dense),
            *(of_table(gradients[i], self.pure.trainable[i]) for i in self._sparse),
        ]

    def _loss(self, forward: Any, share: Rows, divisors: Any) -> tuple[tf.Tensor, list[tf.Tensor]]:
        terms = [
            *forward.added_losses,
            *(value * share.fraction for value in forward.regularization),
        ]
        shares: list[tf.Tensor] = []
        if keras_internals.compile_loss(self.model) is not None:
            compiled = LossShares(self.model, share.fraction, divisors)
            terms.append(compiled.total(share.data, forward.y_pred))
            shares, self.reductions = compiled.shares, compiled.reductions
        if not terms:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        return tf.add_n(terms), shares

    def _pieces(
        self, values: Values, share: Rows, divisors: Any, loss_scale: Any, norms: list[tf.Tensor]
    ) -> tuple[Summands, Values, Any]:
        """Take the rows piece by piece; each waits for the one before, to save memory."""
        size = rows_count(share)
        total, predictions, counts = Summands([], [], [], []), [], []
        for index in range(self._micro_batches):
            with tf.control_dependencies(total.losses):
                piece, taken = piece_of(share, size, index, self._micro_batches)
                more, end, predicted = self._piece(values, piece, divisors, loss_scale)
                present = piece.examples > 0
                more = Summands(*([zero_unless(present, t) for t in part] for part in more))
                values = keep_if(present, end, values, self.seed_indices)
            if self._measures_pieces:
                norms.append(piece_norm(piece, more.gradients))
            total = Summands(*map(add_all, total, more)) if index else more
            predictions.append(predicted)
            counts.append(taken)
        return total, values, self._one_after_another(share.x, predictions, counts)

    def _one_after_another(
        self, x: Any, predictions: Sequence[tuple[Any, list[Any]]], taken: Sequence[Any]
    ) -> tuple[Any, list[Any]]:
        """The predictions for all pieces, and what is attached to them.

        Args:
            x: The inputs of all of them.
            predictions: Those for each piece.
            taken: How many examples each has.
        """
        if predictions[0][0] is None:
            return predictions[0]
        parts = [keras.tree.flatten(y_pred) for y_pred, _ in predictions]
        eager = tf.executing_eagerly()
        first = int(taken[0]) if eager or isinstance(taken[0], int) else None
        counts = self.counts_of(specs_of(x), parts[0], first)
        outputs = None if eager else parts[0]
        refuse_computed(counts, parts, outputs, tensors_of(x))
        y_pred = keras.tree.pack_sequence_as(predictions[0][0], joined(parts, taken, counts))
        of_attached = [count for count in counts for _ in range(2)]
        return y_pred, joined([attached for _, attached in predictions], taken, of_attached)

    def update(
        self,
        values: Values,
        optimizer_values: Sequence[tf.Tensor],
        packs: Sequence[tf.Tensor],
        slices: Sequence[tf.IndexedSlices],
    ) -> Update:
        """The new values of all variables of a replica, from the sums over replicas."""
        sums = self.sums(packs)
        gradients: list[Any] = [None] * len(values.trainable)
        known = [*sums.gradients, *slices]
        for index, gradient in zip(self._dense + self._sparse, known, strict=True):
            gradients[index] = added_up(gradient) if index in self._distinct else gradient
        new = [*values.trainable, *optimizer_values]
        if known:
            new = updated(self.model.optimizer, self.pure.trainable, new, gradients)
        return complete(new[: len(gradients)], new[len(gradients) :], self, values, sums)


class EvaluationPass(ReplicaPass):
    """Forward pass over a replica's rows in inference mode.

    Args:
        model: The model.
        metrics: See `ReplicaPass`.
        has_loss: Whether to compute the loss, too.
    """

    def __init__(
        self,
        model: keras.Model,
        metrics: AdditiveMetrics | None = None,
        has_loss: bool = False,
    ) -> None:
        super().__init__(model, metrics, keeps=not has_loss)
        self._has_loss = has_loss

    def run(self, values: Values, share: Rows, replica: Any) -> Outcome:
        """The pass itself; see `TrainingPass.run`."""
        start = self.pure.seeded(values, replica)
        with self.pure.scope(start, share.fraction) as scope:
            forward = self.pure.forward(share.x, False, scope)
            losses = self._losses(forward, share) if self._has_loss else forward.added_losses
            end = self.pure.new_values(scope, start)
        metrics, predictions = self.seen(share, forward.y_pred)
        summands = Summands([], losses, [], metrics)
        return self.outcome(summands, start, end, share, replica, predictions)

    def _losses(self, forward: Forward, share: Rows) -> list[tf.Tensor]:
        """What is added to the compiled losses, these, and what to divide each of them by."""
        penalties = [value * share.fraction for value in forward.regularization]
        added = tf.add_n([tf.zeros(()), *forward.added_losses, *penalties])
        if keras_internals.compile_loss(self.model) is None:
            return [added]
        compiled = LossShares(self.model, share.fraction, undivided=True)
        compiled.total(share.data, forward.y_pred)
        return [added, *compiled.shares, *compiled.local_divisors]

    def _divided(self, added: tf.Tensor, *summed: tf.Tensor) -> list[tf.Tensor]:
        """The loss of the global batch and the single ones, from the sums of `_losses`."""
        count = len(summed) // 2
        losses = [
            tf.math.divide_no_nan(loss, divisor)
            for loss, divisor in zip(summed[:count], summed[count:], strict=True)
        ]
        weights = keras_internals.loss_weights(self.model) if losses else []
        terms = [
            loss if weight is None else loss * tf.cast(weight, loss.dtype)
            for loss, weight in zip(losses, weights, strict=True)
        ]
        return [tf.add_n([added, *terms]), *losses]

    def update(self, values: Values, packs: Sequence[tf.Tensor]) -> Update:
        """The new values of variables that inference changes, and the sums."""
        sums = self.sums(packs)
        if self._has_loss:
            sums = sums._replace(losses=self._divided(*sums.losses))
        return complete([], [], self, values, sums)


def complete(
    trainable: list[tf.Tensor],
    optimizer: list[tf.Tensor],
    replica_pass: ReplicaPass,
    values: Values,
    sums: Summands,
) -> Update:
    """An update from its parts."""
    others = replica_pass.merged_others(values, sums)
    with tf.control_dependencies([*trainable, *optimizer, *others, *sums.losses]):
        done = tf.zeros(())
    return Update(trainable, optimizer, others, sums.losses, sums.metrics, done)


def rows_count(share: Rows) -> Any:
    """The number of rows at hand, the borrowed one included."""
    leaf = next(leaf for leaf in keras.tree.flatten(share.x) if leaf is not None)
    return leaf.shape[0] if leaf.shape[0] is not None else tf.shape(leaf)[0]


def piece_of(share: Rows, size: Any, index: int, pieces: int) -> tuple[Rows, Any]:
    """One of several pieces of a replica's rows, and how many rows it really has."""
    start, stop = share_bounds(size, index, pieces)
    examples = (stop - start) * tf.cast(share.examples > 0, tf.int32)
    return Rows(rows(share.data, start, stop), examples, share.global_batch_size), stop - start


def piece_norm(piece: Rows, gradients: Sequence[Any]) -> tf.Tensor:
    """A piece's number of examples, and the square norm of the gradient of its mean loss."""
    square = tf.math.divide_no_nan(square_norm_of_all(gradients), tf.square(piece.fraction))
    return tf.stack([tf.cast(piece.examples, tf.float32), square])


def keep_if(condition: tf.Tensor, new: Values, old: Values, seeds: Sequence[int]) -> Values:
    """New values where the condition holds, old ones otherwise; seeds go on on every replica."""

    def choose(after: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
        return before if after is before else tf.where(condition, after, before)

    return Values(
        old.trainable,
        [
            pair[0] if index in seeds else choose(*pair)
            for index, pair in enumerate(zip(new.others, old.others, strict=True))
        ],
        new.global_seed,
    )


def with_attached(y_pred: Any) -> tuple[Any, list[Any]]:
    """Predictions, and what Keras has attached to them, which a function's result loses."""
    return y_pred, keras_internals.attached(keras.tree.flatten(y_pred))


def first_rows(tensors: Any, count: Any) -> Any:
    """The first rows of each tensor; scalars and None as they are."""
    return keras.tree.map_structure(lambda leaf: cut(leaf, 0, count), tensors)


def zero_unless(condition: tf.Tensor, tensor: Any) -> Any:
    """The tensor where the condition holds, zeros otherwise; of a sparse one, no rows."""
    if is_sparse(tensor):
        count = tf.where(condition, tf.shape(tensor.indices)[0], 0)
        return tf.IndexedSlices(tensor.values[:count], tensor.indices[:count], tensor.dense_shape)
    return tf.where(condition, tensor, tf.zeros_like(tensor))


def add_all(first: list[Any], second: list[Any]) -> list[Any]:
    """Add two lists of tensors, one by one."""
    return [
        concatenated(a, b) if is_sparse(a) else a + b for a, b in zip(first, second, strict=True)
    ]
