"""What the processes of `test_caching.py` do: fill or read one cache folder."""

import logging
import os
import time

import numpy as np
import tensorflow as tf
from helpers.example_source import ExampleSource

from keras_multigpu.data.caching.cached_source import cached
from keras_multigpu.data.pipeline.damage import DamagedExample

NOBODY = 65534


class SlowNumbers(ExampleSource):
    """Two hundred examples full of their number, the last one damaged; reading takes a while."""

    name = "slow numbers"
    num_examples = 200
    spec = (tf.TensorSpec((1024,), tf.float32), None, None)

    def __init__(self, seconds):
        self.seconds = seconds
        self.read_ones = []

    def read_one(self, index, seed):
        time.sleep(self.seconds)
        self.read_ones.append(index)
        if index == 199:
            raise DamagedExample("torn in two")
        return np.full(1024, index, np.float32), None, None

    def identity(self, exact=False):
        return "slow numbers"


class Kept(logging.Handler):
    """Appends what is logged to a list."""

    def __init__(self, said):
        super().__init__()
        self.said = said

    def emit(self, record):
        self.said.append(record.getMessage())


def fill(folder, seconds, as_nobody, results):
    """Send how many examples were read, what was logged, and the numbers and damage of the cache.

    Args:
        folder: The cache.
        seconds: How long each example takes.
        as_nobody: Whether to give up the rights of root, to whom all files can be written.
        results: A connection; an error is sent as its text.
    """
    if as_nobody and os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    said = []
    logging.getLogger("keras_multigpu").addHandler(Kept(said))
    source = SlowNumbers(seconds)
    kept = cached(source, folder)
    try:
        kept.prepare()
    except OSError as error:
        results.send(f"{type(error).__name__}: {error}")
        return
    out = [np.zeros((200, 1024), np.float32)]
    damaged = kept.read(out, np.arange(200)[::-1], np.zeros((200, 2), np.int32))
    results.send((len(source.read_ones), said, out[0][1:, 1000].tolist(), damaged))
