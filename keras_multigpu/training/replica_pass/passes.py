"""Passes over one replica's rows, as pure functions: what they share, and that of training.

A pass takes values and rows and returns tensors. What has to be summed over replicas is
packed, so that few all-reduces carry gradients, losses and moving statistics together. What is
known of the outcome while a pass is traced comes beside it, as its `Layout`: whoever reads the
outcome, or its sum over replicas, is given the layout with it; a pass itself remembers nothing.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import model_internals
from keras_multigpu.training.exchange.packing import Packing, order_of_backward
from keras_multigpu.training.exchange.sparse_gradients import (
    add_all,
    alike,
    joined_parts,
    of_table,
    rows_noted,
    square_norm,
    square_norm_of_all,
    zero_unless,
)
from keras_multigpu.training.exchange.stages import totals
from keras_multigpu.training.replica_pass.additive_metrics import (
    NO_METRICS,
    Additive,
    AdditiveMetrics,
)
from keras_multigpu.training.replica_pass.loss_reduction import (
    LossShares,
    divided,
)
from keras_multigpu.training.replica_pass.output_rows import (
    Counts,
    counted,
    joined,
    may_be_odd,
    refuse_computed,
)
from keras_multigpu.training.replica_pass.pure_model import Forward, PureModel, Values
from keras_multigpu.training.shares import (
    Batch,
    Rows,
    batch_size_of,
    piece_of,
    rows_count,
    specs_of,
    tensors_of,
    wide,
)
from keras_multigpu.training.update import state_of, updated

if TYPE_CHECKING:
    from keras_multigpu.training.replication import Replication

OfAll = Callable[[list[tf.Tensor]], list[tf.Tensor]]
"""Makes the divisors of losses, as the rows of a pass have them, those of the whole batch."""


class Summands(NamedTuple):
    """What one replica adds to the sums over replicas; gradients come last to be."""

    losses: list[tf.Tensor] = []
    others: list[tf.Tensor] = []
    metrics: list[tf.Tensor] = []
    gradients: list[Any] = []


class GradientKinds(NamedTuple):
    """Whose gradients there are, by the places of the trainable variables.

    Attributes:
        dense: Those with a dense gradient.
        sparse: Those of whose gradient there are rows.
        alike: What `alike` says of these, in their order.
        yielded: The order of the dense gradients in the backward pass.
    """

    dense: list[int] = []
    sparse: list[int] = []
    alike: tuple[int | None, ...] = ()
    yielded: list[int] = []


class Layout(NamedTuple):
    """What lies where in an outcome.

    Attributes:
        packing: Where the summands lie in the packs.
        sizes: How many summands there are of each kind.
        gradients: Whose gradients there are.
        changed: Where the variables stand that the pass has changed; seeds excluded.
        metrics: Which metrics have summands; none in prediction.
        counts: How many rows each output has for an example, where the batch is taken in parts.
    """

    packing: Packing
    sizes: list[int]
    gradients: GradientKinds
    changed: list[int]
    metrics: Additive
    counts: Counts

    def sums(self, packs: Sequence[tf.Tensor]) -> Summands:
        """The summands in packs, or the sums."""
        flat = iter(self.packing.unpack(packs))
        return Summands(*(list(itertools.islice(flat, size)) for size in self.sizes))

    def first_loss(self, packs: Sequence[tf.Tensor]) -> tf.Tensor:
        """The first of `sums(packs).losses`, by itself."""
        return self.packing.one(packs, 0)

    def square_norm(
        self, packs: Sequence[tf.Tensor], slices: Sequence[tf.IndexedSlices]
    ) -> tf.Tensor:
        """The sum of the squares of all gradients, from packs and sparse gradients."""
        dense = self.packing.endings(packs, sum(self.sizes[:-1]))
        squares = [2.0 * tf.nn.l2_loss(tf.cast(part, tf.float32)) for part in dense]
        return tf.add_n([tf.zeros(()), *squares, *map(square_norm, slices)])


def packed(
    summands: Summands, yielded: Sequence[int], sent_as: dict[tf.DType, tf.DType]
) -> tuple[Packing, list[int], list[tf.Tensor]]:
    """How summands lie in packs, how many there are of each kind, and the packs.

    Gradients come to be in the order `yielded`, and are summed in another dtype; see `sent_as`.
    """
    flat = [tensor for part in summands for tensor in part]
    first = len(flat) - len(summands.gradients)
    order = [*range(first), *(first + index for index in yielded)]
    dtypes = [
        sent_as.get(tensor.dtype, tensor.dtype) if index >= first else tensor.dtype
        for index, tensor in enumerate(flat)
    ]
    packing = Packing(flat, order, dtypes)
    return packing, [len(part) for part in summands], packing.pack(flat)


def connected(
    gradients: Sequence[Any], variables: Sequence[keras.Variable], arriving: Sequence[Any] = ()
) -> tuple[list[Any], GradientKinds]:
    """The gradients that exist, dense ones first, and whose they are.

    Where gradients were made of what the backward pass has yielded, this is `arriving`.
    """
    known = [i for i, gradient in enumerate(gradients) if gradient is not None]
    sparse = [i for i in known if isinstance(gradients[i], tf.IndexedSlices)]
    dense = [i for i in known if i not in sparse]
    first = arriving or gradients
    kinds = GradientKinds(
        dense,
        sparse,
        tuple(alike(gradients[i]) for i in sparse),
        order_of_backward([gradients[i] if first[i] is None else first[i] for i in dense]),
    )
    tensors = [
        *(tf.reshape(gradients[i], variables[i].shape) for i in dense),
        *(of_table(gradients[i], variables[i]) for i in sparse),
    ]
    return tensors, kinds


class Outcome(NamedTuple):
    """What a pass over a replica's rows returns: summands packed, sparse ones apart.

    There are predictions only where something outside of the pass needs them. `part` says how much
    of what the loss is divided by is the replica's own.
    """

    packs: list[tf.Tensor]
    slices: list[tf.IndexedSlices]
    seeds: list[tf.Tensor]
    global_seed: tf.Tensor
    y_pred: Any
    attached: list[Any]
    part: tf.Tensor
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


class Seen(NamedTuple):
    """What is found in the predictions for some rows.

    Attributes:
        summands: What they add to metrics, and to which.
        predictions: They, and what Keras has attached; None where nobody needs them.
        counts: How many rows each has for an example; see `Layout`.
    """

    summands: list[tf.Tensor]
    metrics: Additive
    predictions: tuple[Any, list[Any]]
    counts: Counts


class Made(NamedTuple):
    """What a pass has made of some rows.

    Attributes:
        summands: What they add to the sums; sparse gradients after the dense ones.
        end: The values of all variables afterwards.
        seen: What is found in the predictions.
        gradients: Whose gradients there are.
        part: See `LossShares`.
    """

    summands: Summands
    end: Values
    seen: Seen
    gradients: GradientKinds = GradientKinds()
    part: tf.Tensor | None = None


class NeedsDivisors(Exception):
    """Losses whose divisors have to be known before the pass."""


class ReplicaPass:
    """What both passes share: summands in, packs out, and back again.

    Args:
        model: The model, built.
        replication: Its replicas.
        spec: The specs of the global batches whose shares the rows are.
        metrics: The metrics that replicas update; None in prediction.
        keeps: Whether predictions are needed outside of the pass, whatever the metrics need.
        shares: How many shares a batch is cut into, of which the rows are one.
        pieces: In how many pieces the rows are taken.
        apart: Whether shares are passed over where nobody can sum in the middle of the pass.
    """

    def __init__(
        self,
        model: keras.Model,
        replication: "Replication",
        spec: Batch,
        metrics: AdditiveMetrics | None,
        keeps: bool,
        shares: int,
        pieces: int = 1,
        apart: bool = False,
    ) -> None:
        self._apart = apart
        self._several = shares > 1
        self._in_parts = self._several or pieces > 1
        self.pure = PureModel(model, replication.placement, self._in_parts)
        self.variables = self.pure.variables
        self.model = model
        self.group = replication.group
        self.spec = spec
        self.metrics = metrics
        self._keeps = keeps or metrics is None or model.run_eagerly

    def outcome(
        self, made: Made, start: Values, share: Rows, replica: Any
    ) -> tuple[Outcome, Layout]:
        """Pack one replica's results; a replica without examples adds nothing."""
        count, present = len(made.gradients.dense), share.examples > 0
        slices = made.summands.gradients[count:]
        changed, others = self.variables.contributions(start, made.end, share, replica)
        summands = made.summands._replace(others=others, gradients=made.summands.gradients[:count])
        packing, sizes, packs = packed(summands, made.gradients.yielded, self.group.sent_as)
        packs = [zero_unless(present, pack) for pack in packs]
        seeds = self.variables.seeds_in(self.variables.unseeded(made.end, replica))
        part = tf.cast(present, wide()) if made.part is None else made.part
        outcome = Outcome(packs, slices, *seeds, *made.seen.predictions, part)
        seen = made.seen
        return outcome, Layout(packing, sizes, made.gradients, changed, seen.metrics, seen.counts)

    def seen(self, share: Rows, forward: Forward) -> Seen:
        """What the rows add to which metrics, and their predictions where these are needed."""
        leaves, size = keras.tree.flatten(forward.y_pred), batch_size_of(share.data)
        size = size if isinstance(size, int) else None
        # Where shapes leave doubts, somebody has to look at the predictions.
        odd = may_be_odd(leaves, size)
        counts: Counts = [1] * len(leaves) if self._in_parts else []
        if self._in_parts and (odd or not forward.in_order):
            counts = counted(self.model, specs_of(share.x), leaves, size)
            if not tf.executing_eagerly():
                refuse_computed(counts, [leaves], leaves, tensors_of(share.data))
        if self.metrics is None:
            return Seen([], NO_METRICS, with_attached(forward.y_pred), counts)
        # What is the same for all rows would be counted with each part of them.
        in_common = any(
            count == 0 and leaf is not None for count, leaf in zip(counts, leaves, strict=False)
        )
        summands, additive = self.metrics.of_rows(share, forward.y_pred, in_common)
        keeps = self._keeps or additive.gathered or odd
        predictions = with_attached(forward.y_pred) if keeps else (None, [])
        return Seen(summands, additive, predictions, counts)

    def losses(
        self, forward: Forward, share: Rows, of_all: OfAll
    ) -> tuple[list[tf.Tensor], tf.Tensor | None]:
        """The loss and the single ones of which it is made, and `LossShares.part`."""
        fraction = share.fraction
        total, shares = divided(self.model, fraction, share.data, forward.y_pred, of_all)
        terms = [*forward.added_losses, *(value * fraction for value in forward.regularization)]
        terms += [] if total is None else [total]
        if not terms:
            raise ValueError("No loss to compute. Provide a `loss` argument in `compile()`.")
        return [tf.add_n(terms), *shares.shares], shares.part

    def of_replicas(self, share: Rows) -> OfAll:
        """Sums numbers of the rows over replicas, in the middle of the pass, if anybody can."""
        if not self._several:
            return list
        total = list if self._apart else totals
        return lambda own: total([zero_unless(share.examples > 0, each) for each in own])


