"""Where Keras keeps the arguments of `compile`, and which metrics it makes of them."""

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import compile_internals


def compiled_model(**options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **options})
    return model


def test_arguments_of_compile_are_found_and_metric_names_resolved():
    """`_compile_config` still keeps the arguments, and `get_metric` looks at the shapes."""
    loss = keras.losses.MeanSquaredError()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", loss, loss_weights=[2.0])
    arguments = compile_internals.compile_arguments(model)
    assert arguments["loss"] is loss
    assert arguments["loss_weights"] == [2.0]
    labels, scores = tf.zeros((4,), tf.int32), tf.zeros((4, 3))
    metric = compile_internals.compiled_metric("accuracy", labels, scores)
    assert isinstance(metric, keras.metrics.SparseCategoricalAccuracy)
    assert metric.name == "accuracy"
    metric = compile_internals.compiled_metric("accuracy", tf.zeros((4, 1)), tf.zeros((4, 1)))
    assert isinstance(metric, keras.metrics.BinaryAccuracy)


def test_metrics_given_to_compile_are_found_before_they_are_used():
    """`compile` still keeps metric objects in `_user_metrics` and `_user_weighted_metrics`."""
    given = [keras.metrics.MeanIoU(2), keras.metrics.Mean()]
    model = compiled_model(metrics=["mae", given[0]], weighted_metrics=[[given[1]]])
    assert compile_internals.given_metrics(model) == given
    assert compile_internals.given_metrics(compiled_model(metrics=None)) == []
