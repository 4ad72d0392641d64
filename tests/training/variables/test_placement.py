"""Variables move to the replicas with their values, and those of metrics back."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.keras_versions import has_multi_optimizer

import keras_multigpu as kmg
from keras_multigpu.keras_internals import graph_internals, variable_internals
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.variables import placement

STRATEGY = kmg.strategy("mirrored", devices=2)


def values(variable):
    return [part.numpy().tolist() for part in copies_of(variable)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8", "bool"])
def test_each_replica_gets_a_copy(dtype):
    variable = keras.Variable([1, 0], dtype=dtype, trainable=False)
    placement.place_variables([variable], STRATEGY)
    assert values(variable) == [[1, 0], [1, 0]]
    storage = variable_internals.variable_storage(variable)
    placement.place_variables([variable], STRATEGY)
    assert variable_internals.variable_storage(variable) is storage
    assert [part.device[-5:] for part in copies_of(variable)] == ["CPU:0", "CPU:1"]


def test_copies_of_a_variable_of_central_storage_can_be_assigned():
    """In its scope, too, where TensorFlow makes another kind of variable."""
    central = kmg.strategy("central_storage", devices=2)
    with central.scope():
        variable = keras.Variable([1.0, 0.0])
        placement.place_variables([variable], STRATEGY)
        with graph_internals.single_device():
            variable.assign([2.0, 0.0])
    assert values(variable) == [[2, 0], [2, 0]]


@has_multi_optimizer
def test_all_optimizers_of_a_model_are_found():
    inner, part = keras.optimizers.SGD(), keras.optimizers.Adam()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.LossScaleOptimizer(inner), "mse")
    model.other = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(part))
    model.again = model.optimizer
    model.of_networks = {"generator": [keras.optimizers.SGD()], 1: keras.optimizers.SGD()}
    own = placement.Placement(kmg.strategy("one_device"))
    own.build_optimizer(model.other, model.trainable_variables)
    found = placement.optimizers_of(model)
    assert {id(each) for each in found} == {
        id(each)
        for each in (
            *(model.optimizer, inner, model.other, part),
            *(model.of_networks["generator"][0], model.of_networks[1]),
        )
    }


def test_an_optimizer_made_inside_a_scope_moves_to_the_models_strategy():
    with kmg.strategy("mirrored", devices=4).scope():
        optimizer = keras.optimizers.SGD(0.5, momentum=0.9)
    weight = keras.Variable(np.ones(2, "float32"))
    placement.place_variables([weight], STRATEGY)
    placement.Placement(STRATEGY).build_optimizer(optimizer, [weight])
    assert values(optimizer.variables[1]) == [0.5, 0.5]
    storages = [variable_internals.variable_storage(v) for v in optimizer.variables]
    assert all(placement.lives_under(storage, STRATEGY) for storage in storages)


def test_metrics_made_in_a_scope_are_brought_together():
    """Keras's `MeanIoU` counts in integers."""
    with STRATEGY.scope():
        metric = keras.metrics.MeanIoU(2)
    placement.keep_once(metric.variables, tf.distribute.DistributedValues)
    metric.update_state([0, 1, 1], [0, 1, 0])
    assert metric.total_cm.numpy().tolist() == [[1, 0], [1, 1]]


def test_functions_traced_before_use_the_moved_values():
    variable = keras.Variable([1.0, 2.0])
    storage = variable_internals.variable_storage(variable)
    read = tf.function(lambda: variable * 1.0)
    read()
    placement.place_variables([variable], STRATEGY)
    first, second = copies_of(variable)
    assert first is storage
    np.testing.assert_array_equal(second.numpy(), [1.0, 2.0])
    variable.assign([3.0, 4.0])
    np.testing.assert_array_equal(read(), [3.0, 4.0])
    np.testing.assert_array_equal(second.numpy(), [3.0, 4.0])


@pytest.mark.slow
def test_models_with_a_common_layer_on_different_devices_train_the_same_weights():
    """Each takes the layer to its own devices, and the other's compiled steps know it."""
    inputs, layer = (
        keras.Input((1,)),
        keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
    )
    first, second = keras.Model(inputs, layer(inputs)), keras.Model(inputs, layer(inputs) * 2)
    x, reader = np.array([[1.0], [2.0], [6.0]], "float32"), layer.kernel

    def loss(y, outputs):  # Its model does not track the reader, which others train.
        return keras.ops.mean(outputs * reader)

    for model, devices in ((first, 2), (second, 3)):
        kmg.distribute(model, devices=devices, self_check=False)
        model.compile(keras.optimizers.SGD(1 / 24), lambda y, outputs: keras.ops.mean(outputs))
    third = kmg.distribute(
        keras.Sequential(
            [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")]
        ),
        devices=2,
    )
    third.compile(keras.optimizers.SGD(1.0), loss)
    left = 1.0
    for _ in range(2):
        for model, change in ((first, 3 / 24), (second, 6 / 24)):
            model.train_on_batch(x, x)
            left -= change
            np.testing.assert_allclose(model.get_weights()[0], [[left]])
            np.testing.assert_allclose(third.test_on_batch(x, x), 3 * left, rtol=1e-6)
