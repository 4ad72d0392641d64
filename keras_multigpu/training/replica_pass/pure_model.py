"""A model's forward pass as a pure function of its variables' values.

A pure function can be traced once and run on every replica, compiled by XLA, and run
on pieces of a batch. A stateless scope gives the variables the values that are
passed in and catches every assignment, so the new values come out as results. What the
model does not track is met there too, see `untracked`.

Weights are equal on all replicas and stay so. Two kinds of variables go apart in a pass, and become
one device's again:

Seeds. Keras's random layers draw from a `SeedGenerator`, whose state is `[seed, counter]`. It is
equal everywhere, so every replica would draw the same dropout mask. So a replica adds a multiple of
its index to the seed before a pass and takes it off afterwards: draws differ, replay exactly, and a
checkpoint sees the state of a single device. Replica 0 draws what one device draws.

What a pass changes: BatchNorm's moving statistics, counters, spectral norms, the state of layers'
metrics. `contribution` is what a replica adds to a sum over replicas, and the sum is

    aggregation="sum", as
    the state of metrics     old value + what all replicas added
    float variables          mean of the replicas' values, weighted by their examples
    integers, booleans, and
    "only_first_replica"     the first replica's value

On a single replica each of them is the new value itself. A replica without examples adds nothing,
so it cannot poison the others.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import compile_internals, model_internals, variable_internals
from keras_multigpu.training.exchange.packing import Packing, SumAll
from keras_multigpu.training.exchange.sparse_gradients import zero_unless
from keras_multigpu.training.replica_pass.rows_flow import called
from keras_multigpu.training.shares import Rows, wide
from keras_multigpu.training.variables.catching_scope import (
    CatchingScope,
    WeighedNumbers,
    raise_assigned,
)
from keras_multigpu.training.variables.placement import (
    NeedsVariables,
    Placement,
    optimizers_of,
)

# Distance between two replicas' seeds: Knuth's prime beside 2**32 over the golden ratio. Keras
# picks seeds up to 1e9, so replicas of two layers do not meet.
STRIDE = 0x9E3779B1


class Values(NamedTuple):
    """The values of a model's variables on one replica."""

    trainable: Sequence[tf.Tensor]
    others: Sequence[tf.Tensor]
    global_seed: tf.Tensor


class Variables:
    """The variables of a built model, as its passes know them.

    Attributes:
        trainable: Those that the optimizer updates.
        others: All others that a pass may read or change.
        global_seed: The state of Keras's global seed generator.
        seeds: Where the states of seed generators stand among the others.
    """

    def __init__(self, model: keras.Model, untracked: Sequence[keras.Variable]) -> None:
        self.trainable = list(model.trainable_variables)
        owned = compile_internals.owned_metrics(model)
        of_layers = [variable for metric in owned for variable in metric.variables]
        self.others = [*model.non_trainable_variables, *of_layers, *untracked]
        self.global_seed = variable_internals.global_seed_state()
        self.seeds = variable_internals.places_of_seeds(self.others)

    @property
    def all(self) -> list[keras.Variable]:
        """All of them, in the order of `Values`."""
        return [*self.trainable, *self.others, self.global_seed]

    def seeded(self, values: Values, replica: tf.Tensor) -> Values:
        return self._with_seeds(for_replica, values, replica)

    def unseeded(self, values: Values, replica: tf.Tensor) -> Values:
        """The values with the seeds of one device again."""
        return self._with_seeds(for_one_device, values, replica)

    def _with_seeds(
        self, change: Callable[..., tf.Tensor], values: Values, replica: tf.Tensor
    ) -> Values:
        others = list(values.others)
        for index in self.seeds:
            others[index] = change(others[index], replica)
        return Values(values.trainable, others, change(values.global_seed, replica))

    def seeds_in(self, values: Values) -> tuple[list[tf.Tensor], tf.Tensor]:
        """The states of seed generators among the values, and that of Keras's global one."""
        return [values.others[index] for index in self.seeds], values.global_seed

    def changed(self, start: Values, end: Values) -> list[int]:
        """Where the others stand that have new values; seeds excluded."""
        pairs = enumerate(zip(start.others, end.others, strict=True))
        return [i for i, (old, new) in pairs if new is not old and i not in self.seeds]

    def contributions(
        self, start: Values, end: Values, share: Rows, replica: tf.Tensor
    ) -> tuple[list[int], list[tf.Tensor]]:
        """Which of the others a replica has changed, and what it adds to their sums."""
        changed, fraction, first = self.changed(start, end), share.fraction, tf.equal(replica, 0)
        return changed, [
            contribution(self.others[i], start.others[i], end.others[i], fraction, first)
            for i in changed
        ]

    def agreed(
        self, start: Values, end: Values, share: Rows, replica: tf.Tensor, total: SumAll
    ) -> Values:
        """The values that all replicas have after their passes, with the seeds of one device."""
        changed, own = self.contributions(start, end, share, replica)
        packing = Packing(own)
        packs = [zero_unless(share.examples > 0, pack) for pack in packing.pack(own)]
        packs = packing.summed(packs, total)
        common = self.unseeded(end, replica)
        others = list(common.others)
        for index, value in zip(changed, packing.unpack(packs), strict=True):
            others[index] = tf.cast(value, start.others[index].dtype)
        return common._replace(others=others)


