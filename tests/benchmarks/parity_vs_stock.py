"""Which trainings end on two replicas as on one device: stock Keras against this package.

    .venv/bin/python tests/benchmarks/parity_vs_stock.py            print the tables
    .venv/bin/python tests/benchmarks/parity_vs_stock.py --write    and put them into the docs

Every row of `tests/exactness/cases.py` runs on one device, under stock Keras with
`MirroredStrategy(["CPU:0", "CPU:1"])`, model made and compiled in its scope, and under this
package. It runs twice: as it stands, mostly with a last batch that is smaller, and with the
data cut down to full batches, which is what stock Keras can be expected to get right. Stock
Keras may hang or abort, so every run is a process of its own with a time limit.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from report import write_section

TESTS = Path(__file__).parents[1]
KINDS = ("stock", "ours")
SECONDS_A_CASE = 60


# In the process that runs the cases.


def work(kind: str, full: bool, names: list[str]) -> None:
    """Run cases of one kind; print a line of JSON for each."""
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    os.environ["KMG_ALL_REPLICAS"] = "1"  # The rows as they stand.
    sys.path.insert(0, str(TESTS))
    import conftest
    import tensorflow as tf
    from exactness.cases import CASES
    from exactness.runs import run

    assert conftest
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]) if kind == "stock" else None
    for case in CASES:
        if case.name in names:
            case = with_full_batches(case) if full else case
            try:
                result = worst(case, run(case, one_device), run(case, placed(kind, stock)))
            except Exception as error:  # Any error goes into the table.
                result = type(error).__name__
            print(json.dumps([case.name, result]), flush=True)


def with_full_batches(case):
    """The case with its data cut to full batches of an even size."""
    size = case.batch_size + case.batch_size % 2
    examples = len(case.data()[1]) if hasattr(case.data()[1], "shape") else 29
    return dataclasses.replace(
        case, batch_size=size, data=lambda: first(examples // size * size, case.data())
    )


def first(examples, data):
    """The first examples of all arrays."""
    import keras

    return keras.tree.map_structure(lambda array: None if array is None else array[:examples], data)


def one_device(case):
    """The compiled model in plain Keras."""
    return case.compiled()


def placed(kind, stock):
    """A function that makes a case's compiled model on two replicas."""
    import keras

    import keras_multigpu as kmg

    def in_scope(case):
        with stock.scope():
            model = case.compiled()
            for layer in model._flatten_layers():
                if isinstance(layer, keras.layers.BatchNormalization):
                    layer.synchronized = True
        return model

    def distributed(case):
        two = kmg.strategy("mirrored", devices=2)
        return kmg.distribute(case.compiled(), two)

    return in_scope if kind == "stock" else distributed


def worst(case, expected, found) -> str:
    """The largest relative difference, or the word "equal"."""
    from exactness.runs import differences

    largest = max(differences(expected, found).values())
    return "equal" if largest <= case.tolerance else f"{largest:.1e}"


# In the process that counts.


def results_of(kind: str, full: bool, names: list[str]) -> dict[str, str]:
    """Run cases in processes; one that hangs or dies is noted, and the others still run."""
    results: dict[str, str] = {}
    while missing := [name for name in names if name not in results]:
        command = [sys.executable, __file__, "--work", json.dumps([kind, full, missing[:12]])]
        limit = SECONDS_A_CASE + 8 * len(missing[:12])
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            output, ending = done.stdout, f"process died ({done.returncode})"
        except subprocess.TimeoutExpired as error:
            output, ending = (error.stdout or b"").decode(), "hangs"
        lines = [line for line in output.splitlines() if line.startswith("[")]
        results |= dict(json.loads(line) for line in lines)
        if unfinished := [name for name in missing[:12] if name not in results]:
            results[unfinished[0]] = ending
    return results


def tables(
    columns: dict[tuple[str, bool], dict[str, str]], names: list[str]
) -> tuple[list[str], list[str]]:
    """How many cases are equal, and those that stock Keras gets wrong even on full batches."""

    def equal(kind: str, full: bool) -> list[str]:
        return [name for name in names if columns[kind, full][name] == "equal"]

    lines = [f"| **equal of {len(names)}** | stock | ours |", "|---|---|---|"]
    for full, batches in ((True, "full batches"), (False, "a smaller last batch")):
        counts = " | ".join(f"**{len(equal(kind, full))}**" for kind in KINDS)
        lines.append(f"| **{batches}** | {counts} |")
    right = equal("stock", True)
    wrong = ["| case | stock, full batches |", "|---|---|"]
    stock = columns["stock", True]
    wrong += [f"| {name} | {stock[name]} |" for name in names if name not in right]
    late = [name for name in right if name not in equal("stock", False)]
    ours = [
        f"{name} ({cell}, {'full batches' if full else 'a smaller last batch'})"
        for full in (True, False)
        for name, cell in columns["ours", full].items()
        if cell != "equal"
    ]
    wrong += [
        "",
        f"Of the other {len(right)}, stock Keras has {len(late)} wrong with a smaller last batch. "
        f"Ours differs in: {'; '.join(ours) or 'none'}.",
    ]
    return lines, wrong


def main() -> None:
    """Run all cases, print the table, write it if asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md")
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.work:
        work(*json.loads(arguments.work))
        return
    sys.path.insert(0, str(TESTS))
    from exactness.cases import CASES

    names = [case.name for case in CASES if arguments.only in case.name]
    columns = {
        (kind, full): results_of(kind, full, names) for full in (True, False) for kind in KINDS
    }
    for name, lines in zip(("parity", "parity cases"), tables(columns, names), strict=True):
        print("\n".join(lines))
        if arguments.write:
            write_section(name, lines)


if __name__ == "__main__":
    main()
