"""What each worker runs: rows of `exactness/cases.py`, many in one process.

    table_of_workers.py FOLDER SHARD "name of a row" "name of another"

It saves `INDEX.pickle` in the folder: for each row all its numbers, or its traceback. SHARD is what
replicas divide in all rows, however small it is; "" if each row says so itself.
"""

import pickle
import sys
import traceback
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactness.cases import CASES
from exactness.runs import run
from helpers.everything_in_parts import divide_everything

import keras_multigpu as kmg
from keras_multigpu.keras_internals.variable_internals import variable_storage
from keras_multigpu.training.replica_group import is_in_parts

BY_NAME = {case.name: case for case in CASES}


def numbers(name, shard):
    case, strategy = BY_NAME[name], kmg.strategy()

    def distributed(case):
        return kmg.distribute(case.compiled(), strategy, shard=shard or case.shard)

    return run(case, distributed).numbers


class Queue(keras.layers.Layer):
    """Adds the last rows of the batch before. There are none at first."""

    def __init__(self):
        super().__init__()
        self.rows = tf.Variable(tf.zeros((0, 8)), shape=(None, 8), trainable=False)

    def call(self, x):
        result = x + tf.reduce_sum(self.rows, axis=0)
        self.rows.assign(x[-2:])
        return result


def made_apart(index):
    """Weights that `fit` makes in parts, on workers that draw different numbers."""
    keras.utils.set_random_seed(index)
    model = kmg.distribute(keras.Sequential([keras.layers.Dense(8), Queue()]), shard="weights")
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 8)), np.ones((4, 8)), verbose=0)
    assert is_in_parts(variable_storage(model.weights[0]))
    return dict(enumerate(model.get_weights()))


def main(folder, shard, names):
    """Run all rows, even if one fails: it fails on all workers alike."""
    found = {}
    index = kmg.strategy().cluster_resolver.task_id
    if shard:
        divide_everything(pytest.MonkeyPatch())
        found["made apart"] = made_apart(index)
    for name in names:
        sys.stdout.write(f"{name}\n")  # Shows which row hangs, if one does.
        sys.stdout.flush()
        try:
            found[name] = numbers(name, shard)
        except (ValueError, TypeError, RuntimeError, NotImplementedError, tf.errors.OpError):
            found[name] = traceback.format_exc()
            if "OpError" in found[name]:
                break
    Path(folder, f"{index}.pickle").write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
