"""What the demo compares: three small trainings, each in three ways."""

from typing import NamedTuple

import numpy as np

BATCH_SIZE = 16
EPOCHS = 8

WAYS = {
    "one": "one device",
    "ours": "two replicas, keras_multigpu",
    "stock": "two replicas, stock Keras",
}


class Case(NamedTuple):
    """One training.

    Args:
        layers: `"convolutions"` or `"dense"`.
        batch_norm: Whether the model has a BatchNormalization layer.
    """

    title: str
    batches: str
    layers: str
    batch_norm: bool
    examples: int


CASES = (
    Case("convnet", "101 digits: the last batch has 5", "convolutions", False, 101),
    Case("convnet with BatchNorm", "101 digits: the last batch has 5", "convolutions", True, 101),
    Case("dense net with BatchNorm", "97 digits: the last batch has 1", "dense", True, 97),
)


class Result(NamedTuple):
    """What one way made of one case.

    Args:
        accuracy: The validation accuracy after the last epoch; None where training failed.
        error: Why it failed; empty where it did not.
    """

    losses: list[float]
    accuracy: float | None
    weights: list[float]
    error: str = ""


Results = dict[str, list[Result]]
"""For each way, a result for each case."""


def weights_differ_by(one: Result, other: Result) -> float:
    """The largest difference of a weight, relative to the largest weight."""
    ours, theirs = np.array(one.weights), np.array(other.weights)
    return float(np.abs(ours - theirs).max() / np.abs(ours).max())


def ours_is_one_device(results: Results) -> bool:
    """Whether this package has kept its promise: weights equal to one device's, but for rounding.

    Rounding makes about 1e-6 here, stock Keras's errors 1e-2 and more.
    """
    return all(
        not ours.error and weights_differ_by(one, ours) < 1e-4
        for one, ours in zip(results["one"], results["ours"], strict=True)
    )
