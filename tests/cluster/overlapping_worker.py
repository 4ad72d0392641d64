"""A worker with one core, whose backward pass waits for the first sum to finish.

    overlapping_worker.py FOLDER

It writes a file named after its index: how many seconds before the end of the backward pass the
first gradients were summed.
"""

import os
import sys
import time
from pathlib import Path

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.rows_in_python import let_python_see_rows
from training.test_overlap import NearTheInput, noted

import keras_multigpu as kmg
from keras_multigpu.training.exchange import packing
from keras_multigpu.training.exchange.exchange import Exchange


def main(folder):
    # Before TensorFlow starts one thread for each core.
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    let_python_see_rows(pytest.MonkeyPatch())
    layer, summed, sum_of = NearTheInput(), [], Exchange.sum

    def note():
        summed.append(time.perf_counter())
        layer.event.set()

    def noting_sum(exchange, parts):
        return [
            [noted(each, note) if each.dtype == tf.float32 else each for each in own]
            for own in sum_of(exchange, parts)
        ]

    packing.BUCKET, Exchange.sum = 64, noting_sum
    layers = [keras.Input((4,)), layer, keras.layers.Dense(8), keras.layers.Dense(3)]
    model = kmg.distribute(keras.Sequential(layers))
    model.compile("sgd", "mse")
    model.fit(np.ones((4, 4), "float32"), np.ones((4, 3), "float32"), batch_size=4, verbose=0)
    worker = kmg.strategy().cluster_resolver.task_id
    Path(folder, str(worker)).write_text(str(max(layer.times) - min(summed)))


if __name__ == "__main__":
    main(sys.argv[1])
