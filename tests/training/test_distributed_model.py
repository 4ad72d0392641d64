"""The ways to make a `DistributedModel`, and what it keeps of the original model."""

import gc

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.cpu_replicas import on_replicas
from helpers.cpu_replicas import replicas_of as strategy
from helpers.keras_versions import has_distributions
from helpers.one_device import assert_as_one_device, assert_close

import keras_multigpu as kmg
from keras_multigpu.training.announcing import announce
from keras_multigpu.training.exchange.stages import Stages
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.replication import replication_of

X = np.random.default_rng(0).normal(size=(13, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(13, 1)).astype("float32")


def ends():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8, activation="tanh")(inputs)
    return inputs, keras.layers.Dense(1)(hidden)


def sequential():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


class Subclassed(kmg.DistributedModel):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, x):
        return self.out(self.hidden(x))


class OwnStep(kmg.DistributedModel):
    def train_step(self, data):
        return {**super().train_step(data), "seen": tf.ones(())}


class PlainSubclass(keras.Model):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(1)
        self.body = sequential()

    def call(self, x):
        return self.body(x)


FORMS = {
    "sequential, not built": sequential,
    "made directly": lambda: kmg.DistributedModel(*ends()),
    "by subclassing": Subclassed,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.slow
def test_every_form_trains_as_plain_keras(form):
    def weights(place, **options):
        model = place(keras.Model(*ends()))
        if isinstance(model, kmg.DistributedModel):
            model = place(FORMS[form]())
            assert isinstance(model, kmg.DistributedModel)
            assert model.distribute_strategy is strategy(2)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    assert_as_one_device(weights)


def test_an_open_scope_decides_the_strategy():
    with strategy(2).scope():
        models = [kmg.DistributedModel(*ends()), Subclassed()]
    assert all(model.distribute_strategy is strategy(2) for model in models)


def test_functional_use_does_not_change_the_class():
    """`DistributedModel(inputs, outputs)` leaves the bases of its class alone."""
    kmg.DistributedModel(*ends())
    OwnStep(*ends())
    assert kmg.DistributedModel.__bases__ == (keras.Model,)
    assert OwnStep.__bases__ == (kmg.DistributedModel,)


@pytest.mark.slow
def test_distribute_keeps_what_the_model_has_learned():
    plain, model = keras.Model(*ends()), keras.Model(*ends())
    for each in (plain, model):
        each.compile("adam", "mse", metrics=["mae"], run_eagerly=True)
        each.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
    model.run_eagerly = False
    layers = model.layers
    for replicas in (2, 3):
        assert on_replicas(model, replicas) is model
        assert model.layers == layers
        plain.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        model.fit(X, Y, batch_size=4, shuffle=False, verbose=0)
        found, expected = (
            [v.numpy() for v in (*each.weights, *each.optimizer.variables)]
            for each in (model, plain)
        )
        assert_close(found, expected, atol=1e-7)


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="not a model of Keras 3.*Expected.*Received: model=3"):
        kmg.distribute(3)
    with pytest.raises(ValueError, match="not a strategy.*Received: strategy='mirrored'"):
        kmg.distribute(sequential(), "mirrored")
    with pytest.raises(ValueError, match="Both `strategy` and `devices` were given"):
        kmg.distribute(sequential(), strategy(2), devices=2)
    with pytest.raises(ValueError, match="compile"):
        kmg.distribute(sequential(), strategy(2)).fit(X, Y)


def test_a_model_of_another_keras_is_named():
    theirs = type("Sequential", (), {"__module__": "tf_keras.src.engine.sequential"})
    own = type("Own", (theirs,), {})
    for call in (
        lambda: kmg.distribute(theirs()),
        lambda: kmg.distribute(own()),
        lambda: kmg.verify(own, lambda: (X, Y), replicas=(2,)),
    ):
        with pytest.raises(ValueError, match="(a model|`keras.Model`) of Keras 3"):
            call()


