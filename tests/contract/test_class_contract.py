"""What Keras lets a model class do works for distributed models, too."""

import copy
import json
import pickle

import keras
import numpy as np
import pytest
from exactness import models as made
from helpers.one_device import assert_equal

import keras_multigpu as kmg
from keras_multigpu.training.replication import replication_of

pytestmark = [
    # Keras 3.15.1 writes weights through an `__array__` that NumPy 2 finds outdated.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    )
]

X, Y, _ = made.regression(29)


@pytest.fixture(scope="module")
def two():
    return kmg.strategy("mirrored", devices=2)


def functional():
    inputs = keras.Input((5,))
    hidden = keras.layers.Dense(3, name="hidden")(inputs)
    return keras.Model(inputs, keras.layers.Dense(1)(hidden), name="functional")


class Tagged(keras.Model):
    def __init_subclass__(cls, *, tag):
        super().__init_subclass__()
        cls.tags = [*getattr(cls, "tags", ()), tag]


class Subclassed(Tagged, tag="first"):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs)


class OwnLoop(Subclassed, tag="second"):
    def make_train_function(self, force=False):
        raise AssertionError("never called")


def fitted(model, strategy):
    model = kmg.distribute(model, strategy, on_inexact="error")
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    return model


def test_a_class_keeps_the_arguments_of_its_subclasses(two):
    """Only the user's classes need a required argument of `__init_subclass__`."""
    model = kmg.distribute(Subclassed(), two)
    assert (type(model).tags, type(model).__name__) == (["first"], "Subclassed")


def test_a_make_train_function_of_a_model_is_refused(two):
    """It would never be called."""
    with pytest.raises(ValueError, match=r"(?s)overrides `make_train_function`.*`train_step`"):
        fitted(OwnLoop(), two)


def test_a_step_is_made_again_where_keras_makes_it_again(two):
    """After `make_..._function(force=True)`, or with None in its place."""

    class Scaled(keras.layers.Layer):
        factor = 1.0

        def call(self, x):
            return x * self.factor

    model = kmg.distribute(keras.Sequential([keras.Input((1,)), Scaled()]), two)
    found = []
    for factor, make_anew in (
        (2.0, lambda: None),
        (3.0, lambda: None),
        (4.0, lambda: model.make_predict_function(force=True)),
        (5.0, lambda: setattr(model, "predict_function", None)),
    ):
        model.layers[0].factor = factor
        make_anew()
        found.append(model.predict(np.ones((2, 1)), verbose=0)[1, 0])
    assert found == [2, 2, 4, 5]


@pytest.mark.slow
def test_functions_made_for_the_loops_of_keras_are_not_used(two, tmp_path):
    """They would read Keras's iterator."""
    model = fitted(functional(), two)
    with pytest.raises(ValueError, match="loop function of Keras.*Override `train_step`.*Received"):
        model.train_function(iter([(X, Y)]))
    with pytest.raises(ValueError, match="loop function of Keras.*Override `train_step`.*Received"):
        model.train_function = lambda iterator: {}
    steps = replication_of(model).step_functions(model, "train")
    model.export(tmp_path, verbose=False)  # Keras puts the functions away, and back.
    assert replication_of(model).step_functions(model, "train") is steps


@pytest.mark.parametrize("build", [made.mlp, functional])
def test_a_distributed_model_is_saved_as_keras_saves_it(build, two):
    """With the same text, which names the public class."""
    texts = []
    for distribute in (lambda model: model, lambda model: kmg.distribute(model, two)):
        keras.backend.clear_session()
        model = distribute(build())
        texts.append(json.loads(model.to_json()))
    assert texts[0] == texts[1]
    direct = json.loads(kmg.DistributedModel(model.inputs, model.outputs).to_json())
    assert "keras_multigpu" not in json.dumps(direct)


@pytest.mark.slow
def test_a_model_can_be_pickled_and_copied(two):
    model = fitted(functional(), two)
    before = model.get_weights()
    copied = copy.deepcopy(model)
    for again in (pickle.loads(pickle.dumps(model)), copied):
        assert isinstance(again, kmg.DistributedModel) and again is not model
        assert_equal(again.get_weights(), before)
        assert replication_of(again).options.on_inexact == "error"
    assert copied.distribute_strategy is two
    copied.fit(X, Y, verbose=0)
    assert_equal(model.get_weights(), before)
