"""`train_on_batch`, `test_on_batch` and `predict_on_batch` return what Keras returns."""

import keras
import numpy as np
import pytest
from exactness import models as made
from helpers.cpu_replicas import on_replicas
from helpers.rows_in_python import zeros_after
from keras import layers

from contract.pairs import (
    KINDS,
    WEIGHTS,
    X,
    Y,
    assert_close,
    dataset,
    evaluated,
    trained,
)


@pytest.mark.parametrize("return_dict", [False, True])
@pytest.mark.slow
def test_single_batches_give_what_keras_gives(pairs, return_dict):
    results = []
    for model in pairs():
        form = {"return_dict": return_dict}
        results.append(
            [
                trained(model, X[:8], Y[:8], **form),
                trained(model, X[8:10], Y[8:10], **form),
                trained(model, X[:7], Y[:7], sample_weight=WEIGHTS[:7], **form),
                evaluated(model, X[:7], Y[:7], **form),
                evaluated(model, X[:7], Y[:7], sample_weight=WEIGHTS[:7], **form),
                model.evaluate(X, Y, batch_size=8, verbose=0, **form),
                model.evaluate(dataset(), steps=2, verbose=0, **form),
                model.get_weights(),
            ]
        )
    assert_close(*results)


@pytest.mark.slow
def test_train_on_batch_takes_class_weights(pairs):
    options = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
    one, two = pairs(made.classifier, **options)
    weights = {0: 1.0, 1: 3.0, 2: 0.5}
    assert_close(*(trained(model, X, KINDS, class_weight=weights) for model in (one, two)))
    assert_close(one.get_weights(), two.get_weights())


def test_rows_of_a_prediction_may_be_along_another_axis():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.ops.transpose(layers.Dense(2)(inputs)))
    x = np.random.default_rng(0).normal(size=(7, 3)).astype("float32")
    expected = model.predict_on_batch(x)
    np.testing.assert_allclose(on_replicas(model, 3).predict_on_batch(x), expected, rtol=1e-6)


@pytest.mark.usefixtures("python_sees_rows")
def test_train_on_batch_splits_the_batch():
    sizes = []

    class Size(layers.Layer):
        def call(self, x):
            return x + zeros_after(lambda rows: sizes.append(len(rows)), x)

    model = on_replicas(made.mlp_with(Size()), 2)
    model.compile("sgd", "mse")
    model.train_on_batch(X[:8], Y[:8])
    assert sizes == [4, 4]
