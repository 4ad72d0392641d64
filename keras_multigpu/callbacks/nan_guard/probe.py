"""The part of `NaNGuard` inside the step: finds what is not finite, and rejects the step.

Each replica first checks one number: the sum of the squares of everything that replicas have summed
and of the new weights. Only if that is not finite does it look at each of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.batch_sizes import share_bounds
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.variables.adjusted_schedule import state_of
from keras_multigpu.training.watching.probe import Probe, StepView

COUNTERS = 6
ACTIVE, STEPS, FOUND_AT, SKIPPED, STREAK, LONGEST = range(COUNTERS)
"""The indices of the counters: whether the guard is active, the steps so far, the step of a finding
that was not read yet, the rejected steps, the bad steps in a row, and the longest such row."""

NOTHING_FOUND = -1
# Smaller tensors are joined before they are read, because reading each costs more.
SMALL = 2**16

ROWS = ("x", "y", "sample_weight", "y_pred")
"""A fact of these kinds is the number of a row, from one; other facts are true or false."""


class FiniteProbe(Probe):
    """Rejects steps with a number that is not finite, and records the facts of the first.

    Args:
        model: The model.
        skips: Whether later steps are applied before a finding was read.

    Attributes:
        columns: The kind of each fact, and a variable's path or an array's name.
        counters: See `ACTIVE` and the other indices.
        facts: One row for each replica, filled when something is found.
    """

    callback = "NaNGuard"

    def __init__(self, model: keras.Model, skips: bool) -> None:
        self.model = model
        self.skips = self.settings = skips
        self.columns: list[tuple[str, str]] = []
        self.counters: Any = None
        self.facts: Any = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        """Create the variables once, because compiled steps contain them."""
        if self.counters is None:
            with tf.device(HOST):
                self.counters = tf.Variable(tf.zeros([COUNTERS], tf.int64), trainable=False)
                self.facts = tf.Variable(
                    tf.zeros([0, 0], tf.int64), shape=[None, None], trainable=False
                )
        self.set({**dict.fromkeys(range(COUNTERS), 0), FOUND_AT: NOTHING_FOUND})

    def set(self, values: dict[int, int]) -> None:
        counters = self.counters.numpy()
        counters[list(values)] = list(values.values())
        self.counters.assign(counters)

    def read(self) -> np.ndarray:
        """The counters. Waits for the devices."""
        return self.counters.numpy()

    @property
    def state(self) -> dict[str, Any]:
        return {
            "counters": self.read(),
            "facts": self.facts.numpy(),
            "columns": [list(column) for column in self.columns],
        }

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        values = np.asarray(state["counters"]).tolist()
        self.set({**dict(enumerate(values)), ACTIVE: int(self.read()[ACTIVE])})
        self.facts.assign(state["facts"])
        self.columns = [(kind, name) for kind, name in state["columns"]]

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        """Whether this replica rejects the step, and the facts if so."""
        # The optimizer's state overflows only if the squares of these gradients do.
        watched = [*view.everyones_sums, *view.update.trainable]
        healthy = tf.math.is_finite(square_sum(watched))
        nothing = tf.constant(False), tf.zeros([0], tf.int64)
        return list(tf.cond(healthy, lambda: nothing, lambda: self._details(view)))

    def _details(self, view: StepView) -> tuple[tf.Tensor, tf.Tensor]:
        facts = list(self._facts(view))
        self.columns = [column for column, _ in facts]
        values = tf.stack([tf.cast(value, tf.int64) for _, value in facts])
        counts = [value for (kind, _), value in facts if kind not in ("start", *ROWS)]
        return tf.reduce_any(tf.stack(counts)), values

    def _facts(self, view: StepView) -> Iterator[tuple[tuple[str, str], tf.Tensor]]:
        yield ("start", ""), share_bounds(view.global_batch_size, view.replica, view.replicas)[0]
        yield ("loss", "own"), ~finite([view.loss])
        yield ("loss", "total"), ~finite([view.total_loss])
        yield ("statistics", ""), ~finite(view.statistics)
        # Dynamic loss scaling makes gradients overflow, and skips such steps itself. Once the scale
        # is down to one, it is not the cause.
        counts = view.loss_scale <= 1.0
        for variable, gradient in zip(view.variables, view.gradients, strict=True):
            yield ("gradient", variable.path), ~finite([gradient]) & counts
        for kind, variables, values in (
            ("weight", self.model.trainable_variables, view.update.trainable),
            ("optimizer", state_of(self.model.optimizer), view.update.optimizer),
        ):
            for variable, value in zip(variables, values, strict=True):
                yield (kind, variable.path), ~finite([value])
        for kind, data in zip(ROWS, (*view.batch, view.y_pred), strict=True):
            for path, leaf in keras.tree.flatten_with_path(data):
                if leaf is not None and leaf.dtype.is_floating and leaf.shape.rank:
                    yield (kind, "/".join(map(str, path))), first_bad_row(leaf)

    def allows(self, measured: list[list[tf.Tensor]]) -> tf.Tensor:
        """Reject a bad step, and steps after an earlier finding until that is handled."""
        with tf.device(HOST):
            counters = self.counters.read_value()
        forbidden = tf.reduce_any(tf.stack([bad for bad, _ in measured]))
        if not self.skips:
            forbidden |= counters[FOUND_AT] != NOTHING_FOUND
        return ~(forbidden & (counters[ACTIVE] == 1))

    def collect(self, measured: list[list[tf.Tensor]], allowed: tf.Tensor | None) -> None:
        """Count the step, and store the facts of the first finding."""
        assert allowed is not None
        with tf.device(HOST):
            before = tf.unstack(self.counters.read_value())
            active = before[ACTIVE]
            bad = tf.reduce_max([tf.cast(bad, tf.int64) for bad, _ in measured]) * active
            first = (bad == 1) & (before[FOUND_AT] == NOTHING_FOUND)
            tf.cond(first, lambda: self._keep(measured), lambda: False)
            after = list(before)
            after[STEPS] += active
            after[FOUND_AT] = tf.where(first, before[STEPS], before[FOUND_AT])
            after[SKIPPED] += tf.cast(~allowed, tf.int64) * active
            after[STREAK] = (before[STREAK] + bad) * bad
            after[LONGEST] = tf.maximum(before[LONGEST], after[STREAK])
            self.counters.assign(tf.stack(after), read_value=False)

    def _keep(self, measured: list[list[tf.Tensor]]) -> bool:
        facts = [own for _, own in measured]
        width = tf.reduce_max([tf.size(own) for own in facts])
        # A replica that found nothing has no facts.
        rows = [tf.pad(own, [[0, width - tf.size(own)]]) for own in facts]
        self.facts.assign(tf.stack(rows), read_value=False)
        return True


def square_sum(tensors: Sequence[Any]) -> tf.Tensor:
    """The sum of squares: not finite if an element is not, or if it overflows."""
    large: list[tf.Tensor] = []
    small: dict[tf.DType, list[tf.Tensor]] = {}
    for tensor in floating(tensors):
        if (tensor.shape.num_elements() or SMALL) < SMALL:
            small.setdefault(tensor.dtype, []).append(tf.reshape(tensor, [-1]))
        else:
            large.append(tensor)
    large += [tf.concat(parts, axis=0) for parts in small.values()]
    # The squares of float16 would overflow too easily.
    wide = [tf.cast(one, tf.float32) if one.dtype == tf.float16 else one for one in large]
    # One pass over each; `is_finite` and `reduce_all` would first write a flag for each element.
    sums = [tf.cast(tf.nn.l2_loss(one), tf.float32) for one in wide]
    return tf.add_n(sums) if sums else tf.zeros(())


def finite(tensors: Sequence[Any]) -> tf.Tensor:
    flags = [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in floating(tensors)]
    return tf.reduce_all(tf.stack(flags)) if flags else tf.constant(True)


def floating(tensors: Sequence[Any]) -> list[tf.Tensor]:
    """The floating-point tensors; for sparse gradients, their values."""
    dense = [t.values if isinstance(t, tf.IndexedSlices) else t for t in tensors]
    return [tensor for tensor in dense if tensor.dtype.is_floating]


def first_bad_row(leaf: Any) -> tf.Tensor:
    """The first row with a number that is not finite, counted from one; zero if there is none."""
    if isinstance(leaf, tf.SparseTensor):
        rows = tf.boolean_mask(leaf.indices[:, 0], ~tf.math.is_finite(leaf.values))
    else:
        dense = leaf.to_tensor() if isinstance(leaf, tf.RaggedTensor) else leaf
        bad = tf.reduce_any(~tf.math.is_finite(dense), axis=list(range(1, dense.shape.rank)))
        rows = tf.where(bad)[:, 0]
    # The sentinel is larger than any row.
    first = tf.reduce_min(tf.concat([rows + 1, [2**62]], axis=0))
    return tf.where(first < 2**62, first, 0)
