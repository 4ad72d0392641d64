"""The two passes over one replica's rows, as pure functions.

A pass takes values and rows and returns tensors. What has to be summed over replicas is
packed, so that few all-reduces carry gradients, losses and moving statistics together. What is
known of the outcome while a pass is traced comes beside it, see `layout`.
"""

import contextlib
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any
from typing import NamedTuple

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.training.exchange.packing import Packing
from keras_multigpu.training.exchange.packing import SumAll
from keras_multigpu.training.exchange.sparse_gradients import add_all
from keras_multigpu.training.exchange.sparse_gradients import added_up
from keras_multigpu.training.exchange.sparse_gradients import square_norm_of_all
from keras_multigpu.training.exchange.sparse_gradients import zero_unless
from keras_multigpu.training.replica_pass import moving_statistics
from keras_multigpu.training.replica_pass.additive_metrics import NO_METRICS
from keras_multigpu.training.replica_pass.additive_metrics import Additive
from keras_multigpu.training.replica_pass.additive_metrics import AdditiveMetrics
from keras_multigpu.training.replica_pass.layout import GradientKinds
from keras_multigpu.training.replica_pass.layout import Layout
from keras_multigpu.training.replica_pass.layout import Summands
from keras_multigpu.training.replica_pass.layout import connected
from keras_multigpu.training.replica_pass.layout import packed
from keras_multigpu.training.replica_pass.loss_reduction import LossShares
from keras_multigpu.training.replica_pass.output_rows import Counts
from keras_multigpu.training.replica_pass.output_rows import counted
from keras_multigpu.training.replica_pass.output_rows import joined
from keras_multigpu.training.replica_pass.output_rows import may_be_odd
from keras_multigpu.training.replica_pass.output_rows import refuse_computed
from keras_multigpu.training.replica_pass.pure_model import Forward
from keras_multigpu.training.replica_pass.pure_model import PureModel
from keras_multigpu.training.replica_pass.pure_model import Values
from keras_multigpu.training.shares import Rows
from keras_multigpu.training.shares import batch_size_of
from keras_multigpu.training.shares import piece_of
from keras_multigpu.training.shares import rows_count
from keras_multigpu.training.tracing import specs_of
from keras_multigpu.training.tracing import tensors_of
from keras_multigpu.training.update.optimizer_update import updated


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


