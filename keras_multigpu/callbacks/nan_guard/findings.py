"""Describes what `NaNGuard` found: the replica, the layer, the example, and the cause."""

import dataclasses
from collections.abc import Sequence

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.nan_guard.probe import ROWS
from keras_multigpu.checks import printable
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.run import TrainingRun

LISTED = 3
"""How many layers are named; the others are counted."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A number that was not finite. Its `str` is a line to print.

    Attributes:
        epoch: The epoch, counted from zero.
        step: The step in it, counted from zero.
        what: `"loss"`, `"gradient"`, `"statistics"`, `"weight"` or `"optimizer"`.
        cause: Why, as far as the numbers show, as a sentence.
        replicas: The replicas where it started.
        devices: Their devices.
        layers: The layers whose gradients, weights or outputs were not finite.
        variables: The paths of their variables.
        array: `"x"`, `"y"`, `"sample_weight"` or `"y_pred"`, if one of them was not finite.
        position: The first such example's place in the global batch, counted from zero.
        example: Its file or number in the data, if the order of the data is known.
    """

    epoch: int
    step: int
    what: str
    cause: str
    replicas: tuple[int, ...] = ()
    devices: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    array: str | None = None
    position: int | None = None
    example: str | None = None

    def __str__(self) -> str:
        parts = [f"Epoch {self.epoch + 1}, step {self.step + 1}: {NAMES[self.what]} not finite"]
        if self.replicas:
            where = [f"{r} ({d})" for r, d in zip(self.replicas, self.devices, strict=True)]
            parts.append(f" on replica {', '.join(where)}")
        if self.layers:
            parts.append(f", in {first_names(self.layers)}")
        parts.append(f". {self.cause}")
        if self.position is not None:
            name = f" ({self.example})" if self.example else ""
            parts.append(f" First one: example {self.position} of the batch{name}.")
        return printable("".join(parts))


NAMES = {
    "loss": "the loss is",
    "gradient": "a gradient is",
    "statistics": "a layer's statistics are",
    "weight": "a new weight is",
    "optimizer": "the optimizer's state is",
}

CAUSES = {
    "x": "An input is not finite: check the data.",
    "y": "A target is not finite: check the data.",
    "sample_weight": "A sample weight is not finite: check the data.",
    "y_pred": "Inputs and weights are finite, but a prediction is not: the forward pass overflows.",
    "loss": "Predictions and targets are finite, but the loss function of them is not.",
    "gradient": "The loss is finite, but its gradient is not: the backward pass overflows or "
    "divides by zero.",
    "statistics": "The gradients are finite, but the state of a layer, such as a moving variance, "
    "overflows.",
    "weight": "The gradients are finite, but the update is not: usually the rate is too high.",
    "optimizer": "Gradients and weights are finite, but the state of the optimizer, such as "
    "squares of gradients, overflows.",
}


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a probe recorded of one step: a row for each replica, a column for each fact."""

    table: np.ndarray
    columns: Sequence[tuple[str, str]]

    def select(self, kind: str, name: str | None = None) -> np.ndarray:
        return self.table[:, [k == kind and name in (None, n) for k, n in self.columns]]

    def replicas(self, kind: str, name: str | None = None) -> list[int]:
        return np.flatnonzero(self.select(kind, name).any(axis=1)).tolist()

    def names(self, kind: str) -> list[str]:
        """The names of the facts of a kind that are true on any replica."""
        names = [name for column, name in self.columns if column == kind]
        return [names[index] for index in np.flatnonzero(self.select(kind).any(axis=0))]

    @property
    def what(self) -> str:
        """The kind of the first number in a step that was not finite."""
        if self.replicas("loss", "total"):
            return "loss"
        kinds = ("gradient", "weight", "statistics", "optimizer")
        return next(kind for kind in kinds if self.replicas(kind))

    @property
    def cause(self) -> str:
        """The kind of fact that explains the others."""
        what = self.what
        if what in ("gradient", "statistics"):
            # Behind an activation that saturates, predictions do not show an infinite input.
            # All replicas have the same statistics.
            bad = set(self.replicas("gradient")) if what == "gradient" else set()
            rows = {kind: set(self.replicas(kind)) for kind in ROWS}
            return next((kind for kind in ROWS if rows[kind] and bad <= rows[kind]), what)
        if what != "loss":
            return what
        wrong = [kind for kind in ROWS if self.replicas(kind)]
        # Inputs that are not finite do no harm if the predictions are.
        harmful = [kind for kind in wrong if kind != "x" or "y_pred" in wrong]
        return harmful[0] if harmful else "loss"

    def position(self, kind: str) -> int | None:
        """The position in the global batch of the first row of this kind."""
        rows = self.select(kind)
        for replica in self.replicas(kind):
            row = rows[replica][rows[replica] > 0].min() - 1
            return int(self.select("start")[replica, 0] + row)
        return None


def describe(facts: Facts, epoch: int, step: int, run: TrainingRun, model: keras.Model) -> Finding:
    """What went wrong in a step, from the facts that a probe recorded."""
    what, cause = facts.what, facts.cause
    replicas = facts.replicas(cause, "own" if cause == "loss" else None)
    variables = facts.names("gradient" if what == "loss" else what)
    # If the step was rejected, the weights are still those from before it.
    before = find_bad_weights(model)
    place = facts.position(cause) if cause in ROWS else None
    words = CAUSES[cause]
    if what == "loss" and cause in ("y_pred", "loss") and before:
        words = f"{first_names(before)} had values that are not finite before this step."
        variables, place = before, None
    return Finding(
        epoch=epoch,
        step=step,
        what=what,
        cause=words,
        replicas=tuple(replicas),
        devices=tuple(map(run.group.name_of, replicas)),
        layers=layers_of(variables) if what != "loss" or before else (),
        variables=tuple(variables),
        array=None if place is None else cause,
        position=place,
        example=None if place is None else run.feed.source.example_at(run.epoch, step, place),
    )


def first_names(names: Sequence[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def layers_of(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path.rpartition("/")[0] or path for path in paths))


def find_bad_weights(model: keras.Model) -> list[str]:
    """The paths of the weights that are not finite on some replica."""
    return [
        variable.path
        for variable in model.variables
        if any(
            copy.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(copy))
            for copy in copies_of(variable)
        )
    ]
