"""Steps without a graph: Python runs them for the whole batch, and all replicas get its values."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import variable_internals
from keras_multigpu.training.replica_group import copies_in, copies_of
from keras_multigpu.training.shares import Rows, as_given, tensors_of
from keras_multigpu.training.steps.one_device import known_variables, one_device
from keras_multigpu.training.steps.probes import Times, now_that
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.same_on_workers import StepCheck
from keras_multigpu.training.steps.split_step import whole_batch
from keras_multigpu.training.steps.taps import tapped_without_graph
from keras_multigpu.training.steps.watched import Watched, rows_if_alone, tapped_if_alone
from keras_multigpu.training.variables.placement import place_model


class EagerStep:
    """A step without a graph, which the first replica computes alone."""

    alone = True

    def __init__(self, request: StepRequest) -> None:
        self._request, self._model, self._group = request, request.model, request.group
        if self._group.count * request.pieces > 1:
            reason = "`run_eagerly=True` leaves no graph to split"
            request.warn_of_one_replica("each step", reason)

    def __call__(self, shares: Sequence[Rows]) -> Any:
        model, group = self._model, self._group
        watched = Watched(model, group, self._request.probes)
        watched.before_step()
        if not watched.probes:
            return self._run(shares)[0]
        before = {id(v): copies_of(v)[0].read_value() for v in known_variables(model)}
        started = tf.timestamp()
        with watched.recording():
            logs, created = self._run(shares)
        before |= created
        measured: list[list[list[tf.Tensor]]] = [[]] * len(group.replicas)
        if watched.taps is not None:
            computed = now_that(tensors_of(logs))
            times = Times(started, computed, tf.timestamp())
            scale = watched.scale(lambda variable: before.get(id(variable)))
            spec, total = self._request.spec, shares[0].global_batch_size
            batch = whole_batch(group, shares, spec)
            tapped = tapped_without_graph(watched.taps, model)

            def new_values(wanted: Sequence[keras.Variable]) -> list[tf.Tensor]:
                return [copies_of(variable)[0].read_value() for variable in wanted]

            measured = [
                watched.measured(
                    replica,
                    rows_if_alone(replica, batch, total, spec),
                    tapped_if_alone(replica, tapped),
                    new_values,
                    scale,
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

    def _run(self, shares: Sequence[Rows]) -> tuple[Any, dict[int, tf.Tensor]]:
        """Run the step; its results, and the first values of variables that it creates, by id."""
        group, model = self._group, self._model
        StepCheck(group, shares).exchanged()
        batch = as_given(whole_batch(group, shares, self._request.spec))
        variables = known_variables(model)
        created: dict[int, tuple[tf.Variable, tf.Tensor]] = {}

        def noted(create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
            variable = create(**options)
            created[id(variable)] = variable, variable.read_value()
            return variable

        with group.change() if self._request.trains else contextlib.nullcontext():
            try:
                with one_device(model, variables), tf.device(group.hub):
                    with tf.variable_creator_scope(noted):
                        results = self._request.function(batch)
            finally:
                # Even if it fails, when it has assigned some.
                for storage in variable_internals.storages_of(variables):
                    first, *others = copies_in(storage)
                    for other in others:
                        other.assign(first)
        known = known_variables(model)
        firsts = [(id(variable), id(copies_of(variable)[0])) for variable in known]
        if len(known) > len(variables):
            place_model(model, group.strategy)
        return results, {own: created[first][1] for own, first in firsts if first in created}
