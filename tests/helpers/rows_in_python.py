"""Layers that let Python see what a replica computes with.

Python in a model runs once for the whole batch, as on one device, and knows nothing of replicas. In
tests that want these to differ, in time or in memory, it is given each replica's own rows.
"""

import numpy as np
import tensorflow as tf

from keras_multigpu.partition import operations
from keras_multigpu.partition.lengths import LENGTHS
from keras_multigpu.partition.plan import RULES, Plan, rows_of
from keras_multigpu.training.steps import split_step

KIND = "PyFuncStateless"


def zeros_after(function, x):
    """Zeros like the tensor, after Python was called with the rows of it that a replica has."""

    def call(rows):
        function(rows)
        return np.zeros_like(rows)

    zeros = tf.numpy_function(call, [tf.stop_gradient(x)], x.dtype, stateful=False)
    zeros.set_shape(x.shape)
    return zeros


def let_python_see_rows(patch):
    """Let what `zeros_after` makes be computed for each row by itself; `patch` is pytest's."""

    def by_rows(op, ins, facts):
        rows = rows_of(ins)
        return None if rows is None else Plan(ins, (rows,))

    patch.setattr(operations, "COUNTED_AS_EFFECTS", operations.COUNTED_AS_EFFECTS - {KIND})
    patch.setitem(RULES, KIND, by_rows)
    patch.setitem(LENGTHS, KIND, lambda op, facts: [facts.dims(op.inputs[0])])
    # Python would see that a step is tried, too.
    patch.setattr(split_step, "difference", lambda step, batch: None)
