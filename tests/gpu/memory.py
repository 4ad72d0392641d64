"""The peak on each device over the first epoch, with nothing else in the process.

With `--cpu` it is that of the process, beyond what it has before the model is made.
"""

from functools import partial
from pathlib import Path

import tensorflow as tf
from machine import CPU, Check, Row, devices, in_a_process_of_its_own
from networks import NETWORKS, SYSTEMS, batches, made

STEPS = 4


def checks() -> dict[str, Check]:
    return {name: partial(peaks, name) for name in NETWORKS}


def peaks(network: str) -> list[Row]:
    """Of each system; this package should take no more than `MirroredStrategy`."""
    found = {
        system: in_a_process_of_its_own("memory", "peak", network, system) for system in SYSTEMS
    }
    rows = [Row(f"{network}, {system}, MB", "", found[system]) for system in SYSTEMS[:2]]
    ok = None if CPU else max(found["ours"]) <= max(found["stock"])
    return [*rows, Row(f"{network}, ours, MB", "at most stock's", found["ours"], ok)]


def peak(network: str, system: str) -> list[float]:
    """MB on each device; the self-check, which runs before the first step, included."""
    names = devices()
    tf.config.list_logical_devices()
    before = largest_size()
    build, data = NETWORKS[network]
    made(system, names, build).fit(batches(data(), STEPS), verbose=0)
    if CPU:
        return [round(largest_size() - before, 1)]
    peaks = [tf.config.experimental.get_memory_info(name)["peak"] / 1e6 for name in names]
    return [round(each, 1) for each in peaks]


def largest_size() -> float:
    """The most memory that this process has had, in MB."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kilobytes,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(kilobytes) / 1e3
