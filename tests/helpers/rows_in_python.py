"""Layers that show Python the rows that a replica computes with.

Python in a model runs once for the whole batch, as on one device, and knows nothing of replicas.
Tests in which replicas differ, in time or in memory, give it each replica's own rows.
"""

import numpy as np
import tensorflow as tf

from keras_multigpu.partition import program
from keras_multigpu.partition.facts.lengths import LENGTHS
from keras_multigpu.partition.rules.plan import RULES, Plan, rows_of
from keras_multigpu.training.steps import passes

KIND = "PyFuncStateless"


def zeros_after(function, x):
    """Zeros like the tensor, after Python was called with the replica's rows of it."""

    def call(rows):
        function(rows)
        return np.zeros_like(rows)

    zeros = tf.numpy_function(call, [tf.stop_gradient(x)], x.dtype, stateful=False)
    zeros.set_shape(x.shape)
    return zeros


def let_python_see_rows(patch):
    """Let `zeros_after` run on each replica's rows; `patch` is pytest's `monkeypatch`."""

    def by_rows(op, ins, facts):
        rows = rows_of(ins)
        return None if rows is None else Plan(ins, (rows,))

    patch.setattr(program, "COUNTED_AS_EFFECTS", program.COUNTED_AS_EFFECTS - {KIND})
    patch.setitem(RULES, KIND, by_rows)
    patch.setitem(LENGTHS, KIND, lambda op, facts: [facts.dims(op.inputs[0])])
    # Otherwise Python would see the self-check's rows, too.
    patch.setattr(passes, "difference", lambda step, batch: None)
