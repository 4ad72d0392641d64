"""A training step whose passes are computed by workers; see `ServedTrainStep`."""

from collections.abc import Sequence
from typing import Any, cast

import tensorflow as tf

from keras_multigpu.training.exchange.sparse_gradients import zero_unless
from keras_multigpu.training.exchange.stages import TracedPass, traced
from keras_multigpu.training.replica_pass.passes import (
    NeedsDivisors,
    Outcome,
    TrainingPass,
    Update,
)
from keras_multigpu.training.replica_pass.pure_model import Values
from keras_multigpu.training.servers.connection import WHOLE_BATCH, Servers
from keras_multigpu.training.shares import Rows, filled, present, share_spec, shares_of, specs_of
from keras_multigpu.training.steps.step import Result, TrainStep
from keras_multigpu.training.update import loss_scale


class ServedTrainStep(TrainStep):
    """A training step on workers that a coordinator tells what to do.

    Synchronously each worker passes over its share of a batch, with values that the parameter
    servers hold; the coordinator sums what they return and updates. Where a loss is divided by what
    all shares have in common, as with masks, they are asked for that before. Asynchronously a
    worker takes a whole batch, computes the update as well, and adds the differences to what the
    servers hold by then: an assignment would undo the updates of others.
    """

    def __init__(self, replica_pass: TrainingPass, servers: Servers) -> None:
        self._servers = servers
        self._count = 1 if servers.asynchronous else servers.workers
        self._divisors: Any = None
        super().__init__(replica_pass)
        self._traced = cast(TracedPass, self._run_pass)
        if self._traced.layout.metrics.gathered:
            raise servers.refusal(self._model, WHOLE_BATCH)
        known = self._variables
        self._places = [known.trainable, self._optimizer_variables, known.others]
        self._stored = [servers.copies(part) for part in self._places]
        self._rows = share_spec(self._spec, self._count)
        function = self._updated_on_worker if servers.asynchronous else self._passed_on_worker
        self._function = tf.function(function, autograph=False)

    @property
    def _shares_of_batch(self) -> int:
        return self._count

    def _compile(self, pass_also: Sequence[Any] = (), update_also: Sequence[Any] = ()) -> None:
        try:
            super()._compile(pass_also, update_also)
        except NeedsDivisors:
            jit = bool(self._model.jit_compile)
            asked = traced(self._pass.divisors, self._specs_of_pass, jit)
            self._ask, divisors = asked, specs_of(asked.structured_outputs)
            self._divisors = tf.function(self._divisors_on_worker, autograph=False)
            super()._compile((*pass_also, *divisors), update_also)

    def __call__(self, shares: Sequence[Rows]) -> dict[str, Any]:
        """Train on one batch; asynchronously the logs are those of a batch that is done by now."""
        self._servers.push()
        seed = tf.convert_to_tensor(self._variables.global_seed)
        if self._servers.asynchronous:
            arguments = tf.constant(self._servers.steps), seed, *present(shares[0])
            return self._servers.schedule(
                self._function, arguments, lambda found: self._added(shares, found)
            )
        rows = shares_of(shares[0].data, self._count)
        given = [(tf.constant(i), seed, *present(each)) for i, each in enumerate(rows)]
        divisors = []
        if self._divisors is not None:
            own = self._servers.results(self._divisors, given)
            divisors = [tf.add_n(parts) for parts in zip(*own, strict=True)]
        found = self._servers.results(self._function, [(divisors, *each) for each in given])
        outcomes = [self._as_outcome(each) for each in found]
        layout = self._traced.layout
        packs = [tf.add_n(parts) for parts in zip(*(each.packs for each in outcomes), strict=True)]
        slices = [
            tf.IndexedSlices(
                tf.concat([part.values for part in parts], 0),
                tf.concat([part.indices for part in parts], 0),
                parts[0].dense_shape,
            )
            for parts in zip(*(each.slices for each in outcomes), strict=True)
        ]
        here = [[tf.convert_to_tensor(variable) for variable in part] for part in self._places]
        values = Values(here[0], here[2], seed)
        update = self._update(layout, values, packs, slices, here[1])
        result = Result(update, outcomes[0], layout, shares[0].examples)
        self._assign([result])
        return self._tracked(shares, [result], ((None, None, None), None))

    def _divisors_on_worker(self, number: tf.Tensor, seed: tf.Tensor, *leaves: Any) -> Any:
        trainable, _, others = self._read()
        return self._ask(Values(trainable, others, seed), filled(self._rows, leaves), number)

    def _passed_on_worker(
        self, divisors: list[tf.Tensor], number: tf.Tensor, seed: tf.Tensor, *leaves: Any
    ) -> list[Any]:
        trainable, optimizer, others = self._read()
        scale = loss_scale(self._model.optimizer, self._optimizer_variables, optimizer)
        rows, values = filled(self._rows, leaves), Values(trainable, others, seed)
        outcome, _ = self._run_pass(values, rows, number, scale, *divisors)
        slices = [zero_unless(rows.examples > 0, each) for each in outcome.slices]
        outcome = outcome._replace(slices=slices)
        tensors = tf.nest.flatten(outcome, expand_composites=True)
        return [tensor for tensor in tensors if tensor is not None]

    def _updated_on_worker(self, number: tf.Tensor, seed: tf.Tensor, *leaves: Any) -> Any:
        trainable, optimizer, others = self._read()
        scale = loss_scale(self._model.optimizer, self._optimizer_variables, optimizer)
        rows, values = filled(self._rows, leaves), Values(trainable, others, seed)
        # The number of the step takes the place of a replica's: each draws anew.
        outcome, layout = self._run_pass(values, rows, number, scale)
        update = self._update(layout, values, outcome.packs, outcome.slices, optimizer)
        changed = [[part[index] for index in layout.changed] for part in (self._stored[2], others)]
        for copies, old, new in (
            (self._stored[0], trainable, update.trainable),
            (self._stored[1], optimizer, update.optimizer),
            (*changed, update.others),
        ):
            for copy, before, after in zip(copies, old, new, strict=True):
                # An assignment would undo what others have added in between.
                copy.assign_add(after - before)
        return update.losses, update.metrics

    def _read(self) -> list[list[tf.Tensor]]:
        return [[tf.convert_to_tensor(copy) for copy in part] for part in self._stored]

    def _added(self, shares: Sequence[Rows], found: Any) -> dict[str, Any]:
        losses, metrics = tf.nest.map_structure(tf.convert_to_tensor, found)
        update = Update([], [], [], losses, metrics, tf.zeros(()))
        outcome = self._traced.graph.structured_outputs  # Of which nothing is asked.
        result = Result(update, outcome, self._traced.layout, shares[0].examples)
        return self._tracked(shares, [result], ((None, None, None), None))

    def _as_outcome(self, found: Any) -> Outcome:
        structure, remaining = self._traced.graph.structured_outputs, iter(found)
        tensors = [
            None if leaf is None else tf.convert_to_tensor(next(remaining))
            for leaf in tf.nest.flatten(structure, expand_composites=True)
        ]
        outcome: Outcome = tf.nest.pack_sequence_as(structure, tensors, expand_composites=True)
        return outcome
