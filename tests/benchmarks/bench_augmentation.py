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
from report import machine, spread, verdict, write_section

from keras_multigpu import augmentation

ROUNDS = 5
SECONDS = 0.4
"""How long a reading of the fastest layers takes at least."""

FUSED_TARGET, POLICY_TARGET, SAME_TARGET = 2.5, 6.0, 1.0
"""What the project promises: its rate as a multiple of the peer's."""

GEOMETRY = ("flip", "rotation", "translation", "zoom", "shear", "crop")
COLOR = ("brightness", "contrast", "saturation", "hue", "grayscale")
"""The arguments that are compared individually."""

ALWAYS = (1.0, 1.0)
"""A probability as a pair, so that Keras does not draw the probability itself."""

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


# What is compared.


def comparisons() -> list[Comparison]:
    """All rows; promised factors come first."""
    return [
        Comparison("geometry + color", fused, fused_peers()),
        Comparison("RandAugment", rand_augment(), policy_peers()),
        alike("RandomErasing", factor=ALWAYS, scale=(0.02, 0.33)),
        mix("MixUp", mix_up=0.2, cut_mix=None),
        mix("CutMix", mix_up=None),
    ]


def single() -> list[Comparison]:
    """Each argument of the fused layers alone."""
    return [
        namesake(name, argument)
        for name, arguments in (("RandomGeometry", GEOMETRY), ("RandomColor", COLOR))
        for argument in arguments
    ]


def ours(name: str, **arguments: Any) -> Maker:
    """A layer of this package, looked up when its turn comes."""
    return lambda: getattr(augmentation, name)(**arguments)


def fused() -> Any:
    """Geometry and colour in two passes."""
    geometry, color = (
        ours("RandomGeometry", **peers.GEOMETRY),
        ours("RandomColor", **peers.COLOR),
    )
    return augmentation.Sequence([geometry(), color()])


def fused_peers() -> tuple[Against, ...]:
    """The same with six layers."""
    return (
        Against("keras, 6 layers", peers.keras_stack, FUSED_TARGET),
        Against("keras-cv, 6 layers", peers.cv_stack, FUSED_TARGET),
    )


def rand_augment() -> Maker:
    """RandAugment at the strength of the peers, in the paper's measure."""
    return ours("RandAugment", num_ops=peers.OPS, magnitude=30 * peers.MAGNITUDE)


def policy_peers() -> tuple[Against, ...]:
    """RandAugment of other packages."""
    return (
        Against(
            "keras",
            partial(keras.layers.RandAugment, num_ops=peers.OPS, factor=peers.MAGNITUDE),
            POLICY_TARGET,
        ),
        Against("keras-cv", peers.cv_rand_augment, SAME_TARGET),
    )


def namesake(name: str, argument: str) -> Comparison:
    """An argument of a fused layer against the layer of Keras."""
    peer = Against(
        f"keras Random{argument.title()}", partial(peers.keras_layer, argument), SAME_TARGET
    )
    maker = ours(name, **{argument: peers.RANGES[argument]})
    return Comparison(f"{name}({argument}=)", maker, (peer,))


def alike(name: str, **arguments: Any) -> Comparison:
    """A layer against Keras's of the same name, with the same arguments."""
    peer = Against("keras", partial(getattr(keras.layers, name), **arguments), SAME_TARGET)
    return Comparison(name, ours(name, **arguments), (peer,))


def mix(name: str, **arguments: Any) -> Comparison:
    """`Mix` against the layer of Keras that mixes in one way."""
    peer = Against("keras", getattr(keras.layers, name), SAME_TARGET)
    return Comparison(name, ours("Mix", **arguments), (peer,), mixes=True)


def alone() -> list[Comparison]:
    """Layers without a namesake, and the recipes."""
    names = ("light", "standard", "strong", "imagenet")
    return [
        Comparison("TrivialAugment", ours("TrivialAugment"), ()),
        *(Comparison(f'recipe("{name}")', partial(recipe, name), ()) for name in names),
    ]


def recipe(name: str) -> Any:
    """A recipe as one layer."""
    made = augmentation.recipe(name)
    return made if hasattr(made, "augment_batch") else augmentation.Sequence(made)


SETTINGS = (("model", "float32"), ("pipeline", "uint8"))
"""Where layers run, and on what: a model mostly gets floats, a pipeline what a decoder gives."""


