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
    model.run_eagerly = not (in_graph or case.in_graph)
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


def require_numbers(case: Case, expected: Outcome, found: Outcome) -> None:
    """The same numbers up to the case's tolerance."""
    paths = [f"{n} {weight.path}" for n, weight in enumerate(found.model.weights)]
    assert not {
        paths[int(what.split()[1])] if what.startswith("weights ") else what: apart
        for what, apart in differences(expected, found).items()
        if apart > case.tolerance
    }


def require_same(case: Case, expected: Outcome, found: Outcome) -> None:
    """The same numbers, and only the rows gathered that the case names."""
    require_numbers(case, expected, found)
    assert gathered_in(found.model) == {*case.gathers.split()}


def gathered_in(model: keras.Model) -> set[str]:
    """For what replicas gather; "alone" if one of them takes the whole batch."""
    steps = [
        runner.step
        for mode in ("train", "test", "predict")
        for functions in replication_of(model).steps_of(mode)
        for runner in functions.runners
        if runner.step is not None
    ]
    moved = [each for step in steps for each in step.cost.moved if each.kind == "gathered"]
    found = {each.op.type if each.op else "result" for each in moved}
    return found | ({"alone"} if any(step.unsplit_because for step in steps) else set())


def require_equal(case: Case, replicas: int = 2, place: Any = Case.compiled) -> list[keras.Model]:
    """Replicas end where one device does; the models of both."""
    expected = run(case, place)
    found = run(
        case,
        lambda case: kmg.distribute(case.compiled(), replicas_of(replicas), self_check=False),
    )
    require_same(case, expected, found)
    return [expected.model, found.model]
