"""What probes see of a training step, and what follows from their answers."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.training.replica_group import Replica, ReplicaGroup
from keras_multigpu.training.shares import (
    Batch,
    Rows,
    cut,
    have_rows,
    held_until,
    tensors_of,
)
from keras_multigpu.training.steps.probes import NewValues, Probe, StepView, Times, now_that
from keras_multigpu.training.steps.step_record import recording
from keras_multigpu.training.steps.stopwatch import Stopwatch
from keras_multigpu.training.steps.taps import Own, Tapped, Taps
from keras_multigpu.training.variables.adjusted_schedule import state_of


class Watched:
    """The probes of one step.

    Attributes:
        taps: What they look at; None if no probe measures, or the step shows nothing.
        timed: Whether a probe measures times.
    """

    def __init__(self, model: keras.Model, group: ReplicaGroup, probes: Sequence[Probe]) -> None:
        self._model, self._group, self.probes = model, group, probes
        self._measuring = [p for p in probes if type(p).on_replica is not Probe.on_replica]
        self.timed = any(probe.timed for probe in self._measuring)
        self.taps: Taps | None = None

    @property
    def may_forbid(self) -> bool:
        """Whether a probe may find that a step must not change anything."""
        return any(type(probe).allows is not Probe.allows for probe in self.probes)

    @property
    def measures(self) -> bool:
        return bool(self._measuring)

    def before_step(self) -> None:
        for probe in self.probes:
            probe.before_step()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the step that is traced, or runs, in this context."""
        if not self.measures:
            yield
            return
        with recording(self._model) as record:
            yield
        trains = bool(self._model.trainable_variables)
        if len(record.losses) == 1 and (record.gradients or not trains):
            self.taps = Taps(record)
        elif (probe := self._first_required()) is not None:
            raise value_error(
                f"`{probe.callback}` cannot look inside this `train_step`, whose loss or gradients "
                "are unknown.",
                "Expected one call of `self.compute_loss`, and gradients that an optimizer's "
                "`apply` or `apply_gradients` is given.",
                "Leave out the callback, or take the loss from `compute_loss`.",
                callback=probe.callback,
            )
        for each in self._measuring:
            each.sees = self.taps is not None

    def unsplit(self, reason: str) -> None:
        """Show nothing of a step that runs unsplit; an error if a probe requires to see it."""
        probe, self.taps = self._first_required(), None
        if probe is not None:
            raise value_error(
                f"`{probe.callback}` cannot look inside this step, which runs unsplit.",
                "Expected a step that reads and assigns variables by known operations.",
                "Leave out the callback, or change what prevents the split.",
                probe=type(probe).__name__,
                reason=reason,
            )
        for each in self._measuring:
            each.sees = False

    def _first_required(self) -> Probe | None:
        return next((probe for probe in self._measuring if probe.required), None)

    @property
    def _deciding(self) -> list[int]:
        """The places of the probes that decide: they have seen the step, or do not look at it."""
        blind = [] if self.taps is not None else self._measuring
        return [place for place, probe in enumerate(self.probes) if probe not in blind]

    def scale(self, value_of: Callable[[keras.Variable], Any]) -> tf.Tensor:
        """The loss scale, given the values of variables before the step."""
        state = [(variable, value_of(variable)) for variable in state_of(self._model.optimizer)]
        known = [(variable, value) for variable, value in state if value is not None]
        if self._model.optimizer is None:
            return tf.ones(())
        with keras.StatelessScope(known):
            return self._model.optimizer.scale_loss(tf.ones(()))

    def begin(self, rows: Rows) -> tuple[Rows, Stopwatch | None]:
        """A replica's rows, and a stopwatch that is started, if a probe measures times."""
        if not self.timed:
            return rows, None
        x, *others = rows.data
        watch = Stopwatch(now_that(tensors_of(x)))
        # If nothing waited for it, the time would be taken whenever a thread is idle. If targets
        # and variables waited too, the step would be slower.
        return rows._replace(data=(held_until(watch.started, x), *others)), watch

    def measured(
        self,
        replica: Replica,
        rows: Rows,
        tapped: Tapped,
        new_values: Callable[[Sequence[keras.Variable]], list[tf.Tensor]],
        scale: tf.Tensor,
        times: Times | None,
    ) -> list[list[tf.Tensor]]:
        """What the probes measure on a replica.

        Args:
            rows: Its share of the batch.
            tapped: What it has of the step.
            new_values: Returns variables' values after the step.
            scale: The loss scale.
            times: The times of the step, if a probe measures them.
        """
        assert self.taps is not None
        trainable = self._model.trainable_variables
        view = StepView(
            replica=replica.id,
            replicas=self._group.count,
            rows=rows,
            taps=self.taps,
            tapped=tapped,
            update=NewValues(new_values(trainable), new_values(state_of(self._model.optimizer))),
            scale=scale,
            times=times,
        )
        return [probe.on_replica(view) for probe in self.probes]

    def gathered(self, measured: Sequence[list[list[tf.Tensor]]]) -> list[list[Any]]:
        """What each deciding probe has measured on all replicas.

        Args:
            measured: What the probes have measured on each replica of this process, if anything.
        """
        if not self._deciding:
            return []
        measured = [
            [of_replica[place] if of_replica else [] for place in self._deciding]
            for of_replica in measured
        ]
        flat = self._group.gather_values([tf.nest.flatten(of_replica) for of_replica in measured])
        found = [tf.nest.pack_sequence_as(measured[0], tensors) for tensors in flat]
        return [[of_replica[n] for of_replica in found] for n in range(len(self._deciding))]

    def verdict(self, seen: Sequence[list[Any]]) -> tf.Tensor | None:
        """Whether all probes allow the step; None if none of them can forbid it."""
        # Probes see all replicas, so they decide alike in every process.
        probes = [self.probes[place] for place in self._deciding]
        if not probes:
            return None
        with tf.device(self._group.hub):
            answers = [probe.allows(each) for probe, each in zip(probes, seen, strict=True)]
            known = [answer for answer in answers if answer is not None]
            allowed = tf.reduce_all(known) if known else None
            for probe, each in zip(probes, seen, strict=True):
                probe.collect(each, allowed)
        return allowed

    def logs_after(self, logs: Any, allowed: tf.Tensor) -> Any:
        """The logs; those before the step if it was not allowed."""
        if not isinstance(logs, dict):
            return logs
        with graph_internals.single_device():
            # Metrics have new values only if it was allowed.
            present = self._model.get_metrics_result()

        def chosen(name: str, value: Any) -> Any:
            if name not in present:
                return value
            return keras.tree.map_structure(
                lambda new, old: tf.where(
                    allowed, new, tf.cast(old, tf.convert_to_tensor(new).dtype)
                ),
                value,
                present[name],
            )

        return {name: chosen(name, value) for name, value in logs.items()}


def rows_if_alone(replica: Replica, batch: Batch, total: tf.Tensor, spec: Batch) -> Rows:
    """A replica's share if the first replica takes the whole batch."""
    if replica.id == 0:
        return Rows(batch, total, total)
    leaves = zip(keras.tree.flatten(batch), have_rows(spec), strict=True)
    nothing = [cut(leaf, 0, 0) if has_rows else leaf for leaf, has_rows in leaves]
    return Rows(keras.tree.pack_sequence_as(batch, nothing), tf.zeros_like(total), total)


def tapped_if_alone(replica: Replica, tapped: Tapped) -> Tapped:
    """What a replica has of a step that the first replica takes alone."""
    if replica.id == 0:
        return tapped
    zeros = [[tf.zeros_like(part) for part in parts] for parts in tapped.totals]
    own = [[part[:0] for part in parts] if len(parts) > 1 else parts for parts in zeros]
    return tapped._replace(
        own=[[Own(None, part) for part in parts] for parts in own],
        predictions=[
            leaf if leaf is None or not leaf.shape.rank else leaf[:0] for leaf in tapped.predictions
        ],
    )
