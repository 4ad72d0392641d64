"""What each worker runs: rows of `exactness/cases.py`, many in one process.

    table_of_workers.py FOLDER "name of a row" "name of another"

It saves `INDEX.pickle` in the folder: for each row all its numbers, or its traceback.
"""

import pickle
import sys
import traceback
from pathlib import Path

import tensorflow as tf
from exactness.cases import CASES
from exactness.runs import run

import keras_multigpu as kmg

BY_NAME = {case.name: case for case in CASES}


def numbers(name):
    case, strategy = BY_NAME[name], kmg.strategy()

    def distributed(case):
        return kmg.distribute(case.compiled(), strategy, shard=case.shard)

    return run(case, distributed).numbers


def main(folder, names):
    """Run all rows, even if one fails: it fails on all workers alike."""
    found = {}
    for name in names:
        sys.stdout.write(f"{name}\n")  # Shows which row hangs, if one does.
        sys.stdout.flush()
        try:
            found[name] = numbers(name)
        except (ValueError, TypeError, RuntimeError, NotImplementedError, tf.errors.OpError):
            found[name] = traceback.format_exc()
            if "OpError" in found[name]:
                break
    index = kmg.strategy().cluster_resolver.task_id
    Path(folder, f"{index}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
