"""Batches that differ only in length share a compiled step."""

import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.steps.steps_of_model import StepFunctions


class Runs(Runner):
    """Runs a function."""

    def __init__(self, function):
        self.function = function

    def __call__(self, shares):
        return self.function(shares)


def sums_of(made):
    """Steps that sum all numbers; `made` gets the specs they are made for."""

    def make(spec):
        made.append(spec[0].shape.as_list())
        return Runs(lambda shares: tf.reduce_sum(shares[0].data[0]))

    return StepFunctions(make, Cutter(1), eager=False)


cut = Cutter(1)


def ones(*shape):
    return cut((tf.ones(shape), None, None))


def test_batches_of_many_sizes_share_a_step():
    made = []
    steps = sums_of(made)
    assert [float(steps(ones(size, 2))) for size in range(1, 13)] == list(range(2, 26, 2))
    assert made == [[None, 2]]


def test_an_axis_becomes_unknown_once_it_has_changed():
    made = []
    steps = sums_of(made)
    for length in range(1, 13):
        assert float(steps(ones(2, length, 5))) == 10 * length
    assert float(steps(ones(2, 4, 3))) == 24
    assert float(steps(ones(2, 7, 5))) == 70
    assert made == [[None, 1, 5], [None, None, 5], [None, None, None]]


def test_each_form_of_batch_has_its_own_step():
    made = []
    steps = sums_of(made)
    steps(cut((tf.ones((2, 3)), None, None)))
    steps(cut((tf.ones((2, 3), tf.int32), None, None)))
    steps(cut((tf.ones((2, 3, 1)), None, None)))
    steps(cut((tf.ones((2, 4)), tf.ones(2), None)))
    assert made == [[None, 3], [None, 3], [None, 3, 1], [None, 4]]


@pytest.mark.parametrize("kind", ["ragged", "sparse"])
def test_ragged_and_sparse_batches_of_many_lengths_share_a_step(kind):
    def make(spec):
        made.append(spec[0])
        values = "flat_values" if kind == "ragged" else "values"
        return Runs(lambda shares: tf.reduce_sum(getattr(shares[0].data[0], values)))

    made = []
    steps = StepFunctions(make, Cutter(1), eager=False)
    for length in (2, 3, 4, 5):
        leaf = (
            tf.RaggedTensor.from_tensor(tf.ones((2, length)))
            if kind == "ragged"
            else tf.sparse.from_dense(np.ones((2, length), "float32"))
        )
        assert float(steps(cut((leaf, None, None)))) == 2 * length
    assert len(made) <= 2


def test_known_specs_are_used_unchanged():
    made = []
    steps = sums_of(made)
    spec = (tf.TensorSpec([4, None]), None, None)
    for length in (1, 2, 3):
        steps(ones(4, length)._replace(spec=spec, is_usual=True))
    assert made == [[4, None]]