# Timing.


class Contender:
    """A layer that runs in one place, and its readings."""

    def __init__(self, name: str, maker: Maker, way: str, data: Any) -> None:
        self.name = name
        self.readings: list[float] = []
        """Seconds an image."""
        self._run = WAYS[way](maker(), data)
        require_change(name, self._run(1), data)
        start = time.perf_counter()
        self._run(LEAST[way])
        seconds = (time.perf_counter() - start) / LEAST[way]
        self._batches = max(LEAST[way], round(SECONDS / seconds))

    def read(self) -> None:
        """Take one reading."""
        start = time.perf_counter()
        self._run(self._batches)
        self.readings.append((time.perf_counter() - start) / self._batches / BATCH)

    def rate(self) -> float:
        """Images per second."""
        return 1 / statistics.median(self.readings)


def require_change(name: str, result: Any, data: Any) -> None:
    """Raise an error if a layer did nothing."""
    flat, given = keras.tree.flatten(result)[0], keras.tree.flatten(data)[0]
    assert len(flat) == len(given), (name, flat.shape)
    if flat.shape != given.shape:
        return  # A crop.
    changed = np.mean(np.asarray(flat, np.float32) != np.asarray(given, np.float32))
    assert changed > 0.02, f"{name} left the images as they were."


def raced(comparison: Comparison, way: str, dtype: str, rounds: int) -> list[Contender]:
    """Time a comparison's layers in turn, ours first; every other round in reverse."""
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
    races = [raced(comparison, *setting, rounds) for setting in SETTINGS]
    for peer in comparison.against:
        ratios = [ratios_of(peer.name, *race) for race in races]
        if all(ratios):
            verdicts = {verdict(each, at_least=peer.target) for each in ratios}
            worst = next(word for word in ("missed", "within noise", "met") if word in verdicts)
            cells = " | ".join(map(spread, ratios))
            yield f"| {comparison.name} | {peer.name} | {cells} | {peer.target:.1f} {worst} |"


def ratios_of(name: str, own: Contender, *others: Contender) -> list[float]:
    """Our rate over a peer's in each round; empty where the peer is not installed."""
    pairs = [zip(one.readings, own.readings, strict=True) for one in others if one.name == name]
    return [theirs / mine for pair in pairs for theirs, mine in pair]


def bench_peers(chosen: Callable[[str], bool], rounds: int) -> list[str]:
    """The table of ratios, and a sentence on the individual arguments."""
    lines = [
        "| layer | against | ratio in a model (range) | ratio in a pipeline (range) | target |",
        "|" + "---|" * 5,
    ]
    with_rows(lines, comparisons(), rows_of, chosen, rounds)
    medians = {}
    for comparison in single():
        if chosen(comparison.name):
            for way, dtype in SETTINGS:
                own, other = raced(comparison, way, dtype, rounds)
                ratio = statistics.median(ratios_of(other.name, own, other))
                medians[f"{comparison.name}, {way}"] = ratio
                print(f"{ratio:.2f} {comparison.name}, {way}", flush=True)
    if medians:
        low, high = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
        lines += [
            "",
            "Single arguments of `RandomGeometry` and `RandomColor`, against Keras's layers: "
            f"{medians[low]:.2f}, `{low}`, to {medians[high]:.2f}, `{high}`.",
        ]
    return lines


def bench_alone(chosen: Callable[[str], bool], rounds: int) -> list[str]:
    """The table of layers without a peer."""

    def row(comparison: Comparison, rounds: int) -> Iterator[str]:
        rates = [raced(comparison, *setting, rounds)[0].rate() for setting in SETTINGS]
        yield f"| {comparison.name} | {' | '.join(f'{rate:,.0f}' for rate in rates)} |"

    rows = ["| layer | images/s, model | images/s, pipeline |", "|" + "---|" * 3]
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

    # TensorFlow warns about many compiled functions, which are needed here.
    tf.get_logger().setLevel("ERROR")
    peers_version = f"keras-cv {version('keras-cv')}."
    print(machine(), peers_version, flush=True)
    for section, function in TABLES.items():
        lines = function(chosen, arguments.rounds)
        if arguments.write:
            write_section(section, lines, peers_version)


if __name__ == "__main__":
    main()
