"""The likely cause of a difference, found on one device with one replica's rows at a time."""

import functools
import re
from collections.abc import Callable
from typing import NamedTuple

import keras
import numpy as np

from keras_multigpu.batch_sizes import shares
from keras_multigpu.keras_internals.model_internals import overridden
from keras_multigpu.training.shares import Batch
from keras_multigpu.training.shares import rows as rows_of_batch
from keras_multigpu.verification.batches import number_of_examples
from keras_multigpu.verification.gradient_probe import (
    GradientProbe,
    Gradients,
    Outcome,
    equal,
    proportional,
    weighted_sum,
)
from keras_multigpu.verification.layer_probe import LayerProbe, Place, Rows
from keras_multigpu.verification.participants import Recipe, on


class Cause(NamedTuple):
    """Why replicas differ from one device, and what to do about it."""

    what: str
    fix: str
    error: str | None = None


class Trial:
    """One training step on one device: over the whole batch, again, and over each share."""

    def __init__(self, recipe: Recipe, batch: Batch, replicas: int) -> None:
        model = recipe.model()
        self._recipe, self._model = recipe, model
        self.custom = bool(overridden(model, "train_step"))
        exempt: list[keras.Layer] = []
        self.tolerance = 1e-3 if recipe.precision == "float32" else 5e-2
        layers = LayerProbe(model, exempt, self.tolerance)
        gradients = GradientProbe(model, self.custom)
        size = number_of_examples(batch)
        self.shares = [Rows(a, b, size) for a, b in shares(size, replicas) if b > a]
        self.whole: Outcome = layers.record(lambda: gradients.run(batch))
        everything = Rows(0, size, size)
        # What differs in a second run over the same rows was drawn at random.
        self.again = layers.replay(everything, functools.partial(gradients.run, batch))
        self.replays = [
            layers.replay(
                share,
                functools.partial(gradients.run, rows_of_batch(batch, share.start, share.stop)),
            )
            for share in self.shares
        ]
        # An override of `compute_loss` sees the local batch where a `train_step` calls it.
        self.loss_is_global = gradients.called_compute_loss and not overridden(
            model, "compute_loss"
        )

    @property
    def parts(self) -> list[Outcome]:
        results = [replay.result for replay in self.replays]
        return [] if any(result is None for result in results) else results

    @property
    def fractions(self) -> list[float]:
        return [(share.stop - share.start) / share.batch_size for share in self.shares]

    def equals_whole(self, gradients: Gradients) -> bool:
        return equal(gradients, self.whole.gradients, self.tolerance)

    def name(self, place: keras.Operation) -> str:
        return self._recipe.name_of(self._model, place)

    def describe(self, place: Place) -> str:
        """A layer with its name and class, for the beginning of a sentence."""
        if place is None:
            return "The training step"
        if isinstance(place, keras.Model):
            return f"The `call` of {self.name(place)} ({type(place).__name__})"
        kind = "Layer" if isinstance(place, keras.Layer) else "Operation"
        return f"{kind} {self.name(place)} ({type(place).__name__})"


def of_difference(recipe: Recipe, batch: Batch, replicas: int) -> Cause:
    try:
        with on(recipe.device):
            trial = Trial(recipe, batch, replicas)
    except Exception:  # The probes run the user's code eagerly, which it may not allow.
        return UNKNOWN
    # The order counts: random draws, for example, look like a layer that mixes examples.
    judges: list[Callable[[Trial], Cause | None]] = [
        random_draws,
        failing_layer,
        mixing_layer,
        added_loss,
        own_train_step,
        batch_coupled_loss,
    ]
    return next(filter(None, (judge(trial) for judge in judges)), UNKNOWN)


def of_crash(recipe: Recipe, batch: Batch, replicas: int) -> Cause:
    try:
        with on(recipe.device):
            trial = Trial(recipe, batch, replicas)
    except Exception:  # As above; the error itself is reported in any case.
        return CRASH
    return failing_layer(trial) or CRASH


def random_draws(trial: Trial) -> Cause | None:
    """Draws that could not be switched off."""
    again = trial.again
    if again.differing:
        where = trial.describe(again.differing[0])
    elif again.result is not None and not trial.equals_whole(again.result.gradients):
        where = trial.describe(None)
    else:
        return None
    return Cause(
        f"{where} draws random numbers that cannot be switched off, and replicas draw "
        "differently by design, so this model cannot be compared.",
        "To compare the rest, build it without the draws for this check.",
    )


