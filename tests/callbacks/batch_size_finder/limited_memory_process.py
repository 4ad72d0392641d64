"""Searches in a process that may use some more megabytes than it has; prints the result."""

import json
import os
import resource
import sys
from pathlib import Path

os.environ.update(KERAS_BACKEND="tensorflow", CUDA_VISIBLE_DEVICES="-1", TF_CPP_MIN_LOG_LEVEL="3")

import keras
import numpy as np
import tensorflow as tf

import keras_multigpu as kmg
from keras_multigpu.callbacks.batch_size_finder import BatchSizeFinder

MEGABYTE = 2**20


class Wide(keras.layers.Layer):
    """Makes 64 MB of each row, in one tensor that no gradient keeps.

    Large pieces, because some of TensorFlow's kernels do not look whether they got the small
    buffers that they ask the system for, and crash.
    """

    def call(self, x):
        wide = tf.fill([tf.shape(x)[0], 16 * MEGABYTE], 0.5)
        return x * tf.reduce_max(wide, axis=1, keepdims=True)


def main(megabytes: int) -> None:
    """A row is one number, then 64 megabytes."""
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1)(Wide()(inputs)))
    model = kmg.distribute(model, kmg.strategy("one_device", devices=["CPU:0"]))
    model.compile("sgd", "mse")
    x = np.ones((2, 1), "float32")
    model.fit(x, x, batch_size=2, verbose=0)
    before = model.get_weights()
    size = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmSize:")
    )
    limit = size + megabytes * MEGABYTE
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    finder = BatchSizeFinder(None, maximum=1000, margin=0.6, steps=1, verbose=0)
    repeated = kmg.data.from_arrays(np.ones((2000, 1), "float32"), np.ones(2000))
    model.fit(repeated, epochs=0, verbose=0, callbacks=[finder])
    unchanged = all(map(np.array_equal, before, model.get_weights()))
    found = {"largest": finder.largest_replica_batch_size, "unchanged": unchanged}
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
