"""The processes of `test_folder_cache.py`, which fill one cache folder."""

import time

import numpy as np
from numbered_examples import Numbers

from keras_multigpu.data.caching.cached_source import add_cache


class SlowNumbers(Numbers):
    """Two hundred numbers, the last one damaged; reading takes a while."""

    def __init__(self, seconds):
        super().__init__(200, damaged=[199])
        self.seconds = seconds

    def read_one(self, index, seed):
        time.sleep(self.seconds)
        return super().read_one(index, seed)


def fill(folder, seconds, results):
    """Send how many examples were read, and the numbers and damage of the cache.

    Args:
        folder: The cache.
        seconds: How long each example takes.
        results: A connection.
    """
    source = SlowNumbers(seconds)
    kept = add_cache(source, folder)
    kept.prepare()
    out = [np.zeros((200, 2, 2, 1), np.uint8), np.zeros(200, np.int32)]
    damaged = kept.read(out, np.arange(200)[::-1], np.zeros((200, 2), np.int32))
    results.send((len(source.read_ones), out[0][1:, 0, 0, 0].tolist(), damaged))
