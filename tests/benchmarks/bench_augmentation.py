"""Images per second of the augmentation layers, beside those of Keras and keras-cv.

    python tests/benchmarks/bench_augmentation.py                   everything
    python tests/benchmarks/bench_augmentation.py blur "geometry"   rows whose name contains one
    python tests/benchmarks/bench_augmentation.py --rounds 1        a check
    python tests/benchmarks/bench_augmentation.py --write           also into docs/benchmarks.md

A batch of 64 parts of photographs, 224x224x3, goes through each layer in a compiled function, as in
a model, and in the map of a dataset, as `Batches` does it. The layers of a comparison take turns in
one process, after two rounds to warm up; a reading is a few batches in a row. A ratio is the
median of the rounds' ratios; rates are medians, too.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import augmentation_peers as peers
import keras
import numpy as np
import tensorflow as tf
from layer_runs import BATCH, LEAST, WAYS, batch
from report import machine, write_section

from keras_multigpu import augmentation

ROUNDS = 5
SECONDS = 0.4
"""The least time of a reading of the fastest layers."""

FUSED_TARGET, POLICY_TARGET, SAME_TARGET = 2.5, 6.0, 1.0
"""What the project promises: how many times the rate of the other."""

GEOMETRY = ("flip", "rotation", "translation", "zoom", "shear", "crop")
COLOR = ("brightness", "contrast", "saturation", "hue", "grayscale")
"""The arguments that are compared one by one."""

ALWAYS = (1.0, 1.0)
"""A probability, as Keras needs it in order not to draw the probability itself."""

Maker = Callable[[], Any]


class Against(NamedTuple):
    """A peer, and the promised ratio."""

    name: str
    maker: Maker
    target: float


class Comparison(NamedTuple):
    """A layer of this package and what it is compared with."""

    name: str
    ours: Maker
    against: tuple[Against, ...]
    mixes: bool = False
    thorough: bool = False
    """Whether images come as integers and as floats in both places."""


class Reading(NamedTuple):
    """What one image took."""

    seconds: float
    processor: float


# What is compared.


def comparisons() -> list[Comparison]:
    """All rows, the promises with factors first."""
    single = [
        namesake(name, argument)
        for name, arguments in (("RandomGeometry", GEOMETRY), ("RandomColor", COLOR))
        for argument in arguments
    ]
    return [
        Comparison("geometry + color", fused, fused_peers(), thorough=True),
        Comparison("RandAugment", rand_augment(), policy_peers(), thorough=True),
        *single,
        alike("RandomErasing", factor=ALWAYS, scale=(0.02, 0.33)),
        Comparison(
            "AugMix",
            ours("AugMix", num_chains=peers.CHAINS, chain_depth=peers.DEPTH),
            (Against("keras AugMix", peers.keras_aug_mix, SAME_TARGET),),
        ),
        alike("MixUp", mixes=True),
        alike("CutMix", mixes=True),
    ]


def ours(name: str, **arguments: Any) -> Maker:
    """A layer of this package; whether it exists shows when its turn comes."""
    return lambda: getattr(augmentation, name)(**arguments)


def fused() -> Any:
    """Geometry and colour in two passes."""
    geometry, color = (
        ours("RandomGeometry", **peers.GEOMETRY),
        ours("RandomColor", **peers.COLOR),
    )
    return augmentation.Sequence([geometry(), color()])


def fused_peers() -> tuple[Against, ...]:
    """The same as six layers."""
    return (
        Against("keras, 6 layers", peers.keras_stack, FUSED_TARGET),
        Against("keras-cv, 6 layers", peers.cv_stack, FUSED_TARGET),
    )


def rand_augment() -> Maker:
    """RandAugment at the strength of the peers, in the paper's measure."""
    return ours("RandAugment", num_ops=peers.OPS, magnitude=30 * peers.MAGNITUDE)


def policy_peers() -> tuple[Against, ...]:
    """RandAugment by others."""
    return (
        Against(
            "keras RandAugment",
            partial(keras.layers.RandAugment, num_ops=peers.OPS, factor=peers.MAGNITUDE),
            POLICY_TARGET,
        ),
        Against("keras-cv RandAugment", peers.cv_rand_augment, SAME_TARGET),
    )


def namesake(name: str, argument: str) -> Comparison:
    """An argument of a fused layer against the layer of Keras."""
    peer = Against(
        f"keras Random{argument.title()}", partial(peers.keras_layer, argument), SAME_TARGET
    )
    maker = ours(name, **{argument: peers.RANGES[argument]})
    return Comparison(f"{name}({argument}=)", maker, (peer,))


def alike(name: str, *, mixes: bool = False, **arguments: Any) -> Comparison:
    """A layer against that of the same name in Keras, with the same arguments."""
    size = arguments.get("kernel_size")
    label = name if size is None else f"{name}, {size}x{size}"
    peer = Against(f"keras {name}", partial(getattr(keras.layers, name), **arguments), SAME_TARGET)
    return Comparison(label, ours(name, **arguments), (peer,), mixes)


def alone() -> list[Comparison]:
    """What has no namesake, and what the recipes cost."""
    names = ("light", "standard", "strong", "imagenet")
    return [
        Comparison("TrivialAugment", ours("TrivialAugment"), ()),
        *(Comparison(f'recipe("{name}")', partial(recipe, name), ()) for name in names),
    ]


def recipe(name: str) -> Any:
    """A recipe as one layer."""
    made = augmentation.recipe(name)
    return made if hasattr(made, "augment_batch") else augmentation.Sequence(made)


