"""Where Keras keeps the parts of a model and the arguments of `compile`, and what it attaches."""

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import compile_internals, model_internals


def test_the_wiring_of_a_functional_model_is_found():
    """Keras still keeps it in `_inbound_nodes`, and the history of each tensor."""
    x = keras.Input((3,))
    first, second = keras.layers.Dense(3), keras.layers.Dense(3)
    first(keras.Input((3,)))  # This call is not part of the model.
    model = keras.Model(x, first(x) + second(first(x)))
    operations, *ends = model_internals.wiring(model)
    assert operations[:3] == [
        [None, ((), {})],
        [None, (([0, 0, 0],), {}), (([0, 0, 0],), {})],
        [None, (([1, 1, 0],), {})],
    ]
    assert type(operations[3][0]).__name__ == "Add"
    assert operations[3][1] == (([1, 0, 0], [2, 0, 0]), {})
    assert ends == [[[0, 0, 0]], [[3, 0, 0]]]
    assert model_internals.wiring(keras.Sequential([keras.layers.Dense(1)])) == []


def test_fit_marks_its_own_calls_of_evaluate():
    """In such a call, Keras takes the batches that `fit` has prepared."""
    said = []

    class Evaluates(keras.Sequential):
        def evaluate(self, *args, **kwargs):
            said.append(kwargs[model_internals.VALIDATES])
            return {}

    model = Evaluates([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((2, 1))
    model.fit(x, x, validation_data=(x, x), verbose=0)
    assert said == [True]


def test_a_class_can_be_registered_under_a_public_name_of_keras():
    """Keras still keeps public names of classes in `REGISTERED_OBJS_TO_NAMES`."""
    made = type("Sequential", (keras.Sequential,), {})
    model_internals.register_like(made, keras.Sequential)
    assert keras.saving.serialize_keras_object(made())["module"] == "keras"


def test_functions_run_on_dense_sparse_and_ragged_shapes():
    """`compute_output_spec` still makes placeholders for all but ragged shapes."""
    specs = [
        keras.KerasTensor((None, 3)),
        keras.KerasTensor((None, 3), sparse=True),
        tf.RaggedTensorSpec([None, None], tf.int32),
    ]
    kinds = []
    result = model_internals.symbolic_call(
        lambda *given: kinds.extend(type(one).__name__ for one in given) or given[0] * 2.0, *specs
    )
    assert result.shape == (None, 3)
    assert kinds[1:] == ["SparseTensor", "RaggedTensor"]


def test_masks_and_logits_travel_with_tensors():
    """Keras still attaches a mask, and the logits behind a softmax, to tensors."""
    probabilities = keras.activations.softmax(tf.constant([[1.0, 2.0]]))
    mask, logits = model_internals.attached([probabilities])
    assert mask is None and logits.numpy().tolist() == [[1, 2]]
    copy = tf.identity(probabilities)
    assert model_internals.attached([copy]) == [None, None]
    model_internals.attach([copy], [tf.constant([True]), logits])
    mask, logits = model_internals.attached([copy])
    assert mask.numpy().tolist() == [True] and logits.numpy().tolist() == [[1, 2]]


def test_the_arguments_that_get_config_leaves_out_are_found():
    """Losses and metrics of Keras still keep them in `_fn_kwargs`."""
    arguments = model_internals.arguments_of_function
    assert arguments(keras.losses.Huber(2.0)) == {"delta": 2.0}
    assert arguments(keras.metrics.MeanMetricWrapper(lambda y, y_pred, by: y, by=3)) == {"by": 3}
    assert arguments(keras.layers.Dense(1)) == {}


def test_metrics_replace_the_logs_that_have_their_names():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.train_on_batch(np.ones((2, 1)), np.ones((2, 1)))
    tracked = model.get_metrics_result()["loss"]
    assert model_internals.end_of_epoch(model, {"loss": 7.0}) == {"loss": tracked}
    assert model_internals.end_of_epoch(model, {"other": 7.0}) == {"other": 7.0}


def compiled_model(**options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **options})
    return model


def test_arguments_of_compile_are_found_and_metric_names_resolved():
    """`_compile_config` still keeps the arguments, and `CompileMetrics` looks at the shapes."""
    loss = keras.losses.MeanSquaredError()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", loss, loss_weights=[2.0])
    arguments = compile_internals.compile_arguments(model)
    assert arguments["loss"] is loss
    assert arguments["loss_weights"] == [2.0]
    both = tf.zeros((4,), tf.int32), tf.zeros((4, 1))
    scores = tf.zeros((4, 3)), tf.zeros((4, 1))
    metrics = compile_internals.compiled_metrics({"a": ["accuracy"], "b": ["accuracy"]}, ["a", "b"])
    metrics.update_state(both, scores)
    assert {*metrics.result()} == {"a_accuracy", "b_accuracy"}
    first, second = metrics.metrics
    assert isinstance(first, keras.metrics.SparseCategoricalAccuracy)
    assert isinstance(second, keras.metrics.BinaryAccuracy)


def test_metrics_given_to_compile_are_found_before_they_are_used():
    """`compile` still keeps metric objects in `_user_metrics` and `_user_weighted_metrics`."""
    given = [keras.metrics.MeanIoU(2), keras.metrics.Mean()]
    model = compiled_model(metrics=["mae", given[0]], weighted_metrics=[[given[1]]])
    assert compile_internals.given_metrics(model) == given
    assert compile_internals.given_metrics(compiled_model(metrics=None)) == []
