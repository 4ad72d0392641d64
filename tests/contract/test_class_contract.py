"""What Keras lets a model class do works for distributed models, too."""

import copy
import json
import pickle

import keras
import numpy as np
import pytest
from exactness import models as made
from exactness.runs import difference
from helpers.keras_versions import has_distillation, has_multi_optimizer

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
    model = kmg.distribute(model, strategy)
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


@pytest.mark.in_test_all("repeated calls are counted in test_distributed_model.py")
def test_steps_are_made_again_where_keras_makes_them_again(two):
    """After `make_..._function(force=True)`, or with None in its place."""

    class Scaled(keras.layers.Layer):
        factor = 1.0

        def call(self, x):
            return x * self.factor

    def results(place):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((5,)), Scaled(), keras.layers.Dense(1)]
        model = place(keras.Sequential(layers))
        model.compile("sgd", "mse")
        found = []
        for make_anew in (
            lambda: None,
            lambda: model.make_test_function(force=True),
            lambda: setattr(model, "predict_function", None),
            lambda: model.make_train_function(force=True),
        ):
            make_anew()
            for factor in (2.0, 3.0):
                model.layers[0].factor = factor
                found.append(model.fit(X, Y, 8, shuffle=False, verbose=0).history["loss"][0])
                found += [model.evaluate(X, Y, 8, verbose=0), model.predict(X, 8, verbose=0)]
        return found

    found = results(lambda model: kmg.distribute(model, two))
    for one, other in zip(found, results(lambda model: model), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.in_test_all("a row of cases.py thaws layers")
def test_freezing_after_compile_takes_effect_when_it_does_in_keras(eager, two):
    def results(place):
        keras.utils.set_random_seed(1)
        layers = [keras.Input((5,)), keras.layers.Dense(3), keras.layers.Dense(1)]
        model = place(keras.Sequential(layers))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", run_eagerly=eager)
        found = []
        for frozen in (False, True, False):
            model.layers[0].trainable = not frozen
            found += model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history["loss"]
            found += [weight.sum() for weight in model.get_weights()]
        return found

    with_replicas = results(lambda model: kmg.distribute(model, two))
    np.testing.assert_allclose(with_replicas, results(lambda model: model), rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize("build", [made.mlp, functional])
@pytest.mark.in_test_all("one of them shows it", after=1)
@pytest.mark.slow
def test_a_model_can_be_pickled_and_copied(build, two):
    model = fitted(build(), two)
    before = model.get_weights()
    copied = copy.deepcopy(model)
    for again in (pickle.loads(pickle.dumps(model)), copied):
        assert isinstance(again, kmg.DistributedModel) and again is not model
        for one, other in zip(again.get_weights(), before, strict=True):
            np.testing.assert_array_equal(one, other)
    assert copied.distribute_strategy is two
    copied.fit(X, Y, verbose=0)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def distiller():
    keras.utils.set_random_seed(3)
    return keras.distillation.Distiller(
        teacher=made.mlp(),
        student=functional(),
        distillation_losses=keras.distillation.LogitsDistillation(),
        student_loss_weight=0.7,
    )


@has_distillation
@pytest.mark.in_test_all("Keras's own tests distil")
def test_a_distiller_learns_as_on_one_device(two):
    """Keras overrides its `compute_loss`."""
    expected, found = distiller(), kmg.distribute(distiller(), two)
    histories = []
    for model in (expected, found):
        model.compile("sgd", "mse", run_eagerly=model is expected)
        history = model.fit(X, Y, batch_size=8, shuffle=False, epochs=2, verbose=0).history
        histories.append(history)
    for one, other in zip(expected.get_weights(), found.get_weights(), strict=True):
        assert difference(one, other) < 2e-5
    assert histories[0].keys() == histories[1].keys()
    assert difference(*(np.array(history["loss"]) for history in histories)) < 2e-5


@has_multi_optimizer
@pytest.mark.in_test_all("Keras's own tests have several optimizers")
def test_one_of_several_optimizers_may_have_nothing_to_update(two):
    """A default optimizer of `MultiOptimizer` without variables is never built."""
    optimizers = keras.optimizers.OptimizerMap(
        keras.optimizers.Adam(), {".*": keras.optimizers.SGD(0.1)}
    )
    results = []
    for distribute in (lambda model: model, lambda model: kmg.distribute(model, two)):
        keras.utils.set_random_seed(1)
        model = distribute(functional())
        optimizer = keras.optimizers.MultiOptimizer(optimizers)
        model.compile(optimizer, "mse", run_eagerly=not results)
        model.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
        results.append(model.get_weights())
        optimizers = keras.optimizers.OptimizerMap(
            keras.optimizers.Adam(), {".*": keras.optimizers.SGD(0.1)}
        )
    assert all(difference(one, other) < 2e-5 for one, other in zip(*results, strict=True))


@pytest.mark.in_test_all("rare")
def test_a_plain_model_trains_a_distributed_model_inside_it(two):
    """The weights reach all replicas."""
    model = fitted(functional(), two)
    normalized = keras.layers.BatchNormalization()
    around = keras.Sequential(
        [keras.Input((5,)), model.get_layer("hidden"), normalized, keras.layers.Dense(1)]
    )
    alone = keras.models.clone_model(around)
    alone.set_weights(around.get_weights())
    for plain in (around, alone):
        plain.compile(keras.optimizers.AdamW(0.1), "mse")
        plain.fit(X, Y, batch_size=8, shuffle=False, verbose=0)
    assert not isinstance(around, kmg.DistributedModel)
    for one, other in zip(alone.get_weights(), around.get_weights(), strict=True):
        assert difference(one, other) < 2e-5
    for variable in model.variables:
        first, second = variable.value.values
        np.testing.assert_array_equal(first, second)
    model.fit(X, Y, verbose=0)