def failing_layer(trial: Trial) -> Cause | None:
    """A layer that runs on the whole batch but not on a share."""
    failed = [replay for replay in trial.replays if replay.error is not None]
    if not failed:
        return None
    return Cause(
        f"{trial.describe(failed[0].failing)} runs on the whole batch but not on one replica's "
        "share of it. Most likely a reshape in it has the batch size written in.",
        "Write -1 for the batch axis, as in `keras.ops.reshape(x, (-1, 28, 28))`.",
        summary(failed[0].error),
    )


def mixing_layer(trial: Trial) -> Cause | None:
    """A layer whose output for an example depends on the others in its batch."""
    places = list(dict.fromkeys(place for replay in trial.replays for place in replay.differing))
    if not places:
        return None
    return Cause(
        f"{trial.describe(places[0])} mixes the examples of its batch, or talks to other replicas: "
        "what it computes for an example depends on the others, and a replica sees its share only.",
        "Let each example's result depend on that example alone, or move what combines "
        "examples into `compute_loss`, which is called with the global batch.",
    )


def added_loss(trial: Trial) -> Cause | None:
    """An `add_loss` that is not a mean over examples."""
    if not trial.parts:
        return None
    columns = zip(*(part.added_losses for part in trial.parts), strict=True)
    for (layer, whole), column in zip(trial.whole.added_losses, columns, strict=True):
        pairs = zip(trial.fractions, column, strict=True)
        mean = sum(fraction * loss for fraction, (_, loss) in pairs)
        if not np.isclose(mean, whole, rtol=trial.tolerance, atol=1e-7):
            return Cause(
                f"{trial.describe(layer)} adds a loss that is not a mean over the examples.",
                "Pass a mean to `add_loss`, as in `self.add_loss(ops.mean(penalty))`: replicas "
                "weigh it by their part of the batch.",
            )
    return None


def own_train_step(trial: Trial) -> Cause | None:
    """A `train_step` of the user's own that does not know about other replicas."""
    if not trial.custom or not trial.parts:
        return None
    parts = [part.gradients for part in trial.parts]
    means = weighted_sum(parts, trial.fractions)
    sums = weighted_sum(parts, [1.0] * len(parts))
    if trial.equals_whole(sums):
        return None
    if not trial.equals_whole(means):
        return Cause(
            "`train_step` computes its loss from the batch as a whole (its examples are coupled, "
            "or their order counts), and a replica has its own share only.",
            "Override `compute_loss` instead, which is called with the global batch.",
        )
    if trial.loss_is_global:
        return None
    return Cause(
        "`train_step` divides its loss by the local batch: each replica applies the mean over "
        "its own share, and the sum of N such means is N times too large.",
        "Take the loss from `self.compute_loss(x, y, y_pred, sample_weight)`, which divides by "
        "the global batch.",
    )


def batch_coupled_loss(trial: Trial) -> Cause | None:
    """A compiled loss whose value for an example depends on the others."""
    if trial.custom:
        return None
    for share, part in zip(trial.shares, trial.parts, strict=False):
        for whole, gradient in zip(trial.whole.gradients, part.gradients, strict=True):
            rows = None if whole is None else whole[share.start : share.stop]
            if not proportional(gradient, rows, trial.tolerance):
                return Cause(
                    "The loss of an example depends on the others in its batch, or on its place "
                    "in the order, although the loss returns one value for each example.",
                    "Return a scalar, or override `compute_loss`: then the loss is computed from "
                    "the global batch.",
                )
    return None


PREAMBLES = (
    "Exception encountered when calling",
    "Graph execution error",
    "Detected at node",
    "<stack traces unavailable>",
)
UNKNOWN = Cause("No known cause fits.", "Please report the model at the project's issue tracker.")
CRASH = Cause("The model runs on one device but not on the replicas.", "")


def summary(error: BaseException | None) -> str:
    """An exception in one line: its type, and what its message says first."""
    # Keras and TensorFlow say first where they were; colours and node names help nobody.
    text = re.sub(r"\x1b\[\d*m|\{\{.*?\}\}|\[Op:.*?\]", "", str(error))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = [line for line in lines if not line.startswith(PREAMBLES)] or lines
    return f"{type(error).__name__}: {said[0]}" if said else type(error).__name__
