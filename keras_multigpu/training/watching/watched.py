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
from keras_multigpu.training.variables.adjusted_schedule import state_of
from keras_multigpu.training.watching.probe import NewValues, Probe, StepView
from keras_multigpu.training.watching.recorded import Recorded, Seen
from keras_multigpu.training.watching.stopwatch import Stopwatch, Times, now_that


class Watched:
    """The probes of one step.

    Attributes:
        recorded: What they look at; None if no probe measures, or the step shows nothing.
        timed: Whether a probe measures times.
    """

    def __init__(self, model: keras.Model, group: ReplicaGroup, probes: Sequence[Probe]) -> None:
        self._model, self._group, self.probes = model, group, probes
        self._measuring = [p for p in probes if type(p).on_replica is not Probe.on_replica]
        self.timed = any(probe.timed for probe in self._measuring)
        self.recorded: Recorded | None = None

    @property
    def may_forbid(self) -> bool:
        """Whether a probe may find that a step must not change anything."""
        return any(type(probe).allows is not Probe.allows for probe in self.probes)

    def before_step(self) -> None:
        for probe in self.probes:
            probe.before_step()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the step that is traced, or runs, in this context."""
        if not self._measuring:
            yield
            return
        recorded = Recorded()
        with recorded.recording(self._model):
            yield
        trains = bool(self._model.trainable_variables)
        is_known = len(recorded.losses) == 1 and bool(recorded.gradients or not trains)
        self._show(
            recorded if is_known else None,
            "this `train_step`, whose loss or gradients are unknown",
            "one call of `self.compute_loss`, and gradients that an optimizer's `apply` or "
            "`apply_gradients` is given",
            "take the loss from `compute_loss`",
        )

    def unsplit(self, reason: str) -> None:
        """Show nothing of a step that runs unsplit; an error if a probe requires to see it."""
        self._show(
            None,
            "this step, which runs unsplit",
            "a step that reads and assigns variables by known operations",
            "change what prevents the split",
            reason=reason,
        )

    def _show(
        self, recorded: Recorded | None, step: str, expected: str, fix: str, **received: Any
    ) -> None:
        """Show what was recorded; an error if that is nothing, and a probe requires to see it."""
        self.recorded = recorded
        for probe in self._measuring:
            probe.sees = recorded is not None
            if probe.required and not probe.sees:
                raise value_error(
                    f"`{probe.callback}` cannot look inside {step}.",
                    f"Expected {expected}.",
                    f"Leave out the callback, or {fix}.",
                    callback=probe.callback,
                    **received,
                )

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
        seen: Seen,
        before: Callable[[keras.Variable], tf.Tensor | None],
        after: Callable[[Sequence[keras.Variable]], list[tf.Tensor]],
        times: Times | None,
    ) -> list[list[tf.Tensor]]:
        """What the probes measure on a replica.

        Args:
            before: Returns a variable's value before the step, if the step has it.
            after: Returns variables' values after the step.
        """
        assert self.recorded is not None
        optimizer, scale = self._model.optimizer, tf.ones(())
        state = state_of(optimizer)
        known = [(v, value) for v in state if (value := before(v)) is not None]
        if optimizer is not None:
            with keras.StatelessScope(known):
                scale = optimizer.scale_loss(scale)
        update = NewValues(after(self._model.trainable_variables), after(state))
        count = self._group.count
        view = StepView(replica.id, count, update, scale, times, rows, self.recorded, seen)
        return [probe.on_replica(view) for probe in self.probes]

    def gathered(self, measured: Sequence[list[list[tf.Tensor]]]) -> list[tuple[Probe, list[Any]]]:
        """The probes that decide, each with what it has measured on all replicas.

        Those that look at steps do not decide on one that shows nothing.
        """
        if self.recorded is None:
            nothing: list[Any] = [[]] * self._group.count
            return [(probe, nothing) for probe in self.probes if probe not in self._measuring]
        flat = self._group.gather_values([tf.nest.flatten(of_replica) for of_replica in measured])
        found = [tf.nest.pack_sequence_as(measured[0], tensors) for tensors in flat]
        return list(zip(self.probes, map(list, zip(*found, strict=True)), strict=True))

    def verdict(self, seen: Sequence[tuple[Probe, list[Any]]]) -> tf.Tensor | None:
        """Whether all probes allow the step; None if none of them can forbid it."""
        if not seen:
            return None
        # Probes see all replicas, so they decide alike in every process.
        with tf.device(self._group.first_device):
            answers = [probe.allows(each) for probe, each in seen]
            known = [answer for answer in answers if answer is not None]
            allowed = tf.reduce_all(known) if known else None
            for probe, each in seen:
                probe.collect(each, allowed)
        return allowed

    def logs_after(self, logs: Any, allowed: tf.Tensor) -> Any:
        """The logs; those before the step if it was not allowed."""
        if not isinstance(logs, dict):
            return logs
        with graph_internals.single_device():
            # Metrics have new values only if it was allowed.
            present = self._model.get_metrics_result()

        def chosen(new: Any, old: Any) -> tf.Tensor:
            return tf.where(allowed, new, tf.cast(old, tf.convert_to_tensor(new).dtype))

        both = {name: (logs[name], present[name]) for name in logs if name in present}
        return logs | {name: keras.tree.map_structure(chosen, *pair) for name, pair in both.items()}


def if_alone(
    replica: Replica, batch: Batch, total: tf.Tensor, spec: Batch, seen: Seen
) -> tuple[Rows, Seen]:
    """A replica's share, and what it has of the step, if the first one takes the whole batch."""
    if replica.id == 0:
        return Rows(batch, total, total), seen
    leaves = zip(keras.tree.flatten(batch), have_rows(spec), strict=True)
    nothing = [cut(leaf, 0, 0) if has_rows else leaf for leaf, has_rows in leaves]
    rows = Rows(keras.tree.pack_sequence_as(batch, nothing), tf.zeros_like(total), total)
    return rows, seen._replace(predictions=[cut(leaf, 0, 0) for leaf in seen.predictions])
