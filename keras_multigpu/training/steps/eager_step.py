"""Steps without a graph: Python runs them for the whole batch, and all replicas get its values."""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import variable_internals
from keras_multigpu.training.replica_group import copies_in, copies_of
from keras_multigpu.training.shares import Rows, tensors_of
from keras_multigpu.training.steps.one_device import known_variables, one_device
from keras_multigpu.training.steps.probes import Times, now_that
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.same_on_workers import Asked
from keras_multigpu.training.steps.split_step import whole_batch
from keras_multigpu.training.steps.taps import tapped_without_graph
from keras_multigpu.training.steps.watched import Watched, part_of_one, rows_of_one
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
        group = self._group
        Asked(group, shares).alone()
        parts = whole_batch(group, shares, self._request.spec)
        variables = known_variables(self._model)
        with group.change():
            with one_device(self._model, variables), tf.device(group.hub), self._recording():
                results = self._request.function(keras.utils.pack_x_y_sample_weight(*parts))
            for storage in variable_internals.storages_of(variables):
                first, *others = copies_in(storage)
                for other in others:
                    other.assign(first)
        if len(known_variables(self._model)) > len(variables):
            self._place_made()
        return results

    def _recording(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which the step runs."""
        return contextlib.nullcontext()

    def _place_made(self) -> None:
        place_model(self._model, self._group.strategy)


class EagerTrainStep(EagerStep):
    """A step of training without a graph, with probes: to these, the first replica has all."""

    def __call__(self, shares: Sequence[Rows]) -> Any:
        group, model, spec = self._group, self._model, self._request.spec
        watched = Watched(model, group, self._request.probes)
        watched.before_step()
        before: dict[int, tf.Tensor] = {}
        self._before, self._made = before, list[tuple[tf.Variable, tf.Tensor]]()
        if not watched.probes:
            return super().__call__(shares)
        for variable in known_variables(model):
            before[id(variable)] = copies_of(variable)[0].read_value()
        started = tf.timestamp()
        with watched.recording():
            logs = super().__call__(shares)
        measured: list[list[list[tf.Tensor]]] = [[[] for _ in watched.probes]] * len(group.replicas)
        if watched.taps is not None:
            computed = now_that(tensors_of(logs))
            times = Times(started, computed, tf.timestamp())
            scale = watched.scale(lambda variable: before.get(id(variable)))
            batch, total = whole_batch(group, shares, spec), shares[0].global_batch_size
            tapped = tapped_without_graph(watched.taps, model, total)

            def new_values(wanted: Sequence[keras.Variable]) -> list[tf.Tensor]:
                return [copies_of(variable)[0].read_value() for variable in wanted]

            measured = [
                watched.measured(
                    replica,
                    rows_of_one(replica, batch, total, spec),
                    part_of_one(replica, tapped),
                    new_values,
                    scale,
                    times,
                )
                for replica in group.replicas
            ]
        allowed = watched.verdict(watched.everyones(measured))
        if allowed is None or allowed:
            return logs
        for variable in known_variables(model):
            for part in copies_of(variable):
                part.assign(before[id(variable)])
        return watched.kept(logs, allowed)

    def _recording(self) -> contextlib.AbstractContextManager[Any]:
        return tf.variable_creator_scope(self._noted)

    def _noted(self, create: Callable[..., tf.Variable], **options: Any) -> tf.Variable:
        """Make a variable, as the first step does, and note what it begins with."""
        variable = create(**options)
        self._made.append((variable, variable.read_value()))
        return variable

    def _place_made(self) -> None:
        begun = {id(variable): value for variable, value in self._made}
        for variable in known_variables(self._model):
            (first, *_) = copies_of(variable)
            if id(first) in begun:
                self._before[id(variable)] = begun[id(first)]
        super()._place_made()
