"""Training resumes within an epoch, bit for bit, from every source of data."""

import keras
import numpy as np
import pytest
from helpers.reused_models import reused
from test_which_promise import SOURCES, places

import keras_multigpu as kmg
from keras_multigpu.callbacks import ResumableCheckpoint

__all__ = ["places"]  # The fixture with the files.


class StopAt(keras.callbacks.Callback):
    """Interrupts a run in the middle of an epoch, as a kill does."""

    def __init__(self, *place):
        super().__init__()
        self.place = place

    def on_train_batch_begin(self, batch, logs=None):
        run = self.model.training_run
        if (run.epoch, run.step) == self.place:
            raise InterruptedError


@reused
def classifier():
    keras.utils.set_random_seed(3)
    layers = [keras.Input((8, 6, 3)), keras.layers.Rescaling(1 / 255), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Dense(3, activation="softmax")])
    model = kmg.distribute(model, kmg.strategy("one_device", devices=["CPU:0"]))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy")
    return model


def trained(data, folder, *callbacks):
    model = classifier()
    checkpoint = ResumableCheckpoint(folder, every_steps=1)
    model.fit(data, epochs=2, verbose=0, callbacks=[*callbacks, checkpoint])
    return [weight.numpy() for weight in model.variables]


# `test_which_promise.py` checks positions for all sources, so here one of each kind is enough.
@pytest.mark.parametrize("source", ["`from_files`", "`from_dataset`"])
@pytest.mark.in_test_all("one kind of strategy shows it", after=1)
@pytest.mark.slow
def test_training_resumes_from_every_source(source, places, tmp_path):
    """The run stops in its second epoch; each epoch has its own order."""

    def data():
        return SOURCES[source](places, global_batch_size=5, seed=4)

    whole = trained(data(), tmp_path / "whole")
    with pytest.raises(InterruptedError):
        trained(data(), tmp_path / "run", StopAt(1, 2))
    for one, other in zip(whole, trained(data(), tmp_path / "run"), strict=True):
        np.testing.assert_array_equal(one, other)
