"""A training that stands still for a while, because of one of its workers.

standing_worker.py FOLDER

Its sixth batch comes when there is a file "data" in the folder. The first worker's eighth step goes
on, after its first sum, when there is a file "step".
"""

import json
import os
import sys
import time
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.training.watching import standstill

FOLDER = Path(sys.argv[1])
IS_SECOND = json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1
X = np.ones((4, 3), "float32")
# Someone with little patience.
standstill.POLL, standstill.LEAST, standstill.USUAL, standstill.ANSWER = 0.1, 2.0, 0, 3


def wait_for(name):
    (FOLDER / f"waits for {name}").touch()
    while not (FOLDER / name).exists():
        time.sleep(0.1)


def batches():
    for number in range(10):
        if number == 5 and IS_SECOND:
            wait_for("data")
        yield X, X[:, :1]


class Stuck(keras.layers.Layer):
    """The first replica looks at the rows of all, in Python."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def look(self, x):
        self.calls += 1
        if self.calls == 8:
            wait_for("step")
        return x

    def call(self, x):
        found = tf.numpy_function(self.look, [x], x.dtype, stateful=False)
        return tf.ensure_shape(tf.stop_gradient(found), x.shape)


strategy = kmg.strategy()
layers = [keras.Input((3,)), Stuck(), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
model = kmg.distribute(keras.Sequential(layers), strategy, self_check=False)
model.compile("sgd", "mse")
model.fit(batches(), steps_per_epoch=10, verbose=0)
sys.stdout.write("trained\n")
