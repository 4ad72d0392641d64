"""Which batches `fit` trains on, and after which of them it calls back."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.stopped_runs import StopAt, Stopped

import keras_multigpu as kmg
from keras_multigpu.callbacks import BatchSizeScaling, ResumableCheckpoint


def powers(batches, size=2):
    """Batches whose examples are the power of ten of their number."""
    return np.repeat(10.0 ** np.arange(batches), size)[:, None]


def fit(*data, callbacks, steps_per_execution=1, **settings):
    """How often each batch was trained on, as the digits of a number, and the calls of each."""
    dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = kmg.distribute(
        keras.Sequential([keras.Input((1,)), dense]), kmg.strategy("one_device", devices=["CPU:0"])
    )
    # Each step adds the mean of its batch to the weight.
    model.compile(
        keras.optimizers.SGD(1.0), lambda y, x: -x, steps_per_execution=steps_per_execution
    )
    called = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda step, logs: called.append(step))
    model.fit(*data, shuffle=False, verbose=0, callbacks=[note, *callbacks], **settings)
    return int(model.get_weights()[0].item()), called


def run(x, folder, *stop, **settings):
    """A run that resumes from a folder."""
    checkpoint = ResumableCheckpoint(folder, every_steps=1)
    return fit(x, x, callbacks=[checkpoint, *stop], batch_size=2, **settings)


def test_a_resumed_epoch_first_completes_the_execution_in_which_it_stopped(tmp_path):
    with pytest.raises(Stopped):
        run(powers(7), tmp_path, StopAt(0, 1, "on_train_batch_begin"))
    assert run(powers(7), tmp_path, steps_per_execution=3) == (1111111, [2, 5, 6])


def test_data_that_end_within_the_epochs_before_start_again_in_a_resumed_run(tmp_path):
    """Four batches, two of them an epoch: the third epoch has the batches of the first."""
    settings = {"steps_per_epoch": 2, "epochs": 3}
    with pytest.raises(Stopped):
        run(powers(4), tmp_path, StopAt(2, 1, "on_train_batch_begin"), **settings)
    assert run(powers(4), tmp_path, **settings)[0] == 1122


def test_a_dataset_that_drops_its_remainder_drops_that_of_larger_batches():
    """Two batches of three, then one of four."""
    x = powers(2, 3)
    dataset = tf.data.Dataset.from_tensor_slices((x, x)).batch(3, drop_remainder=True)
    scaling = BatchSizeScaling(3, rule="none", schedule={1: 4})
    # The mean of three ones and a ten is 3.25.
    assert fit(dataset, callbacks=[scaling], epochs=2) == (11 + 3, [0, 1, 0])