class Made(NamedTuple):
    """What a pass has made of some rows.

    Attributes:
        summands: What they add to the sums; sparse gradients after the dense ones.
        end: The values of all variables afterwards.
        predictions: The predictions and what is attached to them; None where nobody needs them.
        gradients: Whose gradients there are.
        metrics: Which metrics have summands.
        reductions: The reduction of each compiled loss.
    """

    summands: Summands
    end: Values
    predictions: tuple[Any, list[Any]]
    gradients: GradientKinds
    metrics: Additive
    reductions: list[str] = []


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
        self._sent_as = model.replication.group.sent_as
        self._counts: Counts | None = None

    def outcome(
        self, made: Made, start: Values, share: Rows, replica: Any
    ) -> tuple[Outcome, Layout]:
        """Pack one replica's results; a replica without examples adds nothing."""
        count = len(made.gradients.dense)
        slices = made.summands.gradients[count:]
        changed, others = self._contributions(start, made.end, share, replica)
        summands = made.summands._replace(others=others, gradients=made.summands.gradients[:count])
        packing, sizes, packs = packed(summands, made.gradients.yielded, self._sent_as)
        packs = [zero_unless(share.examples > 0, pack) for pack in packs]
        seeds = self.seeds_of(self.pure.unseeded(made.end, replica))
        outcome = Outcome(packs, slices, *seeds, *made.predictions)
        layout = Layout(packing, sizes, made.gradients, changed, made.metrics, made.reductions)
        return outcome, layout

    def seen(
        self, share: Rows, y_pred: Any
    ) -> tuple[list[tf.Tensor], Additive, tuple[Any, list[Any]]]:
        """What some rows add to which metrics, and their predictions where these are needed."""
        if self.metrics is None:
            return [], NO_METRICS, with_attached(y_pred)
        leaves, size = keras.tree.flatten(y_pred), batch_size_of(share.data)
        size = size if isinstance(size, int) else None
        counts = self.counts_of(specs_of(share.x), leaves, size) if self._in_parts else []
        # What is the same for all rows would be counted with each part of them.
        in_common = any(
            count == 0 and leaf is not None for count, leaf in zip(counts, leaves, strict=False)
        )
        summands, additive = self.metrics.of_rows(share, y_pred, in_common)
        # Where shapes leave doubts, somebody has to look at the predictions.
        keeps = self._keeps or additive.gathered or may_be_odd(leaves, size)
        return summands, additive, with_attached(y_pred) if keeps else (None, [])

    def counts_of(self, x: Any, leaves: list[Any], rows: int | None) -> Counts:
        """How many rows each output has for an example, found once; see `counted`."""
        if self.pure.in_order and not may_be_odd(leaves, rows):
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
        total: SumAll,
    ) -> Values:
        """The values that all replicas have after their passes, with the seeds of one device.

        Args:
            start: The replica's values before its pass.
            end: Those after it.
            share: Its rows of the batch.
            replica: Its index.
            total: Sums tensors over replicas.
        """
        changed, own = self._contributions(start, end, share, replica)
        packing = Packing(own)
        packs = [zero_unless(share.examples > 0, pack) for pack in packing.pack(own)]
        packs = packing.summed(packs, total)
        common = self.pure.unseeded(end, replica)
        others = list(common.others)
        for index, value in zip(changed, packing.unpack(packs), strict=True):
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
    ) -> tuple[list[int], list[tf.Tensor]]:
        """Which variables its pass has changed, and what the replica adds to them."""
        changed = self.changed_by(start, end)
        return changed, [
            moving_statistics.contribution(
                self.pure.others[index],
                start.others[index],
                end.others[index],
                share.fraction,
                replica,
            )
            for index in changed
        ]

    def seeds_of(self, values: Values) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The states of seed generators among the values, and that of Keras's global one."""
        return [values.others[index] for index in self.seed_indices], values.global_seed

    @property
    def seed_indices(self) -> list[int]:
        """Where the seeds stand among the other variables."""
        return [i for i, variable in enumerate(self.pure.others) if self.pure.is_seed(variable)]


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

    def run(
        self, values: Values, share: Rows, replica: Any, divisors: Any, loss_scale: Any
    ) -> tuple[Outcome, Layout]:
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
            made = self._piece(start, share, divisors, loss_scale)
        else:
            made = self._pieces(start, share, divisors, loss_scale, norms)
        outcome, layout = self.outcome(made, start, share, replica)
        return outcome._replace(pieces=norms), layout

    def count(self, values: Values, share: Rows, replica: Any) -> list[tf.Tensor]:
        """This replica's summands of the divisors of masked and weighted losses."""
        values = self.pure.seeded(values, replica)
        with self.pure.scope(values, share.fraction, again=True) as scope, self.context(share):
            forward = self.pure.forward(share.x, True, scope)
            shares = LossShares(self.model, share.fraction, counting=True)
            shares.total(share.data, forward.y_pred)
        present = tf.cast(share.examples > 0, tf.float32)
        return [divisor * present for divisor in shares.local_divisors]

    def _piece(self, values: Values, share: Rows, divisors: Any, loss_scale: Any) -> Made:
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values.trainable)
            again = self._micro_batches > 1
            with self.pure.scope(values, share.fraction, again) as scope, self.context(share):
                forward = self.pure.forward(share.x, True, scope)
                losses, reductions = self._losses(forward, share, divisors)
                end = self.pure.new_values(scope, values)
            scaled = losses[0] * loss_scale
        gradients, kinds = connected(tape.gradient(scaled, values.trainable), self.pure.trainable)
        metrics, additive, predictions = self.seen(share, forward.y_pred)
        summands = Summands(losses, [], metrics, gradients)
        return Made(summands, end, predictions, kinds, additive, reductions)

    def _losses(
        self, forward: Any, share: Rows, divisors: Any
    ) -> tuple[list[tf.Tensor], list[str]]:
        """The loss and the single ones of which it is made, and their reductions."""
        terms = [
            *forward.added_losses,
            *(value * share.fraction for value in forward.regularization),
        ]
        shares: list[tf.Tensor] = []
        reductions: list[str] = []
        if keras_internals.compile_loss(self.model) is not None:
            compiled = LossShares(self.model, share.fraction, divisors)
            terms.append(compiled.total(share.data, forward.y_pred))
            shares, reductions = compiled.shares, compiled.reductions
        if not terms:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        return [tf.add_n(terms), *shares], reductions

    def _pieces(
        self, values: Values, share: Rows, divisors: Any, loss_scale: Any, norms: list[tf.Tensor]
    ) -> Made:
        """Take the rows piece by piece; each waits for the one before, to save memory."""
        size = rows_count(share)
        total, predictions, counts = Summands(), [], []
        for index in range(self._micro_batches):
            with tf.control_dependencies(total.losses):
                piece, taken = piece_of(share, size, index, self._micro_batches)
                made = self._piece(values, piece, divisors, loss_scale)
                present = piece.examples > 0
                more = Summands(
                    *([zero_unless(present, t) for t in part] for part in made.summands)
                )
                values = keep_if(present, made.end, values, self.seed_indices)
            if self._measures_pieces:
                norms.append(piece_norm(piece, more.gradients))
            total = Summands(*map(add_all, total, more)) if index else more
            predictions.append(made.predictions)
            counts.append(taken)
        together = self._one_after_another(share.x, predictions, counts)
        return made._replace(summands=total, end=values, predictions=together)

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
        layout: Layout,
        values: Values,
        optimizer_values: Sequence[tf.Tensor],
        packs: Sequence[tf.Tensor],
        slices: Sequence[tf.IndexedSlices],
    ) -> Update:
        """The new values of all variables of a replica, from the sums over replicas."""
        sums, kinds = layout.sums(packs), layout.gradients
        gradients: list[Any] = [None] * len(values.trainable)
        known = [*sums.gradients, *slices]
        for index, gradient in zip(kinds.dense + kinds.sparse, known, strict=True):
            gradients[index] = added_up(gradient) if index in kinds.distinct else gradient
        new = [*values.trainable, *optimizer_values]
        if known:
            new = updated(self.model.optimizer, self.pure.trainable, new, gradients)
        return complete(new[: len(gradients)], new[len(gradients) :], layout, values, sums)


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

    def run(self, values: Values, share: Rows, replica: Any) -> tuple[Outcome, Layout]:
        """The pass itself; see `TrainingPass.run`."""
        start = self.pure.seeded(values, replica)
        with self.pure.scope(start, share.fraction) as scope:
            forward = self.pure.forward(share.x, False, scope)
            losses = self._losses(forward, share) if self._has_loss else forward.added_losses
            end = self.pure.new_values(scope, start)
        metrics, additive, predictions = self.seen(share, forward.y_pred)
        summands = Summands(losses, [], metrics)
        made = Made(summands, end, predictions, GradientKinds(), additive)
        return self.outcome(made, start, share, replica)

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

    def update(self, layout: Layout, values: Values, packs: Sequence[tf.Tensor]) -> Update:
        """The new values of variables that inference changes, and the sums."""
        sums = layout.sums(packs)
        if self._has_loss:
            sums = sums._replace(losses=self._divided(*sums.losses))
        return complete([], [], layout, values, sums)


def complete(
    trainable: list[tf.Tensor],
    optimizer: list[tf.Tensor],
    layout: Layout,
    values: Values,
    sums: Summands,
) -> Update:
    """An update from its parts; the changed variables are equal on all replicas."""
    others = [
        moving_statistics.merged(values.others[index], total)
        for index, total in zip(layout.changed, sums.others, strict=True)
    ]
    with tf.control_dependencies([*trainable, *optimizer, *others, *sums.losses]):
        done = tf.zeros(())
    return Update(trainable, optimizer, others, sums.losses, sums.metrics, done)


def with_attached(y_pred: Any) -> tuple[Any, list[Any]]:
    """Predictions, and what Keras has attached to them, which a function's result loses."""
    return y_pred, keras_internals.attached(keras.tree.flatten(y_pred))


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