class TrainingPass(ReplicaPass):
    """Forward and backward pass over a replica's rows, in pieces if asked.

    The context is that of the forward pass over some rows.
    """

    def __init__(
        self,
        model: keras.Model,
        replication: "Replication",
        spec: Batch,
        context: Callable[[Rows], contextlib.AbstractContextManager[None]] | None = None,
        apart: bool = False,
    ) -> None:
        metrics, probes = AdditiveMetrics(model, spec), replication.probes
        shares, pieces = replication.shares_of_batch, replication.pieces
        super().__init__(model, replication, spec, metrics, bool(probes), shares, pieces, apart)
        self.optimizer_variables = state_of(model.optimizer)
        self._measures_pieces = any(probe.by_piece for probe in probes)
        self._micro_batches = pieces
        self.context = context or (lambda rows: contextlib.nullcontext())

    def run(
        self, values: Values, share: Rows, replica: Any, loss_scale: Any, *divisors: tf.Tensor
    ) -> tuple[Outcome, Layout]:
        """The pass itself; of the loss times `loss_scale` the gradient is taken.

        The divisors are those of the whole batch, if there are any and they are known, see
        `divisors`.
        """
        start = self.variables.seeded(values, replica)
        # The first of several pieces needs the divisors of all; of XLA, see `_made_with_divisors`.
        ahead = self._apart or self._micro_batches > 1 or (self._several and self.model.jit_compile)
        sums = refuse_to_sum if ahead else self.of_replicas(share)

        def of_all(own: list[tf.Tensor]) -> list[tf.Tensor]:
            return list(divisors) or sums(own)

        with rows_noted(share):
            made, norms = self._made_with_divisors(start, share, loss_scale, of_all)
        outcome, layout = self.outcome(made, start, share, replica)
        return outcome._replace(pieces=norms), layout

    def _made_with_divisors(
        self, start: Values, share: Rows, loss_scale: Any, of_all: OfAll
    ) -> tuple[Made, list[tf.Tensor]]:
        try:
            return self._made(start, share, loss_scale, of_all)
        except NeedsDivisors:
            if self._apart:
                raise
            # Of the first try, and of the pass that finds the divisors, only these are left in the
            # graph. All else waits for them: XLA cannot hand the lists of a loop from what comes
            # before a sum to what comes after it.
            divisors = self._divisors(start, share)
            with tf.control_dependencies(divisors):
                return self._made(start, share, loss_scale, lambda own: divisors)

    def _made(
        self, values: Values, share: Rows, loss_scale: Any, of_all: OfAll
    ) -> tuple[Made, list[tf.Tensor]]:
        if self._micro_batches > 1:
            return self._pieces(values, share, loss_scale, of_all)
        return self._piece(values, share, loss_scale, of_all), []

    def divisors(self, values: Values, share: Rows, replica: Any) -> list[tf.Tensor]:
        """What the rows add to the divisors, where shares are passed over apart.

        Raises nothing where `run` raises `NeedsDivisors`.
        """
        return self._divisors(self.variables.seeded(values, replica), share)

    def _divisors(self, values: Values, share: Rows) -> list[tf.Tensor]:
        """What the losses of the whole batch are divided by, before the first piece is taken."""
        with self.context(share), self.pure.forward(values, share, True, again=True) as forward:
            shares = LossShares(self.model, share.fraction)
            shares.total(share.data, forward.y_pred)
        return self.of_replicas(share)(shares.divisors)

    def _piece(self, values: Values, share: Rows, loss_scale: Any, of_all: OfAll) -> Made:
        # What recomputes a layer's outputs needs its context in the backward pass, too.
        with self.context(share):
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(values.trainable)
                with self.pure.forward(values, share, True) as forward:
                    losses, part = self.losses(forward, share, of_all)
                scaled = losses[0] * tf.cast(loss_scale, losses[0].dtype)
            found = tape.gradient(scaled, values.trainable)
        gradients, kinds = connected(found, self.variables.trainable)
        seen = self.seen(share, forward)
        summands = Summands(losses, [], seen.summands, gradients)
        return Made(summands, forward.end, seen, kinds, part)

    def _pieces(
        self, values: Values, share: Rows, loss_scale: Any, of_all: OfAll
    ) -> tuple[Made, list[tf.Tensor]]:
        """Take the rows piece by piece; each waits for the one before, to save memory."""
        size = rows_count(share)
        total, parts, norms = Summands(), [], []
        pieces: list[tuple[Made, Any]] = []
        for index in range(self._micro_batches):
            with tf.control_dependencies(total.losses):
                piece, taken = piece_of(share, size, index, self._micro_batches)
                made = self._piece(values, piece, loss_scale, of_all)
                present = piece.examples > 0
                more = Summands(
                    *([zero_unless(present, t) for t in part] for part in made.summands)
                )
                values = keep_if(present, made.end, values, self.variables.seeds)
            if self._measures_pieces:
                norms.append(piece_norm(piece, more.gradients))
            if made.part is not None:
                parts.append(zero_unless(present, made.part))
            total = Summands(*map(add_all, total, more)) if index else more
            pieces.append((made, taken))
        seen = made.seen._replace(predictions=self._one_after_another(pieces))
        part = tf.add_n(parts) if parts else None
        return made._replace(summands=total, end=values, seen=seen, part=part), norms

    def _one_after_another(self, pieces: Sequence[tuple[Made, Any]]) -> tuple[Any, list[Any]]:
        """The predictions for all pieces, and what is attached to them; with each its length."""
        predictions, taken = zip(*((made.seen.predictions, n) for made, n in pieces), strict=True)
        if predictions[0][0] is None:
            return predictions[0]
        parts = [keras.tree.flatten(y_pred) for y_pred, _ in predictions]
        counts = pieces[0][0].seen.counts
        if tf.executing_eagerly():
            refuse_computed(counts, parts)
        y_pred = keras.tree.pack_sequence_as(predictions[0][0], joined(parts, taken, counts))
        of_attached = [count for count in counts for _ in range(2)]
        return y_pred, joined([attached for _, attached in predictions], taken, of_attached)

    def update(
        self,
        layout: Layout,
        values: Values,
        packs: Sequence[tf.Tensor],
        slices: Sequence[tf.IndexedSlices],
        optimizer_values: Sequence[tf.Tensor],
    ) -> Update:
        """The new values of all variables of a replica, from the sums over replicas."""
        sums, kinds = layout.sums(packs), layout.gradients
        gradients: list[Any] = [None] * len(values.trainable)
        known = [*sums.gradients, *map(joined_parts, slices, kinds.alike)]
        for index, gradient in zip(kinds.dense + kinds.sparse, known, strict=True):
            gradients[index] = gradient
        new = [*values.trainable, *optimizer_values]
        if gradients:
            variables = [*self.variables.trainable, *self.optimizer_variables]
            optimizer = self.model.optimizer
            new = updated(optimizer, variables, new, gradients, "apply_gradients")
        return complete(new[: len(gradients)], new[len(gradients) :], layout, values, sums)