def settings(comparison: Comparison) -> Iterator[tuple[str, str]]:
    """The places of running and types of images of a comparison.

    A model mostly gets floats, and a pipeline the integers of a decoder.
    """
    for way, dtype in (("model", "float32"), ("pipeline", "uint8")):
        yield way, dtype
        if comparison.thorough:
            yield way, "uint8" if dtype == "float32" else "float32"


# Timing.


class Contender:
    """A layer that runs in one place, and its readings."""

    def __init__(self, name: str, maker: Maker, way: str, data: Any) -> None:
        self.name = name
        self.readings: list[Reading] = []
        self._run = WAYS[way](maker(), data)
        require_change(name, self._run(1), data)
        start = time.perf_counter()
        self._run(LEAST[way])
        seconds = (time.perf_counter() - start) / LEAST[way]
        self._batches = max(LEAST[way], round(SECONDS / seconds))

    def read(self) -> None:
        """Take one reading."""
        processor, start = time.process_time(), time.perf_counter()
        self._run(self._batches)
        seconds = time.perf_counter() - start
        images = self._batches * BATCH
        processor = time.process_time() - processor
        self.readings.append(Reading(seconds / images, processor / images))

    def rate(self) -> float:
        """Images per second."""
        return 1 / statistics.median(reading.seconds for reading in self.readings)


def require_change(name: str, result: Any, data: Any) -> None:
    """Raise an error for a layer that did nothing."""
    flat, given = keras.tree.flatten(result)[0], keras.tree.flatten(data)[0]
    assert len(flat) == len(given), (name, flat.shape)
    if flat.shape != given.shape:
        return  # A crop.
    changed = np.mean(np.asarray(flat, np.float32) != np.asarray(given, np.float32))
    assert changed > 0.02, f"{name} left the images as they were."


def raced(comparison: Comparison, way: str, dtype: str, rounds: int) -> list[Contender]:
    """All layers of a comparison, ours first, in turn; every other round from the end."""
    data = batch(dtype, comparison.mixes)
    makers = {"ours": comparison.ours} | {peer.name: peer.maker for peer in comparison.against}
    found = []
    for name, maker in makers.items():
        try:
            found.append(Contender(name, maker, way, data))
        except ImportError as error:
            print(f"{name}: left out, {error}", flush=True)
    for number in range(rounds):
        for contender in found if number % 2 == 0 else reversed(found):
            contender.read()
    return found


# The tables.


def rows_of(comparison: Comparison, rounds: int) -> Iterator[str]:
    """The rows of one comparison, one for each peer."""
    targets = {peer.name: peer.target for peer in comparison.against}
    for way, dtype in settings(comparison):
        own, *others = raced(comparison, way, dtype, rounds)
        for other in others:
            wall, processor = (
                [
                    getattr(theirs, kind) / getattr(mine, kind)
                    for theirs, mine in zip(other.readings, own.readings, strict=True)
                ]
                for kind in Reading._fields
            )
            ratio, target = statistics.median(wall), targets[other.name]
            yield (
                f"| {comparison.name} | {way}, {dtype} | {own.rate():,.0f} "
                f"| {other.name}: {other.rate():,.0f} "
                f"| {ratio:.2f} ({min(wall):.2f} to {max(wall):.2f}) "
                f"| {statistics.median(processor):.2f} "
                f"| {target:.1f} {'met' if ratio >= target else 'missed'} |"
            )


def bench_peers(chosen: Callable[[str], bool], rounds: int) -> list[str]:
    """The table of ratios."""
    rows = [
        "| layer | where, images | images/s | peer: images/s | ratio (range) | by CPU time "
        "| target |",
        "|" + " --- |" * 7,
    ]
    return with_rows(rows, comparisons(), rows_of, chosen, rounds)


def bench_alone(chosen: Callable[[str], bool], rounds: int) -> list[str]:
    """The table of what has no peer."""

    def row(comparison: Comparison, rounds: int) -> Iterator[str]:
        rates = [raced(comparison, *setting, rounds)[0].rate() for setting in settings(comparison)]
        yield f"| {comparison.name} | {' | '.join(f'{rate:,.0f}' for rate in rates)} |"

    rows = ["| layer | images/s, model | images/s, pipeline |", "|" + " --- |" * 3]
    return with_rows(rows, alone(), row, chosen, rounds)


def with_rows(
    rows: list[str],
    found: list[Comparison],
    function: Callable[[Comparison, int], Iterator[str]],
    chosen: Callable[[str], bool],
    rounds: int,
) -> list[str]:
    """A table's heading with the rows of the chosen comparisons, printed as they come."""
    for comparison in found:
        if chosen(comparison.name):
            for row in function(comparison, rounds):
                print(row, flush=True)
                rows.append(row)
    return rows


# The command.

TABLES = {"augmentation": bench_peers, "augmentation alone": bench_alone}


def heading() -> str:
    """The machine, and the version of the peer."""
    return f"{machine()} keras-cv {version('keras-cv')}."


def main() -> None:
    """Run the comparisons that were asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of the names of rows; all without")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks.md, too")
    arguments = parser.parse_args()
    if arguments.write and arguments.names:
        parser.error("--write needs all rows.")

    def chosen(name: str) -> bool:
        return not arguments.names or any(part in name for part in arguments.names)

    # Of the many compiled functions that differ, as they have to here.
    tf.get_logger().setLevel("ERROR")
    first = heading()
    print(first, flush=True)
    for section, function in TABLES.items():
        lines = function(chosen, arguments.rounds)
        if arguments.write:
            write_section(section, [first, "", *lines])


if __name__ == "__main__":
    main()
