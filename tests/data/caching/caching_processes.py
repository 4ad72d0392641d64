"""The processes of `test_folder_cache.py`, which fill or read one cache folder."""

import logging
import os
import time

import numpy as np
from numbered_examples import Numbers

from keras_multigpu.data.caching.cached_source import add_cache

NOBODY = 65534


class SlowNumbers(Numbers):
    """Two hundred numbers, the last one damaged; reading takes a while."""

    def __init__(self, seconds):
        super().__init__(200, damaged=[199])
        self.seconds = seconds

    def read_one(self, index, seed):
        time.sleep(self.seconds)
        return super().read_one(index, seed)


def fill(folder, seconds, as_nobody, results):
    """Send how many examples were read, what was logged, and the numbers and damage of the cache.

    Args:
        folder: The cache.
        seconds: How long each example takes.
        as_nobody: Whether to give up the rights of root, who can write all files.
        results: A connection; an error is sent as its text.
    """
    if as_nobody and os.geteuid() == 0:
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("keras_multigpu").addHandler(handler)
    source = SlowNumbers(seconds)
    kept = add_cache(source, folder)
    try:
        kept.prepare()
    except OSError as error:
        results.send(f"{type(error).__name__}: {error}")
        return
    out = [np.zeros((200, 2, 2, 1), np.uint8), np.zeros(200, np.int32)]
    damaged = kept.read(out, np.arange(200)[::-1], np.zeros((200, 2), np.int32))
    results.send((len(source.read_ones), said, out[0][1:, 0, 0, 0].tolist(), damaged))
