"""Images per second and memory of the data pipeline, beside its peers.

    python tests/benchmarks/bench_data.py                  both tables
    python tests/benchmarks/bench_data.py speed            one of them
    python tests/benchmarks/bench_data.py --quick          few photographs, few rounds: a check
    python tests/benchmarks/bench_data.py --write          also into docs/benchmarks.md

1,600 JPEGs are made in a temporary folder. All readers take turns in one process: each reads
the folder once in every round, after one round to warm up (the generators, which are slow, read
224 images). A ratio is the median of the rounds' ratios; rates and CPU times are medians, too.

The clock runs from making an iterator to its last batch. tf.data's iterators then sometimes wait
for their tuning thread before they end, for up to the time the epoch took: "whole epoch" has that,
too.
"""

import argparse
import contextlib
import io
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import numpy as np
import psutil
import tensorflow as tf
from data_peers import BATCH, PEERS, SIZE, Reader
from photographs import write_photographs
from report import machine, write_section

import keras_multigpu as kmg

ROUNDS = 7
EACH = 200
"""Photographs in each of the eight classes."""

GENERATOR_IMAGES = 7 * BATCH
FLIP = {"rescale": 1 / 255, "horizontal_flip": True}
WARP = FLIP | {
    "rotation_range": 20,
    "width_shift_range": 0.1,
    "height_shift_range": 0.1,
    "zoom_range": 0.1,
}
KERAS, DECODING = list(PEERS)[:2]
TARGETS = (  # What the project promises: whose rate is how many times that of whom.
    ("from_directory", KERAS, 1.3),
    ("from_directory", DECODING, 0.85),
    ('from_directory, resize="random_crop"', DECODING, 1.0),
    ('from_directory, cache="memory"', KERAS, 8.0),
    ("from_directory, cache=folder", KERAS, 8.0),
    ("from_flow, warp", "ImageDataGenerator, warp", 6.0),
    ("from_flow, flip", "ImageDataGenerator, flip", 1.8),
)


class Contender(NamedTuple):
    """Who reads, and how many images in a round."""

    name: str
    reader: Reader
    images: int


class Reading(NamedTuple):
    """What one round took, for each image."""

    seconds: float
    whole: float
    processor: float


# The contenders.


def contenders(folder: Path, cache: Path) -> list[Contender]:
    """All that are installed; a line for each that is not."""
    files = sorted(folder.glob("*/*.jpg"))
    found = []
    for name, peer in PEERS.items():
        try:
            found.append(Contender(name, peer(files), len(files)))
        except ImportError as error:
            print(f"{name}: left out, {error}", flush=True)
    mine = [Contender(name, reader, len(files)) for name, reader in ours(folder, cache).items()]
    return [*found, *mine, *flows(folder, len(files))]


def ours(folder: Path, cache: Path) -> dict[str, Reader]:
    def reader(**options: object) -> Reader:
        return from_directory(folder, **options).epoch

    return {
        "from_directory": reader(),
        'from_directory, resize="random_crop"': reader(resize="random_crop"),
        'from_directory, cache="memory"': reader(cache="memory"),
        "from_directory, cache=folder": reader(cache=cache),
    }


def from_directory(folder: Path, **options: object) -> kmg.data.Batches:
    return kmg.data.from_directory(
        folder, image_size=SIZE, global_batch_size=BATCH, verbose=False, **options
    )


def flows(folder: Path, images: int) -> list[Contender]:
    """`ImageDataGenerator` with two sets of parameters, as itself and as `from_flow` reads it."""
    found = []
    for name, parameters in (("warp", WARP), ("flip", FLIP)):
        itself = generator(folder, parameters)
        found.append(
            Contender(
                f"ImageDataGenerator, {name}",
                lambda number, flow=itself: flow,  # Without an end.
                min(GENERATOR_IMAGES, images),
            )
        )
        batches = kmg.data.from_flow(generator(folder, parameters), global_batch_size=BATCH)
        found.append(Contender(f"from_flow, {name}", batches.epoch, images))
    return found


def generator(folder: Path, parameters: dict) -> Iterable:
    with contextlib.redirect_stdout(io.StringIO()):
        images = tf.keras.preprocessing.image  # noqa: TID251, `keras` itself has no generators.
        return images.ImageDataGenerator(**parameters).flow_from_directory(
            str(folder), target_size=SIZE, batch_size=BATCH, class_mode="sparse", seed=0
        )


# Speed.


def bench_speed(folder: Path, rounds: int) -> list[str]:
    """Two tables: all contenders, and the promises."""
    with tempfile.TemporaryDirectory() as cache:
        readings = in_turn(contenders(folder, Path(cache)), rounds)
    return [*field(readings), "", *promises(readings)]


def in_turn(found: list[Contender], rounds: int) -> dict[str, list[Reading]]:
    readings: dict[str, list[Reading]] = {contender.name: [] for contender in found}
    for number in range(rounds + 1):
        for contender in found if number % 2 == 0 else reversed(found):
            reading = read(contender, number)
            if number:
                readings[contender.name].append(reading)
        print(f"round {number} of {rounds}", flush=True)
    return readings


