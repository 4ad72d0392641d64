"""`WholeStep`: a step that is not split. One replica runs it, and all others get its values."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals, variable_internals
from keras_multigpu.partition.layouts import REPLICATED
from keras_multigpu.training.agreement import numbers_of_batch, require_same_batch
from keras_multigpu.training.replica_group import Copies, ReplicaGroup, copies_in, copies_of
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.shares import (
    Batch,
    Rows,
    are_here,
    as_given,
    join_shares,
    present_leaves,
    tensors_of,
    with_leaves,
)
from keras_multigpu.training.steps.one_device import (
    known_variables,
    one_device,
    trace_for_one_device,
)
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.variables.storage import whole_values
from keras_multigpu.training.watching.stopwatch import Stopwatch
from keras_multigpu.training.watching.watched import Watched, if_alone


class WholeStep(Runner):
    """A step that one replica runs for the whole batch.

    Args:
        request: The step.
        step: As a graph that cannot be split, even into one part; without it Python runs the step.
    """

    def __init__(self, request: StepRequest, step: PartitionedStep | None = None) -> None:
        self.request, self.step = request, step
        self.open_sums = request.open_sums
        self.unsplit_because = step.unsplit_because if step else "it has no graph"
        self._graph: Any = None
        if step is not None:
            step.traced.watched.unsplit(str(step.unsplit_because))
            # It changes variables in an unknown way, so their values cannot be passed in and out.
            # They may have been placed since it was traced, so it is traced again.
            whole = trace_for_one_device(request.model, request.function, step.spec)
            # While parts are whole they are on the host, where XLA cannot use them on a GPU.
            in_parts = any(layout != REPLICATED for layout in step.traced.layouts)
            compiled = bool(request.model.jit_compile) and not in_parts
            self._graph = tf.function(whole, autograph=False, jit_compile=compiled)
        elif request.group.count * request.pieces > 1:
            request.warn_of_one_replica("`run_eagerly=True` leaves no graph to split", "each step")

    @property
    def copies(self) -> Iterable[Copies]:
        if self.step is not None:
            return super().copies
        return map(copies_in, variable_internals.storages_of(known_variables(self.request.model)))

    def __call__(self, shares: Sequence[Rows]) -> Any:
        model, group, spec = self.request.model, self.request.group, self.request.spec
        watched = Watched(model, group, self.request.probes)
        watched.before_step()
        batch = whole_batch(group, shares, spec)
        require_same_batch(group, numbers_of_batch(group, shares))
        if self._graph is not None or not watched.probes:
            return self._run(batch)[0]
        before = {id(v): copies_of(v)[0].read_value() for v in known_variables(model)}
        started = tf.timestamp()
        with watched.recording():
            logs, created = self._run(batch)
        before |= created
        measured: list[list[list[tf.Tensor]]] = [[]] * len(group.replicas)
        if watched.recorded is not None:
            times = Stopwatch(started).times(tensors_of(logs))
            total = shares[0].global_batch_size
            seen = watched.recorded.without_graph(model)

            def after(wanted: Sequence[keras.Variable]) -> list[tf.Tensor]:
                return [copies_of(variable)[0].read_value() for variable in wanted]

            measured = [
                watched.measured(
                    replica,
                    *if_alone(replica, batch, total, spec, seen),
                    lambda variable: before.get(id(variable)),
                    after,
                    times,
                )
                for replica in group.replicas
            ]
        allowed = watched.verdict(watched.gathered(measured))
        if allowed is None or allowed:
            return logs
        for variable in known_variables(model):
            for part in copies_of(variable):
                part.assign(before[id(variable)])
        return watched.logs_after(logs, allowed)

    def _run(self, batch: Batch) -> tuple[Any, dict[int, tf.Tensor]]:
        """Run the step; its results, and the first values of variables that it creates, by id."""
        group, changed = self.request.group, list(self.copies)
        with self.request.change():
            try:
                with graph_internals.single_device(), tf.device(group.first_device):
                    with whole_values([copies[0] for copies in changed]):
                        return (self._graph(*batch), {}) if self._graph else self._in_python(batch)
            finally:
                # Even if it fails, when it has assigned some.
                equalize(changed)

    def _in_python(self, batch: Batch) -> tuple[Any, dict[int, tf.Tensor]]:
        model = self.request.model
        variables = known_variables(model)
        created: dict[int, tuple[tf.Variable, tf.Tensor]] = {}

        def noted(create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
            variable = create(**options)
            created[id(variable)] = variable, variable.read_value()
            return variable

        with one_device(model, variables), tf.variable_creator_scope(noted):
            results = self.request.function(as_given(batch))
        known = known_variables(model)
        firsts = [(id(variable), id(copies_of(variable)[0])) for variable in known]
        if len(known) > len(variables):
            self.request.placement.place(model)
        return results, {own: created[first][1] for own, first in firsts if first in created}


def equalize(variables: Iterable[Copies]) -> None:
    """Give all replicas the values of the first one, after a step that it ran, or that failed."""
    for first, *others in variables:
        for other in others:
            other.assign(first)


def whole_batch(group: ReplicaGroup, shares: Sequence[Rows], spec: Batch) -> Batch:
    """The global batch; processes that have read only their own rows exchange them."""
    if are_here(shares):
        return join_shares(shares, spec)
    parts = [present_leaves(shares[replica.id].data) for replica in group.replicas]
    batch: Batch = with_leaves(spec, group.gather_on_first(parts))
    return batch