def contribution(
    variable: keras.Variable, old: tf.Tensor, new: tf.Tensor, fraction: tf.Tensor, first: Any
) -> tf.Tensor:
    """One replica's summand of a variable's common value, whose dtype the sum has to be cast to.

    The fraction is that of its examples; `first` tells whether it is replica 0.
    """
    new, old = (tf.cast(value, summable(value.dtype)) for value in (new, old))
    # What was there before counts once, not once for each replica.
    if variable.aggregation == "sum":
        return new - tf.where(first, tf.zeros_like(old), old)
    # Counters and flags are the same on all replicas, and a mean would round them.
    if not new.dtype.is_floating or variable.aggregation == "only_first_replica":
        return tf.where(first, new, tf.zeros_like(new))
    return new * tf.cast(fraction, new.dtype)


def summable(dtype: tf.DType) -> tf.DType:
    """The type in which values are summed: one that all devices can sum, without loss."""
    if dtype in (tf.float16, tf.bfloat16):
        return tf.float32
    # TensorFlow keeps int32 on the host, and sums what is on the host apart from the rest.
    return tf.int64 if dtype.is_integer or dtype.is_bool else dtype


def for_replica(state: tf.Tensor, replica: int | tf.Tensor) -> tf.Tensor:
    """A seed generator's state as one replica uses it."""
    # An offset can be taken off again: what is saved is the state that one device would have.
    return state + offset(state, replica)


def for_one_device(state: tf.Tensor, replica: int | tf.Tensor) -> tf.Tensor:
    """The inverse of `for_replica`: the state without the replica's share."""
    return state - offset(state, replica)


def offset(state: tf.Tensor, replica: int | tf.Tensor) -> tf.Tensor:
    shift = tf.cast(replica, tf.int64) * tf.constant(STRIDE, tf.int64)
    return tf.cast(tf.stack([shift, tf.zeros((), tf.int64)]), state.dtype)


@dataclasses.dataclass
class Forward:
    """What a forward pass yields.

    Attributes:
        y_pred: The predictions.
        added_losses: The replica's parts of the losses that layers have added.
        regularization: The penalties of weights.
        in_order: Whether the predictions' rows stand in the order of the examples.
        end: The values of all variables; once the pass is over, those after it.
    """

    y_pred: Any
    added_losses: list[tf.Tensor]
    regularization: list[tf.Tensor]
    in_order: bool
    end: Values


