"""Runs a case of `cases.py` and compares what came out with another run.

A difference is relative to its tensor: the largest absolute difference of two tensors over
the largest magnitude in the expected one, taken as at least `FLOOR`, because float32 sums of
numbers near one carry rounding errors of 1e-7 however small their result is.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
from helpers.all_replicas import ALL_REPLICAS
from helpers.cpu_replicas import replicas_of

import keras_multigpu as kmg
from exactness.cases import Case
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.run import flattened

FLOOR = 1e-3
STEPS = ("train", "test", "predict")


@dataclass
class Outcome:
    """All numbers that a run leaves behind, by name, and the trained model."""

    numbers: dict[str, np.ndarray]
    model: keras.Model


def alone(case: Case) -> keras.Model:
    """A case's model in plain Keras, which takes half the time where it makes no graph.

    It computes the same: replicas that run eagerly are compared with a graph, and all are with
    `KMG_ALL_REPLICAS=1`.
    """
    model = case.compiled()
    # Without a graph Keras weighs the batches of several losses by their sizes.
    in_graph = ALL_REPLICAS or model.run_eagerly or isinstance(model.loss, (dict, list))
    model.run_eagerly = not in_graph
    return model


def run(case: Case, place: Callable[[Case], keras.Model]) -> Outcome:
    """Train, evaluate and predict, as the case says.

    Args:
        case: The case.
        place: Makes the case's compiled model where it is to run.
    """
    # Names such as "auc_1" count up from here.
    keras.utils.clear_session(free_memory=False)
    x, y, sample_weight = case.data()
    model = place(case)
    with tempfile.TemporaryDirectory() as directory:

        def fit(**changes: Any) -> dict[str, list[float]]:
            arguments = {
                "sample_weight": sample_weight,
                "batch_size": case.batch_size,
                "epochs": 2,
                "shuffle": False,
                "verbose": 0,
                **case.fit(Path(directory)),
                **changes,
            }
            return model.fit(x, y, **arguments).history

        history = case.train(model, fit)
    size = {"batch_size": case.batch_size, "verbose": 0}
    logs, predictions = {}, []
    if "evaluate" in case.after:
        logs = model.evaluate(x, y, sample_weight=sample_weight, return_dict=True, **size)
    if "predict" in case.after:
        predictions = keras.tree.flatten(model.predict(x, **size))
    named = {
        "weights": {f"{i} {w.name}": w.numpy() for i, w in enumerate(model.weights)},
        "optimizer": dict(enumerate(v.numpy() for v in model.optimizer.variables)),
        "history": history,
        "evaluate": flattened(logs),  # Keras 3.10 nests those of a `test_step`.
        "predict": dict(enumerate(predictions)),
    }
    numbers = {
        f"{part} {name}": np.asarray(value, "float64")
        for part, values in named.items()
        for name, value in values.items()
    }
    return Outcome(numbers, model)


def differences(expected: Outcome, found: Outcome) -> dict[str, float]:
    """The relative difference of every tensor; infinite where one has no partner."""
    names = expected.numbers.keys() | found.numbers.keys()
    return {name: difference(expected.numbers.get(name), found.numbers.get(name)) for name in names}


def difference(expected: np.ndarray | None, found: np.ndarray | None) -> float:
    """The relative difference of two tensors; not-a-number equals itself."""
    if expected is None or found is None or expected.shape != found.shape:
        return np.inf
    if not expected.size or np.array_equal(expected, found, equal_nan=True):
        return 0.0
    if not (np.isfinite(expected).all() and np.isfinite(found).all()):
        return np.inf
    scale = max(np.abs(expected).max(), FLOOR)
    return float(np.abs(expected - found).max() / scale)


def gathered_in(model):
    """For each step what replicas gather, and whether one of them takes the whole batch."""
    found = set()
    for mode in STEPS:
        for functions in replication_of(model).steps_of(mode):
            for runner in functions.runners:
                if (step := runner.step) is not None:
                    moved = [each for each in step.cost.moved if each.kind == "gathered"]
                    found |= {f"{mode}_step: {each.op and each.op.type}" for each in moved}
                    found |= {f"{mode}_step: alone"} if step.unsplit_because else set()
    return found


def require_equal(
    case: Case, gathers: set[str], replicas: int = 2, place: Any = None
) -> list[keras.Model]:
    """Replicas end where one device does, and gather this; the models of both."""
    expected = run(case, place or (lambda case: case.compiled()))
    found = run(
        case,
        lambda case: kmg.distribute(case.compiled(), replicas_of(replicas), self_check=False),
    )
    paths = [f"{n} {weight.path}" for n, weight in enumerate(found.model.weights)]
    differing = {
        paths[int(what.split()[1])] if what.startswith("weights ") else what: how
        for what, how in differences(expected, found).items()
        if how > case.tolerance
    }
    assert not differing
    gathered = {each.split(": ")[1] for each in gathered_in(found.model)}
    assert gathered == gathers
    return [expected.model, found.model]
