"""How much of the sums TensorFlow's profiler sees beside computing.

Each GPU has a plane with a line for each of its streams. NCCL's kernels are the sums; a sum is
hidden as long as another stream of its GPU computes.
"""

import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from keras_multigpu.scoreboard.machine import CPU, Row

SUMS = re.compile("CollectiveReduce" if CPU else "nccl", re.IGNORECASE)
COPIES = re.compile("Memcpy|Memset")
PLANES = "/host:CPU" if CPU else "/device:GPU:"
Span = tuple[int, int]


class Event(NamedTuple):
    """What a device did; in picoseconds."""

    name: str
    begin: int
    end: int


def hidden_sums(fit: Callable[[], Any], steps: int) -> list[Row]:
    """What `fit` shows, after a first one that compiles, in this many steps."""
    planes = recorded(fit)
    sums = sum(bool(SUMS.search(event.name)) for plane in planes for event in plane)
    to_host = sum(event.name.startswith("MemcpyD2H") for plane in planes for event in plane)
    rows = [Row("sums a step, of all devices", round(sums / steps, 1))]
    hidden, copies = "hidden share of the sums' time", "copies to the host a step"
    if CPU:
        why = "only GPUs have streams"
        return [*rows, Row(hidden, skipped=why), Row(copies, skipped=why)]
    shares = [hidden_share(plane) for plane in planes if any(SUMS.search(e.name) for e in plane)]
    rows.append(Row(copies, round(to_host / steps, 1)))
    return [*rows, Row(hidden, shares) if shares else Row(hidden, skipped="NCCL takes two GPUs")]


def recorded(fit: Callable[[], Any]) -> list[list[Event]]:
    """The events of each device."""
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        fit()
        tf.profiler.experimental.stop()
        (file,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(file.read_bytes())
    found = [events_of(plane) for plane in space.planes if plane.name.startswith(PLANES)]
    if not any(found):
        raise RuntimeError("The profiler saw no kernels: CUPTI is missing, or not allowed here.")
    return found


def events_of(plane: xplane_pb2.XPlane) -> list[Event]:
    """The events of a device's streams, without the lines that sum them up by step or layer."""
    found = []
    for line in plane.lines:
        if not CPU and not line.name.startswith("Stream"):
            continue
        start = line.timestamp_ns * 1000
        for event in line.events:
            begin = start + event.offset_ps
            name = plane.event_metadata[event.metadata_id].name
            found.append(Event(name, begin, begin + event.duration_ps))
    return found


def hidden_share(events: Sequence[Event]) -> float:
    """The part of the time of sums in which another kernel of the device runs."""
    sums = united((e.begin, e.end) for e in events if SUMS.search(e.name))
    others = united(
        (e.begin, e.end) for e in events if not SUMS.search(e.name) and not COPIES.match(e.name)
    )
    both = length(sums) + length(others) - length(united([*sums, *others]))
    return round(both / max(length(sums), 1), 3)


def united(spans: Iterable[Span]) -> list[Span]:
    """Spans that cover the same time and do not overlap, in order."""
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def length(spans: Iterable[Span]) -> int:
    return sum(end - begin for begin, end in spans)
