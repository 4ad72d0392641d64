"""Tries real training steps of different sizes, and notes which of them fit into memory."""

import math
import time
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from keras_multigpu.callbacks.batch_size_finder.out_of_memory import (
    HostMemory,
    device_peak,
    forget_device_peaks,
    is_out_of_memory,
)
from keras_multigpu.callbacks.fit_run import of_size
from keras_multigpu.training.logs import pythonic
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.shares import Batch

PATIENCE = 5.0
"""After how many seconds a search begins to say how far it is."""


class Try(NamedTuple):
    """What came of trying one size.

    Attributes:
        replica_batch_size: How many examples each replica took at once.
        fits: Whether there was enough memory.
        seconds: How long a step took, the last one; None where one failed.
        peak_bytes: The most that any GPU held at a time; None without GPUs.
    """

    replica_batch_size: int
    fits: bool
    seconds: float | None
    peak_bytes: int | None


class SizeSearch:
    """Finds the sizes that stand so many steps, inside of `run.trial`."""

    def __init__(
        self, run: TrainingRun, batch: Batch, steps: int, say: Callable[[str], None]
    ) -> None:
        self.tries: list[Try] = []
        self._run = run
        self._batch = batch
        self._steps = steps
        self._say = say
        self._host = HostMemory(run.devices)
        self._began = time.perf_counter()

    def fits(self, replica_batch_size: int) -> bool:
        """Whether every replica can take so many examples at once."""
        forget_device_peaks()
        seconds = self._seconds(self._run.replicas * replica_batch_size, 1)
        fits = seconds is not None
        self.tries.append(Try(replica_batch_size, fits, seconds, device_peak()))
        if time.perf_counter() - self._began > PATIENCE:
            outcome = f"{seconds:.2g} s a step" if fits else "out of memory"
            self._say(f"trying {replica_batch_size} per replica: {outcome}")
        return fits

    def pieces_that_fit(self, global_batch_size: int, largest_share: int) -> int | None:
        """In how many pieces replicas can take their shares of a batch; None if in none."""
        # They may have to be smaller than what fits at once: to sum their gradients takes memory.
        share = math.ceil(global_batch_size / self._run.replicas)
        for most in range(min(largest_share, share), 0, -1):
            pieces = math.ceil(share / most)
            if math.ceil(share / pieces) != most:
                # The same number of pieces was tried with a larger most.
                continue
            if pieces == 1 or self._seconds(global_batch_size, pieces) is not None:
                return pieces
        return None

    def _seconds(self, global_batch_size: int, pieces: int) -> float | None:
        """How long a step takes; None if it does not fit, on any worker."""
        seconds = self._seconds_here(global_batch_size, pieces)
        return None if self._run.agree(seconds is None) else seconds

    def _seconds_here(self, global_batch_size: int, pieces: int) -> float | None:
        at_once = math.ceil(global_batch_size / pieces)
        if self._host.is_too_small(at_once):
            return None
        try:
            batch = of_size(self._batch, global_batch_size)
            for _ in range(self._steps):
                asked = time.perf_counter()
                # Reading the logs waits for the devices.
                pythonic(self._run.try_on(batch, micro_batches=pieces))
                seconds = time.perf_counter() - asked
        except (MemoryError, tf.errors.OpError) as error:
            if is_out_of_memory(error):
                return None
            raise
        self._host.learn(at_once)
        return seconds


def largest_size(
    fits: Callable[[int], bool], minimum: int, maximum: int | None, slack: float = 0.0
) -> tuple[int | None, int | None]:
    """The largest size that fits, and the smallest that was seen not to.

    largest_size(lambda size: size <= 11, 1, None)    tries 1 2 4 8 16 12 10 11
    (11, 12)
    """
    good, bad, size = None, None, minimum
    while bad is None:
        if fits(size):
            good = size
            if size == maximum:
                return good, None
            size = 2 * size if maximum is None else min(2 * size, maximum)
        else:
            bad = size
    while good is not None and bad - good > max(1, slack * good):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good, bad