def read(contender: Contender, number: int) -> Reading:
    batches = contender.reader(number)
    processor, start = processor_seconds(), time.perf_counter()
    iterator, count = iter(batches), 0
    while count < contender.images:
        batch = next(iterator)
        count += (batch[0] if isinstance(batch, tuple | list) else batch).shape[0]
    seconds = time.perf_counter() - start
    processor = processor_seconds() - processor
    end = time.perf_counter()
    del iterator
    whole = seconds + time.perf_counter() - end
    return Reading(seconds / count, whole / count, processor / count)


def processor_seconds() -> float:
    """The processor time of this process and of those that it started."""
    children = psutil.Process().children(recursive=True)
    times = [child.cpu_times() for child in children]
    return time.process_time() + sum(one.user + one.system for one in times)


def field(readings: dict[str, list[Reading]]) -> list[str]:
    rows = ["| reader | images/s (range) | whole epoch | CPU ms/image |", "|" + " --- |" * 4]
    for name, rounds in readings.items():
        rates = [1 / reading.seconds for reading in rounds]
        whole = 1 / statistics.median(reading.whole for reading in rounds)
        processor = statistics.median(reading.processor for reading in rounds) * 1e3
        rows.append(
            f"| {name} | {statistics.median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) "
            f"| {whole:,.0f} | {processor:.2f} |"
        )
    return rows


def promises(readings: dict[str, list[Reading]]) -> list[str]:
    rows = [
        "| who | against | ratio (range) | whole epoch | by CPU time | target |",
        "|" + " --- |" * 6,
    ]
    for mine, theirs, target in TARGETS:
        pairs = list(zip(readings[theirs], readings[mine], strict=True))
        ratios, whole, processor = (
            [getattr(other, kind) / getattr(own, kind) for other, own in pairs]
            for kind in Reading._fields
        )
        ratio = statistics.median(ratios)
        rows.append(
            f"| {mine} | {theirs} | {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {statistics.median(whole):.2f} | {statistics.median(processor):.2f} "
            f"| {target:.2f} {'met' if ratio >= target else 'missed'} |"
        )
    return rows


# Memory.


def bench_memory(folder: Path, rounds: int) -> list[str]:
    batches, peer = from_directory(folder), PEERS[KERAS](sorted(folder.glob("*/*.jpg")))
    steps, endless = len(batches), iter(batches.epochs())
    ways = {
        KERAS: peer,
        "from_directory, one `epochs()`": lambda number: itertools.islice(endless, steps),
        "from_directory, `epoch(k)` each time": batches.epoch,
    }
    rows = [
        "| memory after epoch | 1 | 2 | 3 | 4 | growth from 1 to 4 |",
        "|" + " --- |" * 6,
    ]
    for name, reader in ways.items():
        sizes = []
        for number in range(4):
            for _ in reader(number):
                pass
            sizes.append(psutil.Process().memory_info().rss / 2**20)
        cells = " | ".join(f"{size:.0f} MiB" for size in sizes)
        rows.append(f"| {name} | {cells} | {sizes[-1] - sizes[0]:+.1f} MiB |")
    return [*rows, "", held(folder)]


def held(folder: Path) -> str:
    """How far a slow consumer's pipeline reads ahead, as a sentence."""
    batches = from_directory(folder)
    source, started = batches.reading().source, 0
    read_examples = source.read

    def counted(out: list[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> list:
        nonlocal started
        started += len(indices)
        return read_examples(out, indices, seeds)

    source.read = counted
    most = taken = 0
    for batch in itertools.islice(batches.epoch(0), 12):
        time.sleep(0.3)  # Ample time for everything that is read ahead.
        taken += len(batch[1])
        most = max(most, started - taken)
    megabytes = most * math.prod(SIZE) * 3 / 2**20
    return (
        f"Read ahead of a slow consumer: at most {most / BATCH:g} batches of {BATCH}, "
        f"{megabytes:.1f} MiB."
    )


# The command.

# Memory comes first: what a process has freed would hide what it takes anew.
TABLES = {"memory": (bench_memory, "data memory"), "speed": (bench_speed, "data")}


def peers_line() -> str:
    found = []
    for name in ("opencv-python-headless", "opencv-python", "pillow", "grain", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return f"{', '.join(found)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", default=[], metavar="table", help="|".join(TABLES))
    parser.add_argument("--quick", action="store_true", help="few photographs and rounds")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md, too")
    arguments = parser.parse_args()
    each, rounds = (50, 2) if arguments.quick else (EACH, ROUNDS)
    heading = f"{machine()} {peers_line()}"
    print(heading, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), each)
        for name in arguments.tables or TABLES:
            function, section = TABLES[name]
            lines = function(Path(folder), rounds)
            print("\n".join(lines), flush=True)
            if arguments.write:
                write_section(section, [heading, "", *lines])


if __name__ == "__main__":
    main()
