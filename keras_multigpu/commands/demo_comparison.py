"""The demo's comparison: the same trainings on one device and on two replicas.

Each of the three ways has a process of its own, because stock Keras may crash. All three
run on logical CPU devices, whose arithmetic is the same on every machine.

    python -m keras_multigpu.commands.demo_comparison one|ours|stock FOLDER
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from typing import NamedTuple

BATCH_SIZE = 16
EPOCHS = 8
SECONDS = 120
"""How long the comparison may take before the demo goes on without it."""

WAYS = {
    "one": "one device",
    "ours": "two replicas, keras_multigpu",
    "stock": "two replicas, stock Keras",
}


class Case(NamedTuple):
    """One training.

    Args:
        title: What it is.
        model: `"convnet"` or `"dense"`.
        batch_norm: Whether the model has a BatchNormalization layer.
        examples: How many digits there are.
    """

    title: str
    model: str
    batch_norm: bool
    examples: int


CASES = (
    Case("convnet, 101 digits (the last batch has 5)", "convnet", False, 101),
    Case("convnet with BatchNorm, 101 digits", "convnet", True, 101),
    Case("dense network with BatchNorm, 97 digits (the last batch has 1)", "dense", True, 97),
)


class Result(NamedTuple):
    """What one way made of one case.

    Args:
        losses: The training loss of each epoch.
        accuracy: The validation accuracy after the last epoch.
        weights: The final weights, one after the other; None where training failed.
        error: What it raised; empty where it raised nothing.
    """

    losses: list[float]
    accuracy: float | None
    weights: Any
    error: str


Results = dict[str, list[Result]]
"""For each way, a result for each case."""
