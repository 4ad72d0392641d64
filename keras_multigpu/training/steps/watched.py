"""What probes are shown of a training step, and what follows from what they say."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.training.replica_group import Replica, ReplicaGroup
from keras_multigpu.training.shares import Batch, Rows, cut, is_cut
from keras_multigpu.training.steps.probes import NewValues, Probe, StepView, Times
from keras_multigpu.training.steps.step_record import recording
from keras_multigpu.training.steps.taps import Tapped, Taps
from keras_multigpu.training.variables.adjusted_schedule import state_of


class Watched:
    """The probes of one step.

    Attributes:
        taps: What they look at; None where none measures anything.
        timed: Whether one wants to know times.
    """

    def __init__(self, model: keras.Model, group: ReplicaGroup, probes: Sequence[Probe]) -> None:
        self._model, self._group, self.probes = model, group, probes
        self._measuring = [p for p in probes if type(p).on_replica is not Probe.on_replica]
        self.timed = any(probe.timed for probe in self._measuring)
        self.taps: Taps | None = None

    @property
    def measures(self) -> bool:
        return bool(self._measuring)

    def before_step(self) -> None:
        for probe in self.probes:
            probe.before_step()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the step that is traced, or runs, in this context; it may show nothing."""
        if not self.measures:
            yield
            return
        with recording(self._model) as record:
            yield
        trains = bool(self._model.trainable_variables)
        if len(record.losses) == 1 and (record.gradients or not trains):
            self.taps = Taps(record, any(probe.by_piece for probe in self._measuring))
        elif (probe := self._not_shown()) is not None:
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
        """The step runs as it is: nothing is shown, or a `ValueError`."""
        probe, self.taps = self._not_shown(), None
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

    def _not_shown(self) -> Probe | None:
        return next((probe for probe in self._measuring if probe.required), None)

    @property
    def _asked(self) -> list[int]:
        """The places of the probes that decide, which have seen the step or do not look."""
        blind = [] if self.taps is not None else self._measuring
        return [place for place, probe in enumerate(self.probes) if probe not in blind]

    def scale(self, value_of: Callable[[keras.Variable], Any]) -> tf.Tensor:
        """The factor of the loss, given the values of variables before the step."""
        state = [(variable, value_of(variable)) for variable in state_of(self._model.optimizer)]
        known = [(variable, value) for variable, value in state if value is not None]
        if self._model.optimizer is None:
            return tf.ones(())
        with keras.StatelessScope(known):
            return self._model.optimizer.scale_loss(tf.ones(()))

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
            tapped: What it has of the step.
            new_values: Gives variables' values after the step.
            scale: The factor of the loss.
            times: When things happened, if that is of interest.
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

    def everyones(self, measured: Sequence[list[list[tf.Tensor]]]) -> list[list[Any]]:
        """What each probe that decides has measured on all replicas."""
        measured = [[of_replica[place] for place in self._asked] for of_replica in measured]
        if not self._asked:
            return []
        flat = self._group.everyones([tf.nest.flatten(of_replica) for of_replica in measured])
        everyones = [tf.nest.pack_sequence_as(measured[0], tensors) for tensors in flat]
        return [[of_replica[n] for of_replica in everyones] for n in range(len(self._asked))]

    def verdict(self, seen: Sequence[list[Any]]) -> tf.Tensor | None:
        """Whether all probes allow the step, which see all replicas and so decide alike."""
        probes = [self.probes[place] for place in self._asked]
        if not probes:
            return None
        with tf.device(self._group.hub):
            answers = [probe.allows(each) for probe, each in zip(probes, seen, strict=True)]
            known = [answer for answer in answers if answer is not None]
            allowed = tf.reduce_all(known) if known else None
            for probe, each in zip(probes, seen, strict=True):
                probe.collect(each, allowed)
        return allowed

    def kept(self, logs: Any, allowed: tf.Tensor) -> Any:
        """The logs, as they were before where the step was not allowed."""
        if not isinstance(logs, dict):
            return logs
        with graph_internals.single_device():
            # Metrics have their new values only where it was.
            present = self._model.get_metrics_result()

        def chosen(name: str, value: Any) -> Any:
            if name not in present:
                return value
            return keras.tree.map_structure(
                lambda new, old: tf.where(allowed, new, tf.cast(old, new.dtype)),
                value,
                present[name],
            )

        return {name: chosen(name, value) for name, value in logs.items()}


def rows_of_one(replica: Replica, batch: Batch, total: tf.Tensor, spec: Batch) -> Rows:
    """The share of a replica where the first one takes the whole batch."""
    if replica.id == 0:
        return Rows(batch, total, total)
    nothing = keras.tree.map_structure(
        lambda form, leaf: cut(leaf, 0, 0) if is_cut(form) else leaf, spec, batch
    )
    return Rows(nothing, tf.zeros_like(total), total)


def part_of_one(replica: Replica, tapped: Tapped) -> Tapped:
    """What a replica has of a step that the first one takes alone."""
    # No replica's examples have a loss of their own: it is that of all.
    tapped = tapped._replace(loss=[])
    if replica.id == 0:
        return tapped
    zeros = [[tf.zeros_like(part) for part in parts] for parts in tapped.own]
    return tapped._replace(
        own=[[part[:0] for part in parts] if len(parts) > 1 else parts for parts in zeros],
        predictions=[
            leaf if leaf is None or not leaf.shape.rank else leaf[:0] for leaf in tapped.predictions
        ],
        piece=[tf.zeros_like(piece) for piece in tapped.piece],
    )