class PureModel:
    """Runs a built model on given values of its variables, on all of a batch or on parts."""

    def __init__(self, model: keras.Model, placement: Placement, in_parts: bool) -> None:
        self.model = model
        self._placement = placement
        self.variables = Variables(model, self._placement.untracked)
        self._in_parts = in_parts

    @contextlib.contextmanager
    def forward(
        self, values: Values, share: Rows, training: bool, again: bool = False
    ) -> Iterator[Forward]:
        """The forward pass over some rows, with these values; losses are computed in its context.

        There may be another one for the same step.
        """
        with self._scope(values, share.fraction, again) as scope:
            forward = self._forward(values, share.x, training, scope)
            yield forward
            forward.end = self.new_values(scope, values)

    def _scope(self, values: Values, part: tf.Tensor, again: bool) -> CatchingScope:
        """A scope in which the model has these values, and sees this part of the batch."""
        # The running means of single losses are updated with global values, elsewhere.
        trackers = loss_trackers(self.model)
        zeros = [tf.zeros(variable.shape, variable.dtype) for variable in trackers]
        return CatchingScope(
            [*self.variables.all, *trackers],
            [*values.trainable, *values.others, values.global_seed, *zeros],
            part,
            several=self._in_parts or again,
            updated=self.variables.trainable,
        )

    def whole_scope(self, values: Values) -> CatchingScope:
        """The scope for the global batch; the running means of single losses are real."""
        return CatchingScope(
            self.variables.all,
            [*values.trainable, *values.others, values.global_seed],
            apart=loss_trackers(self.model),
            several=self._in_parts,
            updated=self.variables.trainable,
        )

    def _forward(self, values: Values, x: Any, training: bool, scope: CatchingScope) -> Forward:
        """The forward pass inside `scope`.

        Losses that layers add are taken for means over examples and weighed with the part of the
        batch, penalties of activity regularisers for sums; so their sum over replicas is one
        device's value.
        """
        with remembered_activity_penalties(self.model) as penalties, WeighedNumbers.weighed():
            if self._in_parts:
                y_pred, in_order = called(self.model, x, training, scope)
            else:
                y_pred, in_order = model_internals.called(self.model, x, training), True
        summed = {id(penalty) for penalty in penalties}
        added = {id(loss) for loss in scope.losses}
        added_losses, regularization = [], []
        for loss in self.model.losses:
            value = tf.reduce_sum(tf.cast(loss, wide()))
            if id(loss) not in added:
                regularization.append(value)
            else:
                added_losses.append(value if id(loss) in summed else value * scope.part)
        return Forward(y_pred, added_losses, regularization, in_order, values)

    def new_values(self, scope: CatchingScope, values: Values) -> Values:
        """The values that the variables have inside `scope`."""
        if scope.unknown:
            raise NeedsVariables(self._placement, scope.unknown.values())
        refuse_assigned_optimizer(self.model, scope)
        *others, seed = scope.values_of([*self.variables.others, self.variables.global_seed])
        return Values(values.trainable, others, seed)


def refuse_assigned_optimizer(model: keras.Model, scope: CatchingScope) -> None:
    """Raise a `ValueError` where a variable was assigned that an optimizer owns."""
    for variable in (v for optimizer in optimizers_of(model) for v in optimizer.variables):
        if id(variable) in scope.assigned:
            raise_assigned(
                ValueError,
                "an optimizer's",
                "Assign it in a callback, or use a schedule.",
                variable,
            )


def loss_trackers(model: keras.Model) -> list[keras.Variable]:
    """The variables of the running means of single losses, as far as they are made."""
    compiled = compile_internals.compile_loss(model)
    made = list(compiled.variables) if compiled else []
    return [v for v in made if variable_internals.variable_storage(v) is not None]


class RememberingRegularizer:
    """An activity regulariser that notes each penalty it computes."""

    # Keras sums these penalties over the batch, whereas a loss that a layer adds is mostly a mean;
    # the two are weighed differently, and afterwards they look alike.
    penalties = threading.local()
    """The penalties of the forward pass that runs on this thread."""

    def __init__(self, regularizer: Callable[..., tf.Tensor]) -> None:
        self.regularizer = regularizer
        self.users = 0

    def __call__(self, outputs: tf.Tensor) -> tf.Tensor:
        penalty = self.regularizer(outputs)
        self.penalties.seen.append(penalty)
        return penalty


@contextlib.contextmanager
def remembered_activity_penalties(model: keras.Model) -> Iterator[list[tf.Tensor]]:
    """The penalties that activity regularisers compute in this context."""
    # Replicas that are traced in turn enter it at the same time; the last one restores.
    layers = model_internals.activity_regularized_layers(model)
    seen: list[tf.Tensor] = []
    RememberingRegularizer.penalties.seen = seen
    for layer in layers:
        if not isinstance(layer.activity_regularizer, RememberingRegularizer):
            layer.activity_regularizer = RememberingRegularizer(layer.activity_regularizer)
        layer.activity_regularizer.users += 1
    try:
        yield seen
    finally:
        for layer in layers:
            layer.activity_regularizer.users -= 1
            if not layer.activity_regularizer.users:
                layer.activity_regularizer = layer.activity_regularizer.regularizer
