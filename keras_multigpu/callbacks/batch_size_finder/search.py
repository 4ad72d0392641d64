"""Runs training steps of different sizes, and finds out which of them fit into memory."""

import math
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import tensorflow as tf

from keras_multigpu.callbacks.trials import of_size
from keras_multigpu.devices import forget_peaks, memory_peak
from keras_multigpu.host_memory import available_bytes, peak_bytes, resident_bytes
from keras_multigpu.training.logs import pythonic
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.shares import Batch

PATIENCE = 5.0
"""After how many seconds a search begins to report progress."""

# Devices do not always report `RESOURCE_EXHAUSTED`: GPU libraries have their own messages.
PHRASES = (
    "cuda_error_out_of_memory",
    "dst tensor is not initialized",
    "failed to allocate",
    "oom when allocating",
    "out of memory",
)

# Which fraction of the free memory may be used: other programs need some, too.
USABLE = 0.9


class Try(NamedTuple):
    """The result of one size.

    Attributes:
        replica_batch_size: How many examples each replica processed at a time.
        fits: Whether there was enough memory.
        seconds: How long the last step took; None if a step failed.
        peak_bytes: The peak memory of any GPU; None without GPUs.
    """

    replica_batch_size: int
    fits: bool
    seconds: float | None
    peak_bytes: int | None


class SizeSearch:
    """Tries sizes for some steps each, inside `run.trial`."""

    def __init__(
        self, run: TrainingRun, batch: Batch, steps: int, say: Callable[[str], None]
    ) -> None:
        self.tries: list[Try] = []
        self._run = run
        self._batch = batch
        self._steps = steps
        self._say = say
        self._host = HostMemory([replica.device for replica in run.group.replicas])
        self._began = time.perf_counter()

    def fits(self, replica_batch_size: int) -> bool:
        """Whether every replica can process this many examples at a time."""
        forget_peaks()
        seconds = self._seconds(self._run.replicas * replica_batch_size, 1)
        fits = seconds is not None
        self.tries.append(Try(replica_batch_size, fits, seconds, device_peak()))
        if time.perf_counter() - self._began > PATIENCE:
            outcome = f"{seconds:.2g} s a step" if fits else "out of memory"
            self._say(f"trying {replica_batch_size} per replica: {outcome}")
        return fits

    def pieces_that_fit(self, global_batch_size: int, largest_share: int) -> int | None:
        """Into how many micro-batches a batch must be split to fit; None if none fit."""
        # They may have to be smaller than what fits alone: summing their gradients takes memory.
        share = math.ceil(global_batch_size / self._run.replicas)
        for most in range(min(largest_share, share), 0, -1):
            pieces = math.ceil(share / most)
            if math.ceil(share / pieces) != most:
                # The same number of pieces was already tried.
                continue
            if pieces == 1 or self._seconds(global_batch_size, pieces) is not None:
                return pieces
        return None

    def _seconds(self, global_batch_size: int, pieces: int) -> float | None:
        """How long a step takes; None if it does not fit, on any worker."""
        seconds = self._seconds_here(global_batch_size, pieces)
        return None if self._run.group.agree(seconds is None) else seconds

    def _seconds_here(self, global_batch_size: int, pieces: int) -> float | None:
        at_once = math.ceil(global_batch_size / pieces)
        if self._host.is_too_small(at_once):
            return None
        try:
            batch = of_size(self._batch, global_batch_size)
            for _ in range(self._steps):
                asked = time.perf_counter()
                # On one of several workers it may fail, and none must wait for it then.
                with self._run.group.pretending():
                    # Reading the logs waits for the devices.
                    pythonic(self._run.train_on(batch, micro_batches=pieces))
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
    """The largest size that fits, and the smallest that was found not to fit.

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


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError)):
        return True
    text = str(error).lower()
    return isinstance(error, tf.errors.OpError) and any(phrase in text for phrase in PHRASES)


class HostMemory:
    """Predicts when steps on CPUs need more memory than there is."""

    def __init__(self, devices: Iterable[str]) -> None:
        # A GPU refuses memory that it does not have. Linux grants it and kills the process that
        # uses it, so on CPUs the need of a larger batch is extrapolated from smaller ones.
        self._matters = any("CPU" in device.upper() for device in devices)
        self._before = resident_bytes() or 0
        self._per_example = 0.0

    def learn(self, global_batch_size: int) -> None:
        peak = peak_bytes()
        if peak is not None:
            self._per_example = max(0.0, (peak - self._before) / global_batch_size)

    def is_too_small(self, global_batch_size: int) -> bool:
        return self._matters and self._per_example * global_batch_size > USABLE * available_bytes()


def device_peak() -> int | None:
    """The most bytes that any GPU has held since `forget_peaks`; None without GPUs."""
    peaks = [memory_peak(device.name) for device in tf.config.list_logical_devices("GPU")]
    return max((peak for peak in peaks if peak is not None), default=None)