@pytest.mark.slow
def test_repeated_calls_compile_nothing_new():
    """The second `fit`, `evaluate` and `predict` use the steps of the first."""
    model = on_replicas(keras.Model(*ends()), 2)
    model.compile("sgd", "mse")
    made = []
    for _ in range(2):
        model.fit(X, Y, batch_size=4, verbose=0)
        model.evaluate(X, Y, verbose=0)
        model.predict(X, verbose=0)
        modes = ("train", "test", "predict")
        functions = [replication_of(model).step_functions(model, mode) for mode in modes]
        made.append([id(step) for function in functions for step in function.runners])
    assert made[0] == made[1] and len(made[0]) == 3


def test_a_model_takes_the_strategy_in_whose_scope_it_was_made():
    with strategy(3).scope():
        plain, own = sequential(), Subclassed()
    kmg.strategy(devices=2)
    assert kmg.distribute(plain).distribute_strategy is strategy(3)
    assert own.distribute_strategy is strategy(3)
    for said, expected in (({"devices": 4}, 4), ({"strategy": strategy(2)}, 2)):
        with strategy(3).scope():
            plain = sequential()
        assert kmg.distribute(plain, **said).distribute_strategy is strategy(expected)


def test_repr_shows_the_number_of_replicas():
    for make in (sequential, PlainSubclass, lambda: keras.Model(*ends())):
        plain = repr(model := make())
        assert repr(kmg.distribute(model, strategy(2))) == plain[:-1] + ", replicas=2>"
    assert "replicas" not in repr(Subclassed())


def test_the_first_fit_says_where_it_trains(caplog):
    caplog.set_level("INFO", "keras_multigpu")
    model = kmg.distribute(keras.Sequential([keras.layers.Dense(1)]), devices=1)
    model.compile("sgd", "mse", run_eagerly=True)
    for _ in range(2):
        model.fit(X, Y, verbose=0)
    said = [text for text in caplog.messages if text.startswith("Training")]
    assert said == ["Training on 1 replica: CPU:0."]


@pytest.mark.parametrize(("verbose", "times"), [("auto", 1), (2, 1), (0, 0)])
def test_without_a_log_handler_the_first_fit_prints_where_it_trains(verbose, times, capsys):
    model = kmg.distribute(keras.Model(*ends()), devices=2)
    for _ in range(2):
        announce(replication_of(model), model, verbose)
    assert capsys.readouterr().out == "Training on 2 replicas: CPU:0, CPU:1.\n" * times


def test_sums_log_nothing(caplog):
    """TensorFlow's own reductions log a line for each of them, which notebooks show."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization()])
    stock = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    model = kmg.distribute(model, stock, self_check=False)
    model.compile("sgd", "mse")
    caplog.set_level("INFO", "tensorflow")
    model.fit(X, X, verbose=0)
    assert caplog.messages == []


@pytest.fixture
def data_parallel():
    """Keras's own spelling, which backends share."""
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"]))
    yield keras.distribution.distribution()
    keras.distribution.set_distribution(None)


@has_distributions
def test_keras_distributions_are_understood(data_parallel):
    """Set for all, or given."""
    for given in (None, data_parallel):
        keras.utils.set_random_seed(1)
        model = kmg.distribute(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]), given)
        assert [each.device[-5:] for each in copies_of(model.weights[0])] == ["CPU:0", "CPU:1"]
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 4)), np.ones((8, 1)), 4, verbose=0)


@has_distributions
def test_what_divides_layers_is_refused():
    mesh = keras.distribution.DeviceMesh((1, 2), ["batch", "model"], ["cpu:0", "cpu:1"])
    layouts = keras.distribution.LayoutMap(mesh)
    given = keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")
    with pytest.raises(ValueError, match='pass `shard="weights"`'):
        kmg.distribute(keras.Sequential([keras.layers.Dense(1)]), given)


def stages():
    """The numbers of all existing traced functions."""
    return {id(each) for each in gc.get_objects() if isinstance(each, Stages)}


def test_the_graphs_of_a_model_are_deleted_with_it():
    """TensorFlow would keep a step's functions until the process ends."""
    model = on_replicas(keras.Model(*ends()), 2)
    model.compile("adam", "mse")
    gc.collect()
    before = stages()
    model.fit(X, Y, verbose=0)
    made = stages() - before
    assert len(made) == 1
    del model
    keras.utils.clear_session()
    gc.collect()
    assert not made & stages()
