"""What Keras does with a model, it does with one whose weights are in parts."""

import copy
import pickle

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import replicas_of

import keras_multigpu as kmg
from keras_multigpu.keras_internals.variable_internals import variable_storage
from keras_multigpu.training.replica_group import is_in_parts

SIZE = 300
X = np.random.default_rng(0).normal(size=(9, SIZE)).astype("float32")


def build():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [keras.Input((SIZE,)), keras.layers.Dense(SIZE, "tanh"), keras.layers.Dense(1)]
    )


def train(model):
    model.compile("adam", "mse")
    model.fit(X, X[:, :1], batch_size=4, verbose=0, shuffle=False)
    return model


def distributed(model=None, **options):
    return kmg.distribute(model or build(), replicas_of(2), **options)


@pytest.fixture(scope="module")
def predictions():
    """Those of a model that replicas have whole."""
    return train(distributed()).predict(X, verbose=0)


@pytest.fixture
def model():
    return train(distributed(shard="weights"))


def exported(model, folder):
    model.export(folder / "exported", verbose=False)
    served = tf.saved_model.load(folder / "exported")
    return served.serve(X)


def checkpointed(model, folder):
    other = distributed(shard="weights")
    path = tf.train.Checkpoint(model=model).save(folder / "checkpoint")
    tf.train.Checkpoint(model=other).restore(path)
    return other.predict(X, verbose=0)


def cloned(model, folder):
    other = keras.models.clone_model(model)
    other.set_weights(model.get_weights())
    return other.predict(X, verbose=0)


def reassigned(model, folder):
    kernel, value = model.layers[0].kernel, model.layers[0].kernel.numpy()
    kernel.assign(2 * value)
    kernel.assign_add(value)
    kernel.assign_sub(2 * value)
    return model(X)


def sharing_layers(model, folder):
    """Another model, whole or plain, with a layer of this one."""
    hidden = keras.Model(model.inputs, model.layers[0].output).predict(X, verbose=0)
    return hidden @ model.layers[1].kernel.numpy() + model.layers[1].bias.numpy()


def moved(model, folder):
    model = kmg.distribute(model, replicas_of(3), shard="weights")
    return kmg.distribute(model, replicas_of(1)).predict(X, verbose=0)


@pytest.mark.parametrize(
    "used",
    [
        lambda model, folder: model(X),
        lambda model, folder: tf.function(model)(X),
        lambda model, folder: copy.deepcopy(model).predict(X, verbose=0),
        lambda model, folder: pickle.loads(pickle.dumps(model)).predict(X, verbose=0),
        exported,
        checkpointed,
        cloned,
        reassigned,
        sharing_layers,
        moved,
    ],
)
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
def test_it_predicts_the_same_wherever_it_goes(used, model, predictions, tmp_path):
    found = np.asarray(used(model, tmp_path))
    np.testing.assert_allclose(found, predictions, rtol=1e-4, atol=1e-5)
    # And trains as before.
    train(model)


def test_a_loop_of_the_users_trains_it(model):
    """Gradients and updates outside of any step of this package."""
    optimizer, weights = keras.optimizers.SGD(0.1), [w.numpy() for w in model.trainable_variables]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(X, training=True) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    for weight, before, gradient in zip(model.weights, weights, gradients, strict=True):
        np.testing.assert_allclose(weight.numpy(), before - 0.1 * gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize`:UserWarning")
def test_quantized_it_predicts_with_whole_weights(model, predictions):
    model.quantize("int8")
    assert not any(is_in_parts(variable_storage(weight)) for weight in model.weights)
    np.testing.assert_allclose(model.predict(X, verbose=0), predictions, atol=0.05)
