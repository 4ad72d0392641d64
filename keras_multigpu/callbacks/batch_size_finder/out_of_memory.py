"""What running out of memory looks like, and how to stop before the system kills the process."""

import sys
from collections.abc import Iterable
from pathlib import Path

import tensorflow as tf

from keras_multigpu.host_memory import available_bytes

# Devices do not always say `RESOURCE_EXHAUSTED`: libraries for GPUs have words of their own.
PHRASES = (
    "cuda_error_out_of_memory",
    "dst tensor is not initialized",
    "failed to allocate",
    "oom when allocating",
    "out of memory",
)

# How much of the memory that is left may be asked for: other programs need some, too.
USABLE = 0.9


def is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError)):
        return True
    text = str(error).lower()
    return isinstance(error, tf.errors.OpError) and any(phrase in text for phrase in PHRASES)


class HostMemory:
    """Foresees when steps on CPUs need more memory than there is."""

    def __init__(self, devices: Iterable[str]) -> None:
        # A GPU refuses memory that it does not have. Linux promises it and kills the process that
        # uses it, so on CPUs the need of a larger batch is extrapolated from those before.
        self._matters = any("CPU" in device.upper() for device in devices)
        self._before = resident_bytes() or 0
        self._per_example = 0.0

    def learn(self, global_batch_size: int) -> None:
        peak = peak_bytes()
        if peak is not None:
            self._per_example = max(0.0, (peak - self._before) / global_batch_size)

    def is_too_small(self, global_batch_size: int) -> bool:
        return self._matters and self._per_example * global_batch_size > USABLE * available_bytes()


def resident_bytes() -> int | None:
    """What this process holds now; None where the system does not say."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def peak_bytes() -> int | None:
    """The most that this process has ever held; None where the system does not say."""
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In kilobytes, but for macOS.
    return most if sys.platform == "darwin" else most * 1024


def forget_device_peaks() -> None:
    for device in tf.config.list_logical_devices("GPU"):
        tf.config.experimental.reset_memory_stats(device.name)


def device_peak() -> int | None:
    """The most bytes that any GPU has held since `forget_device_peaks`; None without GPUs."""
    peaks = [
        tf.config.experimental.get_memory_info(device.name)["peak"]
        for device in tf.config.list_logical_devices("GPU")
    ]
    return max(peaks, default=None)
