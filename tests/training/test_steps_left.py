"""What a deleted model leaves behind."""

import gc

import keras
import numpy as np

import keras_multigpu as kmg
from keras_multigpu.training.exchange.stages import Stages


def test_the_graphs_of_a_model_are_deleted_with_it():
    """TensorFlow would keep a step's functions until the process ends."""
    strategy = kmg.strategy("mirrored", devices=2)
    model = kmg.distribute(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]), strategy)
    model.compile("adam", "mse")
    gc.collect()
    before = stages()
    model.fit(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"), verbose=0)
    made = stages() - before
    assert len(made) == 1
    del model
    keras.utils.clear_session()
    gc.collect()
    assert not made & stages()


def stages():
    """The numbers of all existing traced functions."""
    return {id(each) for each in gc.get_objects() if isinstance(each, Stages)}
