"""What TensorFlow's profiler sees in a few steps: sums beside computing, and copies to the host.

Each GPU has a plane with a line for each of its streams. NCCL's kernels are the sums; a sum is
hidden as long as another stream of its GPU computes. With `--cpu` the executor's operations stand
for kernels, and there are no copies.
"""

import re
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import keras
import tensorflow as tf
from machine import CPU, Check, Row, devices
from networks import NETWORKS, SYSTEMS, batches, made
from tensorflow.tsl.profiler.protobuf import xplane_pb2

STEPS = 3
SUMS = re.compile("CollectiveReduce" if CPU else "nccl", re.IGNORECASE)
COPIES = re.compile("Memcpy|Memset")
PLANES = "/host:CPU" if CPU else "/device:GPU:"
Span = tuple[int, int]


class Event(NamedTuple):
    """What a device did; in picoseconds."""

    name: str
    begin: int
    end: int


def checks() -> dict[str, Check]:
    names = devices()
    return {network: partial(traced, network, names) for network in NETWORKS}


def traced(network: str, names: list[str]) -> list[Row]:
    """Copies to the host of each system, and how much of the sums is hidden in this package's."""
    rows, build, data = [], *NETWORKS[network]
    to_host: dict[str, float] = {}
    for system in SYSTEMS:
        planes = recorded(made(system, names, build), data())
        events = [event for plane in planes for event in plane]
        to_host[system] = count(events, "MemcpyD2H")
        most = allowed(to_host["one"], len(names)) if system == "ours" else None
        ok = None if most is None or CPU else to_host[system] <= most
        expected = "" if most is None else f"<= {most:g}"
        rows += [
            Row(f"{network}, {system}: copies to the host a step", expected, to_host[system], ok),
            Row(f"{network}, {system}: copies from it", "", count(events, "MemcpyH2D")),
        ]
    sums = [event for event in events if SUMS.search(event.name)]
    rows.append(Row(f"{network}: sums a step, of all devices", "", len(sums) / STEPS))
    if not sums:
        return [*rows, Row(f"{network}: hidden sums", "NCCL, which takes two GPUs", None)]
    shares = [hidden_share(plane) for plane in planes if any(SUMS.search(e.name) for e in plane)]
    # One device of a CPU cannot be told from another, and its sums wait on a core of their own.
    ok = None if CPU else min(shares) > 0
    return [*rows, Row(f"{network}: hidden share of the sums' time", "> 0", shares, ok)]


def allowed(one: float, replicas: int) -> float:
    """The copies to the host that replicas may make: each as many as one device, and two."""
    return replicas * one + 2 * replicas


def recorded(model: keras.Model, example: tuple) -> list[list[Event]]:
    """The events of each device over some steps, after one that compiles."""
    model.fit(batches(example, STEPS), verbose=0)
    with tempfile.TemporaryDirectory() as folder:
        tf.profiler.experimental.start(folder)
        model.fit(batches(example, STEPS), verbose=0)
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


def count(events: Iterable[Event], kind: str) -> float:
    """How many events of a kind there are in a step."""
    return round(sum(event.name.startswith(kind) for event in events) / STEPS, 1)


def hidden_share(events: Sequence[Event]) -> float:
    """The part of the time of sums in which another kernel of the device runs."""
    sums = united((e.begin, e.end) for e in events if SUMS.search(e.name))
    others = united(
        (e.begin, e.end) for e in events if not SUMS.search(e.name) and not COPIES.match(e.name)
    )
    return round(overlap(sums, others) / max(length(sums), 1), 3)


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


def overlap(some: Sequence[Span], others: Sequence[Span]) -> int:
    """How long both of two lists of spans, as `united` makes them, have one."""
    return length(some) + length(others) - length(united([*some, *others]))
