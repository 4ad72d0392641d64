"""`BatchSizeFinder`: the largest replica batch that fits into memory."""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.callbacks.run_callback import RunCallback
from keras_multigpu.callbacks.trials import repeat_batches, resize_batch
from keras_multigpu.checks import (
    error_of,
    require_choice,
    require_number,
    require_positive_integer,
)
from keras_multigpu.devices import forget_peaks, memory_peak
from keras_multigpu.host_memory import available_bytes, peak_bytes, resident_bytes
from keras_multigpu.seeded_layers import preserve_random_state
from keras_multigpu.training.exchange.exchange import Exchange, on_each
from keras_multigpu.training.run import TrainingRun, pythonic
from keras_multigpu.training.shares import Batch

# Devices do not always report `RESOURCE_EXHAUSTED`: GPU libraries have their own messages.
PHRASES = (
    "cuda_error_out_of_memory",
    "dst tensor is not initialized",
    "failed to allocate",
    "oom when allocating",
    "out of memory",
)

# The fraction of the largest size that is left unused, for fragmentation and for what other
# callbacks measure; the search is exact to half of it.
MARGIN = 0.1

# How many steps are run with each size. Later ones may need more memory.
STEPS = 3

# Which fraction of the free memory a step may use: other programs need some, too.
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


