"""A model saved on N replicas is a plain Keras model, and vice versa."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from exactness import models as made
from exactness.runs import difference
from helpers.processes_left import PATIENCE, python_path
from helpers.reused_models import reused

import keras_multigpu as kmg

pytestmark = [
    # Keras 3.15.1 writes weights through an `__array__` that NumPy 2 finds outdated.
    pytest.mark.filterwarnings(
        "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"
    )
]

X, Y, _ = made.regression(29)


class Unregistered(made.Subclassed):
    """A subclass that Keras can load only when it is named in `custom_objects`."""


MODELS = {
    "Sequential": made.mlp,
    "functional": made.nested,
    "BatchNorm": made.bn_mlp,
    "unregistered subclass": Unregistered,
}


def replicas(count):
    return kmg.strategy("mirrored", devices=count)


def compiled(name="Sequential"):
    """A compiled model, always with the same first weights."""
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    return model


@reused
def trained(name="Sequential"):
    model = kmg.distribute(compiled(name), replicas(2))
    fit(model)
    return model


def fit(model, **options):
    """An epoch of batches of 8, the last one of 5; plain Keras makes no graph, to save time."""
    model.run_eagerly = not isinstance(model, kmg.DistributedModel)
    return model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, **options)


def assert_close(expected, found):
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert difference(np.asarray(one), np.asarray(other)) < 2e-5


def optimizer_values(model):
    return [variable.numpy() for variable in model.optimizer.variables]


def traces(path):
    """The files in an archive that mention this package or its classes."""
    with zipfile.ZipFile(path) as archive:
        contents = {member: archive.read(member) for member in archive.namelist()}
    names = (b"keras_multigpu", b"DistributedModel", b"MirroredVariable")
    return [member for member, text in contents.items() if any(name in text for name in names)]


def save(model, path):
    model.save(path)


def save_as_function(model, path):
    keras.saving.save_model(model, path)


def save_as_checkpoint(model, path):
    """`ModelCheckpoint`, after a second epoch."""
    fit(model, callbacks=[keras.callbacks.ModelCheckpoint(path)])


IN_PLAIN_KERAS = """
import sys
from pathlib import Path

import keras
import numpy as np
from exactness import models as made


class Unregistered(made.Subclassed):
    pass


x, y, _ = made.regression(29)
for path in Path(sys.argv[1]).glob("*.keras"):
    model = keras.saving.load_model(path, custom_objects={"Unregistered": Unregistered})
    # To trace takes longer than these few steps.
    model.run_eagerly = True
    np.save(path.with_suffix(".npy"), model.predict(x, verbose=0))
    assert int(model.optimizer.iterations) in (4, 8)
    model.fit(x, y, verbose=0)
assert "keras_multigpu" not in sys.modules
"""


@pytest.mark.slow
def test_saved_models_are_plain_keras_models(tmp_path):
    expected = {}
    for name in MODELS:
        # However it is written, it is the same file: one model is enough to see that.
        ways = (save, save_as_function, save_as_checkpoint) if name == "BatchNorm" else (save,)
        model = trained(name)
        for way in ways:
            path = tmp_path / f"{name} {way.__name__}.keras"
            way(model, path)
            assert traces(path) == []
            expected[path] = model.predict(X, verbose=0)
    subprocess.run(
        [sys.executable, "-c", IN_PLAIN_KERAS, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": python_path(Path(__file__).parents[1])},
        timeout=PATIENCE,
        check=True,
    )
    for path, predictions in expected.items():
        assert_close([predictions], [np.load(path.with_suffix(".npy"))])


@pytest.mark.slow
def test_replicas_continue_a_training_saved_by_plain_keras(tmp_path):
    uninterrupted, path = compiled("BatchNorm"), tmp_path / "model.keras"
    fit(uninterrupted)
    uninterrupted.save(path)
    fit(uninterrupted)
    loaded = keras.saving.load_model(path)
    resumed = kmg.distribute(loaded, replicas(3))
    fit(resumed)
    assert_close(uninterrupted.get_weights(), resumed.get_weights())
    assert_close(optimizer_values(uninterrupted), optimizer_values(resumed))


@pytest.mark.slow
def test_a_loaded_model_trains_on_another_number_of_replicas(tmp_path):
    """As if one device had never stopped."""
    path, expected = tmp_path / "model.keras", compiled()
    trained().save(path)
    resumed = kmg.distribute(keras.saving.load_model(path), replicas(3))
    fit(resumed)
    for _ in range(2):
        fit(expected)
    assert_close(expected.get_weights(), resumed.get_weights())
    assert_close(optimizer_values(expected), optimizer_values(resumed))


@pytest.mark.slow
def test_weights_travel_in_both_directions(tmp_path):
    """`save_weights` and `load_weights`, from replicas to one device and back."""
    path, model, plain = tmp_path / "model.weights.h5", trained("BatchNorm"), compiled("BatchNorm")
    model.save_weights(path)
    fit(plain)
    plain.load_weights(path)
    assert_close(model.get_weights(), plain.get_weights())
    assert_close(optimizer_values(model), optimizer_values(plain))
    plain.set_weights([2.0 * weight for weight in plain.get_weights()])
    plain.save_weights(path)
    model.load_weights(path)
    assert_close(plain.get_weights(), model.get_weights())
    for variable in model.variables:
        first, second = model.distribute_strategy.experimental_local_results(variable.value)
        np.testing.assert_array_equal(first, second)


@pytest.mark.slow
def test_an_exported_model_predicts_the_same(tmp_path):
    """`export` writes a SavedModel that TensorFlow serves."""
    model = trained("BatchNorm")
    model.export(tmp_path / "exported", verbose=False)
    exported = tf.saved_model.load(tmp_path / "exported")
    assert_close([model.predict(X, verbose=0)], [exported.serve(X)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "training", "warns"),
    [
        (keras.layers.RandomFlip(), None, True),
        (kmg.augmentation.RandomErasing(), None, True),
        (keras.layers.RandomFlip(), False, False),
        (keras.layers.Dropout(0.5), None, False),
        (keras.layers.BatchNormalization(), None, False),
    ],
)
def test_an_export_that_augments_is_a_warning(layer, training, warns, tmp_path, recwarn):
    """Which `predict` does not; the row with False is a model whose own `call` says so."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner = keras.Sequential([layer])

        def call(self, x, training=training):
            return self.inner(x)

    model = kmg.distribute(Model(), kmg.strategy(devices=2))
    x = np.random.default_rng(0).uniform(size=(16, 4, 4, 3)).astype("float32")
    expected = model.predict(x, verbose=0)
    model.export(tmp_path, verbose=False)
    found = [each for each in recwarn if "The exported model augments" in str(each.message)]
    assert [layer.name in str(each.message) for each in found] == [True] * warns
    exported = tf.saved_model.load(tmp_path)
    assert np.allclose(exported.serve(x), expected) is not warns
