"""Which trainings end on two replicas as on one device: stock Keras against this package.

    python tests/benchmarks/parity_vs_stock.py [--write]

Every row of `tests/exactness/cases.py` runs on one device, under stock Keras with
`MirroredStrategy(["CPU:0", "CPU:1"])`, model made and compiled in its scope, and under this
package. It runs twice: as it stands, mostly with a last batch that is smaller, and with the
data cut down to full batches, which is what stock Keras can be expected to get right. Stock
Keras may hang or abort, so every run is a process of its own with a time limit.
"""

import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from report import MEASURE, main, measures

TESTS = Path(__file__).parents[1]
KINDS = ("stock", "ours")
SECONDS_A_CASE = 60


# In the process that runs the cases.


def work(kind, full, names):
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


def worst(case, expected, found):
    """The largest relative difference, or the word "equal"."""
    from exactness.runs import differences

    largest = max(differences(expected, found).values())
    return "equal" if largest <= case.tolerance else f"{largest:.1e}"


# In the process that counts.


@functools.cache
def results():
    """What became of each case, by kind and whether batches are full."""
    sys.path.insert(0, str(TESTS))
    from exactness.cases import CASES

    names = [case.name for case in CASES]
    return {(kind, full): results_of(kind, full, names) for full in (True, False) for kind in KINDS}


def results_of(kind, full, names):
    """Run cases in processes; one that hangs or dies is noted, and the others still run."""
    found = {}
    while missing := [name for name in names if name not in found][:12]:
        command = [sys.executable, __file__, MEASURE, json.dumps([kind, full, missing])]
        limit = SECONDS_A_CASE + 25 * len(missing)
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit)
            output, ending = done.stdout, f"process died ({done.returncode})"
        except subprocess.TimeoutExpired as error:
            output, ending = (error.stdout or b"").decode(), "hangs"
        found |= dict(json.loads(line) for line in output.splitlines() if line.startswith("["))
        if unfinished := [name for name in missing if name not in found]:
            found[unfinished[0]] = ending
    return found


def equal(kind, full):
    return [name for name, result in results()[kind, full].items() if result == "equal"]


def counts(rounds):
    for full, batches in ((True, "full batches"), (False, "a smaller last batch")):
        found = (f"**{len(equal(kind, full))}**" for kind in KINDS)
        yield f"**{batches}**, of {len(results()['stock', full])}", *found


def wrong(rounds):
    """What stock Keras gets wrong even on full batches, or ours anywhere."""
    found = results()
    for name, theirs in found["stock", True].items():
        ours = {found["ours", full][name] for full in (True, False)} - {"equal"}
        if ours or theirs != "equal":
            yield name, theirs, ", ".join(ours) or "equal"


TABLES = {
    "parity": ("equal | stock | ours", counts),
    "parity cases": ("case | stock, full batches | ours", wrong),
}

if __name__ == "__main__":
    if asked := measures():
        work(*json.loads(asked[0]))
    else:
        main(__doc__, TABLES)
