"""Logs become what Keras's callbacks and history have: by hand."""

import numpy as np
import tensorflow as tf

from keras_multigpu.training.logs import flattened, pythonic


def test_numbers_become_python_floats():
    several = tf.constant([1.0, 2.0])
    logs = pythonic({"loss": tf.constant(1.5), "acc": np.float32(0.5), "n": 3, "each": several})
    each = logs.pop("each")
    assert type(each) is np.ndarray
    assert each.tolist() == [1, 2]
    assert list(logs.items()) == [("acc", 0.5), ("loss", 1.5), ("n", 3.0)]
    assert all(type(value) is float for value in logs.values())


def test_nested_logs_move_up():
    logs = {"loss": 1, "f1": {"class_0": 2, "deeper": {"class_1": 3}}, "acc": 4}
    assert list(flattened(logs).items()) == [
        ("acc", 4),
        ("class_0", 2),
        ("class_1", 3),
        ("loss", 1),
    ]
    assert flattened({}) == {}
