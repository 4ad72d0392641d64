"""The processes of `test_folder_cache.py`, which fill one cache folder."""

import time

from numbered_examples import Numbers, numbers_of

from keras_multigpu.data import Batches


class SlowNumbers(Numbers):
    """Two hundred numbers, the last one damaged; reading takes a while."""

    def __init__(self, seconds):
        super().__init__(200, damaged=[199])
        self.seconds = seconds

    def read_one(self, index, seed):
        time.sleep(self.seconds)
        return super().read_one(index, seed)


def read(folder, seconds, results):
    """Send how many examples were read, and the numbers and damage of the cache.

    Args:
        folder: The cache.
        seconds: How long each example takes.
        results: A connection.
    """
    source = SlowNumbers(seconds)
    batches = Batches(source, cache=folder, shuffle=False, on_error="skip")
    numbers = numbers_of(batches.epoch(0))
    results.send((len(source.read_ones), numbers, batches.quarantine))
