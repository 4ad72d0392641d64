"""Values of metrics move between one storage and parts on the replicas."""

import keras
import numpy as np

import keras_multigpu as kmg
from keras_multigpu import keras_internals
from keras_multigpu.training.variables.metric_storages import MetricStorages

STRATEGY = kmg.strategy("mirrored", devices=2)


def parts(variable):
    return [part.numpy().tolist() for part in keras_internals.variable_storage(variable).values]


def test_values_move_to_and_fro_between_the_same_storages():
    """Of integers, whose parts TensorFlow itself would round down when it sets them."""
    variable = keras.Variable(np.array([3, 5]), dtype="int32", trainable=False)
    storages, one = MetricStorages(STRATEGY), keras_internals.variable_storage(variable)
    storages.use([variable], in_parts=True)
    in_parts = keras_internals.variable_storage(variable)
    assert parts(variable) == [[3, 5], [0, 0]]
    in_parts.values[1].assign([1, 1])
    storages.use([variable], in_parts=False)
    assert keras_internals.variable_storage(variable) is one
    assert variable.numpy().tolist() == [4, 6]
    variable.assign([7, 9])
    storages.use([variable], in_parts=True)
    assert keras_internals.variable_storage(variable) is in_parts
    assert parts(variable) == [[7, 9], [0, 0]]


def test_metrics_made_in_a_scope_are_brought_together():
    """Keras's `MeanIoU` counts in integers."""
    with STRATEGY.scope():
        metric = keras.metrics.MeanIoU(2)
    MetricStorages(STRATEGY).use(metric.variables, in_parts=False)
    metric.update_state([0, 1, 1], [0, 1, 0])
    assert metric.total_cm.numpy().tolist() == [[1, 0], [1, 1]]


def test_a_single_device_needs_one_storage():
    """There a step of the user's updates the metric itself."""
    variable = keras.Variable(2.0)
    before = keras_internals.variable_storage(variable)
    MetricStorages(kmg.strategy("one_device")).use([variable], in_parts=True)
    assert keras_internals.variable_storage(variable) is before