def complete(
    trainable: list[tf.Tensor],
    optimizer: list[tf.Tensor],
    layout: Layout,
    values: Values,
    sums: Summands,
) -> Update:
    """An update from its parts; the changed variables are equal on all replicas."""
    others = [
        tf.cast(total, values.others[index].dtype)
        for index, total in zip(layout.changed, sums.others, strict=True)
    ]
    with tf.control_dependencies([*trainable, *optimizer, *others, *sums.losses]):
        done = tf.zeros(())
    return Update(trainable, optimizer, others, sums.losses, sums.metrics, done)


def refuse_to_sum(own: list[tf.Tensor]) -> list[tf.Tensor]:
    """Asks for divisors that are known before losses are computed."""
    raise NeedsDivisors


def with_attached(y_pred: Any) -> tuple[Any, list[Any]]:
    """Predictions, and what Keras has attached to them, which a function's result loses."""
    return y_pred, model_internals.attached(keras.tree.flatten(y_pred))


def piece_norm(piece: Rows, gradients: Sequence[Any]) -> tf.Tensor:
    """A piece's number of examples, and the square norm of the gradient of its mean loss."""
    # The loss of a piece is weighed with its part of the global batch.
    square = tf.math.divide_no_nan(
        square_norm_of_all(gradients), tf.square(tf.cast(piece.fraction, tf.float32))
    )
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
