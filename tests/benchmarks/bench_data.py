"""Images per second of the data pipeline, beside its peers.

    python tests/benchmarks/bench_data.py                  print the table
    python tests/benchmarks/bench_data.py --quick          few photographs, few rounds: a check
    python tests/benchmarks/bench_data.py --write          also into docs/benchmarks.md

1,600 JPEGs are made in a temporary folder. All readers take turns in one process: each reads
the folder once in every round, after one round to warm up (the generators, which are slow, read
224 images). A ratio is the median of the rounds' ratios; rates are medians, too.

The clock runs from making an iterator to its last batch.
"""

import argparse
import contextlib
import io
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

import tensorflow as tf
from data_peers import BATCH, PEERS, SIZE, Reader
from photographs import write_photographs
from report import machine, spread, verdict, write_section

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
TARGETS = (  # What the project promises: its rate as a multiple of a peer's.
    ("from_directory", KERAS, 1.3),
    ("from_directory", DECODING, 0.85),
    ('from_directory, resize="random_crop"', DECODING, 1.0),
    ('from_directory, cache="memory"', KERAS, 8.0),
    ("from_directory, cache=folder", KERAS, 8.0),
    ("from_flow, warp", "ImageDataGenerator, warp", 6.0),
    ("from_flow, flip", "ImageDataGenerator, flip", 1.8),
)


class Contender(NamedTuple):
    """A reader, and how many images it reads in a round."""

    name: str
    reader: Reader
    images: int


# The contenders.


def contenders(folder: Path, cache: Path) -> list[Contender]:
    """All readers that are installed; prints a line for each that is not."""
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
                lambda number, flow=itself: flow,  # Endless.
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


# The clock.


def bench_speed(folder: Path, rounds: int) -> list[str]:
    """The promises, and a sentence on the other readers."""
    with tempfile.TemporaryDirectory() as cache:
        readings = in_turn(contenders(folder, Path(cache)), rounds)
    return [*promises(readings), "", others(readings)]


def in_turn(found: list[Contender], rounds: int) -> dict[str, list[float]]:
    readings: dict[str, list[float]] = {contender.name: [] for contender in found}
    for number in range(rounds + 1):
        for contender in found if number % 2 == 0 else reversed(found):
            reading = read(contender, number)
            if number:
                readings[contender.name].append(reading)
        print(f"round {number} of {rounds}", flush=True)
    return readings


def read(contender: Contender, number: int) -> float:
    """Seconds per image."""
    batches = contender.reader(number)
    start = time.perf_counter()
    iterator, count = iter(batches), 0
    while count < contender.images:
        batch = next(iterator)
        count += (batch[0] if isinstance(batch, tuple | list) else batch).shape[0]
    return (time.perf_counter() - start) / count


def promises(readings: dict[str, list[float]]) -> list[str]:
    rows = [
        "| reader | images/s | peer: images/s | ratio (range) | target |",
        "|" + "---|" * 5,
    ]
    for mine, theirs, target in TARGETS:
        pairs = zip(readings[theirs], readings[mine], strict=True)
        ratios = [other / own for other, own in pairs]
        rows.append(
            f"| {mine} | {rate(readings[mine])} | {theirs}: {rate(readings[theirs])} "
            f"| {spread(ratios)} | {target:.2f} {verdict(ratios, at_least=target)} |"
        )
    return rows


def others(readings: dict[str, list[float]]) -> str:
    """The rates of readers that no target names, as a sentence."""
    named = {name for mine, theirs, _ in TARGETS for name in (mine, theirs)}
    rates = [f"{name} {rate(rounds)}" for name, rounds in readings.items() if name not in named]
    return f"Other readers, images/s: {'; '.join(rates)}."


def rate(rounds: list[float]) -> str:
    """Images per second."""
    return f"{1 / statistics.median(rounds):,.0f}"


# The command.


def peers_line() -> str:
    found = []
    for name in ("opencv-python-headless", "opencv-python", "pillow", "grain", "torch"):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return f"{', '.join(found)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few photographs and rounds")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md, too")
    arguments = parser.parse_args()
    each, rounds = (50, 2) if arguments.quick else (EACH, ROUNDS)
    print(machine(), peers_line(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        write_photographs(Path(folder), each)
        lines = bench_speed(Path(folder), rounds)
    print("\n".join(lines), flush=True)
    if arguments.write:
        write_section("data", lines, peers_line())


if __name__ == "__main__":
    main()