class BatchSizeFinder(RunCallback):
    """Finds the largest replica batch that fits into memory, before the first epoch.

    It runs real training steps on all replicas, with 1, 2, 4, 8, ... examples on each until memory
    runs out, then bisects between the last two sizes. Afterwards everything is restored bit for
    bit: model, optimizer, metrics, random numbers, and the position in the data.

    `fit(..., epochs=0)` only searches. The batch size of the data does not matter: the rows of the
    first batch are repeated.

    Args:
        apply: What this `fit` does with the size. `"replica_batch_size"` trains with it.
            None changes nothing.
        minimum: The first size. It must fit.
        maximum: The largest size to try. By default the number of examples divided by the
            replicas, or unlimited if that is not known.
        verbose: 1 prints the result, 0 nothing.

    Attributes:
        best_replica_batch_size: The size to use. None before a search.
        largest_replica_batch_size: The largest size that fitted; a tenth of it is left unused,
            unless `maximum` or the number of examples is the limit.
        tries: A `Try` for each size, in order: `replica_batch_size`, `fits`, `seconds` of a step
            (without communication between workers), and `peak_bytes` on GPUs.
    """

    saved = ("best_replica_batch_size", "largest_replica_batch_size")

    def __init__(
        self,
        apply: str | None = "replica_batch_size",
        *,
        minimum: int = 1,
        maximum: int | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__(verbose=verbose)
        require_choice("apply", apply, ["replica_batch_size", None])
        require_positive_integer("minimum", minimum)
        if maximum is not None:
            require_positive_integer("maximum", maximum)
            expected = "not below `minimum`"
            require_number("maximum", maximum, lambda n: n >= minimum, expected)
        self.best_replica_batch_size: int | None = None
        self.largest_replica_batch_size: int | None = None
        self.tries: list[Try] = []
        self.apply = apply
        self.minimum = int(minimum)
        self.maximum = maximum

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        run = self.run
        if self.apply == "replica_batch_size":
            # Data with fixed batches are refused now, not after a search.
            run.first_batches((run.global_batch_size or 0) + 1)
        self.best_replica_batch_size = None
        run.after_begin(lambda: self._begin(run))

    def _begin(self, run: TrainingRun) -> None:
        if self.best_replica_batch_size is not None:
            # Restored: a resumed run already knows its batches.
            return
        with preserve_random_state():
            batch = next(repeat_batches(run))
        search = SizeSearch(run, batch)
        self.tries = search.tries
        # Compiling the step draws random numbers; `fit` will draw the same ones.
        with run.trial(batch), preserve_random_state():
            found = self._search(run, search)
            outcome = self._apply(run)
        self.say(f"{found}; {outcome}.")

    def _search(self, run: TrainingRun, search: "SizeSearch") -> str:
        """Find the size and return what to say about it."""
        examples = run.feed.source.num_examples
        if examples is None and run.steps_per_epoch and run.global_batch_size:
            examples = run.steps_per_epoch * run.global_batch_size
        limits = [] if self.maximum is None else [self.maximum]
        if examples is not None:
            limits.append(max(self.minimum, examples // run.replicas))
        maximum = min(limits, default=None)
        good, bad = largest_size(search.fits, self.minimum, maximum, MARGIN / 2)
        if good is None:
            raise error_of(
                MemoryError,
                f"The model does not fit into memory with {self.minimum} examples on each replica.",
                "Expected at least `minimum` examples to fit.",
                "Pass a smaller `minimum`, shrink the examples or the model, use mixed precision, "
                "or free other memory of the device.",
                minimum=self.minimum,
                replicas=run.replicas,
            )
        self.largest_replica_batch_size = good
        if bad is None:
            self.best_replica_batch_size = good
            why = "`maximum`" if maximum == self.maximum else "the number of examples"
            return f"{good} examples fit on each replica, the most that {why} allows"
        best = self.best_replica_batch_size = max(self.minimum, int(good * (1 - MARGIN)))
        spare = "" if best == good else f", {best} with a margin"
        return f"{good} examples fit on each replica and {bad} do not{spare}"

    def _apply(self, run: TrainingRun) -> str:
        """Let training use the size and return what to say about it."""
        best, replicas, size = self.best_replica_batch_size, run.replicas, run.global_batch_size
        assert best is not None
        if self.apply is None:
            return "nothing is changed"
        run.set_batch_size(replicas * best, largest_share=best)
        before = "" if size is None else f" instead of {size}"
        return f"global batches have {replicas * best} examples from now on{before}"


class SizeSearch:
    """Tries sizes for some steps each, inside `run.trial`."""

    def __init__(self, run: TrainingRun, batch: Batch) -> None:
        self.tries: list[Try] = []
        self._run = run
        self._batch = batch
        # A step may fail on one worker only, and the others must not wait for it.
        group = run.group
        self._exchange = group.exchange
        if group.is_spread:
            devices = group.exchange.devices
            self._exchange = Exchange(devices, group.count, AsIfAll(devices, group.count))
        self._host = HostMemory(replica.device for replica in run.group.replicas)

    def fits(self, replica_batch_size: int) -> bool:
        """Whether every replica can process this many examples at a time."""
        forget_peaks()
        seconds = self._measure(self._run.replicas * replica_batch_size)
        peaks = [memory_peak(device.name) for device in tf.config.list_logical_devices("GPU")]
        peak = max((peak for peak in peaks if peak is not None), default=None)
        self.tries.append(Try(replica_batch_size, seconds is not None, seconds, peak))
        return seconds is not None

    def _measure(self, global_batch_size: int) -> float | None:
        """How long a step takes; None if it does not fit on some worker."""
        seconds = self._measure_here(global_batch_size)
        return None if self._run.group.any_worker(seconds is None) else seconds

    def _measure_here(self, global_batch_size: int) -> float | None:
        if self._host.is_too_small(global_batch_size):
            return None
        try:
            batch = resize_batch(self._batch, global_batch_size)
            for _ in range(STEPS):
                began = time.perf_counter()
                with self._run.group.exchanging(self._exchange):
                    # Reading the logs waits for the devices.
                    pythonic(self._run.train_on(batch, micro_batches=1))
                seconds = time.perf_counter() - began
        except (MemoryError, tf.errors.OpError) as error:
            if is_out_of_memory(error):
                return None
            raise
        self._host.learn(global_batch_size)
        return seconds


class AsIfAll:
    """Carries nothing between workers: as if all replicas had what each has."""

    def __init__(self, devices: Sequence[str], count: int) -> None:
        self._devices, self._count = devices, count

    def all_reduce(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return on_each(self._devices, lambda own: own * tf.cast(self._count, own.dtype), parts)

    def all_gather(self, parts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return on_each(self._devices, lambda own: tf.concat([own] * self._count, axis=0), parts)


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


def largest_size(
    fits: Callable[[int], bool], minimum: int, maximum: int | None, slack: float = 0.0
) -> tuple[int | None, int | None]:
    """The largest size that fits, and the smallest that was found not to fit.

    largest_size(lambda size: size <= 11, 1, None)    tries 1 2 4 8 16 12 10 11
    (11, 12)
    """
    good, size = None, minimum
    while fits(size):
        good = size
        if size == maximum:
            return good, None
        size = 2 * size if maximum is None else min(2 * size, maximum)
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
