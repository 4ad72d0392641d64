"""What `NaNGuard` found, in words: the replica, the layer, the example, and the cause."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.callbacks.nan_guard.probe import ROWS
from keras_multigpu.checks import printable
from keras_multigpu.devices import short_name
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.run import TrainingRun

LISTED = 3
"""How many layers are named; the others are counted."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """A number that was not finite. Its `str` is a line for people.

    Attributes:
        epoch: The epoch, counted from zero.
        step: The step in it, counted from zero.
        what: `"loss"`, `"gradient"`, `"statistics"`, `"weight"` or `"optimizer"`.
        cause: Why, as far as the numbers show: a sentence.
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
            parts.append(f", in {listed(self.layers)}")
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
    """What a probe kept of one step: a row for each replica, a column for each `(kind, name)`."""

    table: np.ndarray
    columns: Sequence[tuple[str, str]]

    def of(self, kind: str, name: str | None = None) -> np.ndarray:
        return self.table[:, [k == kind and name in (None, n) for k, n in self.columns]]

    def replicas(self, kind: str, name: str | None = None) -> list[int]:
        return np.flatnonzero(self.of(kind, name).any(axis=1)).tolist()

    def names(self, kind: str) -> list[str]:
        """The names for which a kind of fact is true on any replica."""
        names = [name for column, name in self.columns if column == kind]
        return [names[index] for index in np.flatnonzero(self.of(kind).any(axis=0))]

    @property
    def what(self) -> str:
        """The first thing in a step that was not finite."""
        if self.replicas("loss", "total"):
            return "loss"
        kinds = ("gradient", "weight", "statistics", "optimizer")
        return next(kind for kind in kinds if self.replicas(kind))

    @property
    def cause(self) -> str:
        """The kind of fact that explains the others."""
        if self.what in ("gradient", "statistics"):
            # After an activation that saturates, predictions do not show an infinite input.
            bad = set(self.replicas(self.what))
            return next((kind for kind in ROWS if bad <= {*self.replicas(kind)}), self.what)
        if self.what != "loss":
            return self.what
        wrong = [kind for kind in ROWS if self.replicas(kind)]
        if "y_pred" not in wrong:
            # Inputs that are not finite do no harm if the predictions are.
            wrong = [kind for kind in wrong if kind != "x"]
        return next(iter(wrong), "loss")

    def position(self, kind: str) -> tuple[int, int] | None:
        """The first row of this kind: its replica, and its position in the global batch."""
        rows = self.of(kind)
        for replica in self.replicas(kind):
            row = rows[replica][rows[replica] > 0].min() - 1
            return replica, int(self.of("start")[replica, 0] + row)
        return None


def finding_of(
    facts: Facts, epoch: int, step: int, run: TrainingRun, model: keras.Model
) -> Finding:
    what, cause = facts.what, facts.cause
    replicas = facts.replicas(cause, "own" if cause == "loss" else None)
    variables = facts.names("gradient" if what == "loss" else what)
    before = [path for path, _ in copies_not_finite(model)]
    place = facts.position(cause) if cause in ROWS else None
    words = CAUSES[cause]
    if what == "loss" and cause in ("y_pred", "loss") and before:
        words = f"{listed(before)} had values that are not finite before this step."
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
        array=cause if place else None,
        position=place[1] if place else None,
        example=run.feed.source.example_at(run.epoch, step, place[1]) if place else None,
    )


def listed(names: Sequence[str]) -> str:
    rest = len(names) - LISTED
    return ", ".join(names[:LISTED]) + (f" and {rest} more" if rest > 0 else "")


def layers_of(paths: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(path.rpartition("/")[0] or path for path in paths))


def copies_not_finite(model: keras.Model) -> list[tuple[str, dict[int, str]]]:
    """Weights that are not finite, each with the replicas of the bad copies and their devices."""
    found = []
    for variable in model.variables:
        bad = {
            replica: short_name(part.device)
            for replica, part in enumerate(copies_of(variable))
            if part.dtype.is_floating and not tf.reduce_all(tf.math.is_finite(part))
        }
        if bad:
            found.append((variable.path, bad))
    return found


def finding_between_steps(
    model: keras.Model, logs: dict[str, Any], epoch: int, step: int
) -> Finding | None:
    """What is not finite in the logs and weights after a step, if anything."""
    of_training = {n: v for n, v in logs.items() if "loss" in n and not n.startswith("val_")}
    losses = [name for name, value in of_training.items() if not np.isfinite(value).all()]
    weights = copies_not_finite(model)
    if not losses and not weights:
        return None
    replicas = {replica: device for _, bad in weights for replica, device in bad.items()}
    variables = [path for path, _ in weights]
    what = f"The logs' {', '.join(losses)}" if losses else "The loss is finite; weights"
    return Finding(
        epoch=epoch,
        step=step,
        what="loss" if losses else "weight",
        cause=f"{what} went wrong at this step or since the previous check.",
        replicas=tuple(sorted(replicas)),
        devices=tuple(replicas[replica] for replica in sorted(replicas)),
        layers=layers_of(variables),
        variables=tuple(variables),
    )
