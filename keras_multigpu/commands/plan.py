"""`keras-multigpu plan`: predict how fast a training will be on N GPUs, and what will limit it.

A message takes the latency of its link plus its size divided by the link's rate (the alpha-beta
model). Gradients are summed in buckets while the backward pass still runs, by the faster of two
ways: around a ring of all GPUs, or inside each host first and then between hosts.
"""

import argparse
import math
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from keras_multigpu.commands.usage import (
    UsageError,
    at_least,
    usage_error,
    without_library_messages,
)
from keras_multigpu.pictures import INK, checked_png, new_figure, plain_axes, title, write_png

RATES = {"nvlink": "160gbit", "pcie": "80gbit"}
"""Approximate rates between the GPUs of a host."""

STEPS = 5
"""How many steps are timed."""

# The share of the backward pass in a step: the gradients of inputs and those of weights each take
# as many operations as the forward pass.
BACKWARD = 2 / 3

# The share of a fast link's rate that sums of gradients reach, and the relative standard deviation
# of the steps of equal GPUs, which wait for the slowest. Both were fitted once to the published
# measurements in tests/commands/test_plan.py.
USABLE, SPREAD = 0.65, 0.02

SLOW = 1e9 / 8
"""Bytes a second; sums reach the full rate of a link up to this."""

# The share of a step that makes a loss the bottleneck, and the share that earns it a sentence.
NOTICED, MUCH = 0.05, 0.1

Yielded = tuple[tuple[float, float], ...]
"""Each layer's share of the gradients and of the work, from the last layer to the first."""


class Link(NamedTuple):
    """A connection between GPUs or hosts: bytes a second, and latency in seconds."""

    rate: float
    latency: float


class Training(NamedTuple):
    """A training and its hardware.

    Attributes:
        step: Seconds of a step on one GPU.
        gradient: Bytes of all gradients.
        batch: Examples in the batch of one GPU.
        gpus_per_host: GPUs in one host.
        inside: The link between the GPUs of a host.
        between: The link between hosts.
        input_rate: How many examples a second a host can read and decode.
        yielded: How the layers yield their gradients; evenly by default.
    """

    step: float
    gradient: float
    batch: int
    gpus_per_host: int
    inside: Link
    between: Link
    input_rate: float = math.inf
    yielded: Yielded = ((1, 1),)


class Prediction(NamedTuple):
    """A step on some GPUs, in seconds.

    Attributes:
        gpus: The number of GPUs.
        hosts: The number of hosts.
        step: The length of the step.
        lost: The time that is lost, by its cause.
        examples: Examples a second of all GPUs together.
        efficiency: 1 if all GPUs are as fast as one alone.
        host_examples: Examples a second that each host has to read.
    """

    gpus: int
    hosts: int
    step: float
    lost: dict[str, float]
    examples: float
    efficiency: float
    host_examples: float

    @property
    def bottleneck(self) -> str:
        cause, seconds = max(self.lost.items(), key=lambda item: item[1])
        return cause if seconds > NOTICED * self.step else "the GPUs"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="predict how fast a training will be on N GPUs",
        description="Predict step time, examples a second, efficiency and the input that each host "
        "needs, from the step of one GPU and a model of the links.",
        epilog="The prediction comes within 10% of most published measurements; the page of this "
        "command in the documentation lists them.",
    )
    add = parser.add_argument
    whole, positive = at_least(int, 1), at_least(float, 0.001)
    add("--gpus", default="1..1024", metavar="A..B", help="powers of two, or numbers with commas")
    add("--model", metavar="NAME", help="of keras.applications: weights and step are taken from it")
    add("--batch", type=whole, default=64, metavar="N", help="examples on each GPU (default: 64)")
    add("--step-ms", type=positive, metavar="MS", help="milliseconds of a step of one GPU")
    add("--gradient-mb", type=positive, metavar="MB", help="of all gradients, 4 bytes a weight")
    add("--gpus-per-host", type=whole, default=8, metavar="N", help="GPUs of a host (default: 8)")
    add("--link", default="25gbit", metavar="RATE", help="between hosts, as 25gbit (the default)")
    latency = "of that link (default: 20)"
    add("--latency-us", type=positive, default=20.0, metavar="US", help=latency)
    add("--inside", default="nvlink", metavar="RATE", help="nvlink (the default), pcie, or a rate")
    add("--input-rate", type=positive, metavar="N", help="examples a second that a host can read")
    add("--picture", metavar="PNG", help="a file to draw the prediction in")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    training = training_of(arguments)
    predictions = [predicted(training, gpus) for gpus in numbers_of_gpus(arguments.gpus)]
    print(report(predictions))
    if arguments.picture:
        try:
            draw(predictions, Path(arguments.picture))
        except (ImportError, ValueError) as error:
            raise UsageError(str(error)) from error
        print(f"See {arguments.picture}.")
    return 0


def training_of(arguments: argparse.Namespace) -> Training:
    step, gradient, more = arguments.step_ms, arguments.gradient_mb, {}
    if arguments.model:
        with without_library_messages():
            model = application(arguments.model)
            weights = sum(variable.shape.num_elements() for variable in model.trainable_variables)
            gradient = gradient or weights * 4 / 1e6
            more["yielded"] = in_backward_order(model)
            step = step or measured(model, arguments.batch) * 1e3
        print(f"{arguments.model}: {gradient:.1f} MB of gradients, {step:.1f} ms a step.\n")
    if not step or not gradient:
        raise usage_error(
            "The training is not specified.",
            "Expected `--model`, or both `--step-ms` and `--gradient-mb`.",
            "Write for example `--step-ms 250 --gradient-mb 102`.",
            step_ms=step,
            gradient_mb=gradient,
        )
    latency = arguments.latency_us / 1e6
    return Training(
        step / 1e3,
        gradient * 1e6,
        arguments.batch,
        arguments.gpus_per_host,
        # Inside a host there is no network to wait for.
        Link(rate_of("inside", arguments.inside), min(latency, 1e-5)),
        Link(rate_of("link", arguments.link), latency),
        arguments.input_rate or math.inf,
        **more,
    )


def rate_of(name: str, text: str) -> float:
    """Bytes a second of a rate such as `25gbit`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mg])bit", RATES.get(text, text))
    if match is None or not float(match[1]):
        raise usage_error(
            f"`--{name}` is not a rate.",
            f"Expected bits a second, or one of {', '.join(RATES)} with `--inside`.",
            "Write for example `25gbit` or `200mbit`.",
            **{name: text},
        )
    return float(match[1]) * {"m": 1e6, "g": 1e9}[match[2]] / 8


def numbers_of_gpus(text: str) -> list[int]:
    """`1..8` as `[1, 2, 4, 8]`, and `1,3,8` as it is."""
    found: set[int] = set()
    if match := re.fullmatch(r"(\d+)\.\.(\d+)", text):
        first, last = int(match[1]), int(match[2])
        powers = {2**power for power in range(last.bit_length())}
        found = {first, *(each for each in powers if first <= each), last}
    elif re.fullmatch(r"\d+(,\d+)*", text):
        found = set(map(int, text.split(",")))
    if not found or min(found) < 1 or (match and first > last):
        raise usage_error(
            "`--gpus` is not a number of GPUs.",
            "Expected two numbers with `..` between them, or some with commas.",
            "Write for example `1..1024`, or `1,8,24`.",
            gpus=text,
        )
    return sorted(found)


def application(name: str) -> Any:
    import keras

    builder = getattr(keras.applications, name, None)
    if not callable(builder):
        known = [each for each in dir(keras.applications) if each[0].isupper()]
        raise usage_error(
            "There is no such model in `keras.applications`.",
            f"Expected one of {', '.join(known)}.",
            "Check the spelling, or give `--step-ms` and `--gradient-mb` of your own.",
            model=name,
        )
    return builder(weights=None)


def in_backward_order(model: Any) -> Yielded:
    """Each layer's share of a model's gradients and work, from the last layer to the first."""
    # A layer's work is about its number of weights times the positions at which it applies them.
    layers = [layer for layer in reversed(model.layers) if layer.trainable_variables]
    sizes = [sum(v.shape.num_elements() for v in layer.trainable_variables) for layer in layers]
    places = [math.prod(size or 1 for size in layer.output.shape[1:-1]) for layer in layers]
    work = [size * count for size, count in zip(sizes, places, strict=True)]
    return tuple((a / sum(sizes), b / sum(work)) for a, b in zip(sizes, work, strict=True))


def measured(model: Any, batch: int) -> float:
    """Measure the seconds of a training step on this machine's first device, printing progress."""
    import numpy as np

    model.compile("sgd", "sparse_categorical_crossentropy")
    random = np.random.default_rng(0)
    shape = [size or 224 for size in model.input_shape[1:]]
    images = random.random((batch, *shape), np.float32)
    labels = np.zeros(batch, np.int32)
    seconds: list[float] = []
    for number in range(STEPS + 1):
        note = " (compiling)" if not number else " " * 12
        print(f"\rMeasuring {model.name}, step {number} of {STEPS}{note}", end="", flush=True)
        start = time.perf_counter()
        model.train_on_batch(images, labels)
        seconds.append(time.perf_counter() - start)
    print()
    return statistics.median(seconds[1:])


def predicted(training: Training, gpus: int) -> Prediction:
    hosts = math.ceil(gpus / training.gpus_per_host)
    # About how far the largest of this many normally distributed numbers exceeds their mean.
    slowest = training.step * (1 + SPREAD * math.sqrt(2 * math.log(gpus)))
    summed = end_of_sums(training, gpus, slowest)
    of_host = min(gpus, training.gpus_per_host) * training.batch
    step = max(summed, of_host / training.input_rate)
    link = "the link between hosts" if hosts > 1 else "the link inside a host"
    lost = {
        "the slowest GPU": slowest - training.step,
        link: summed - slowest,
        "the input": step - summed,
    }
    examples, efficiency = gpus * training.batch / step, training.step / step
    return Prediction(gpus, hosts, step, lost, examples, efficiency, of_host / step)


def end_of_sums(training: Training, gpus: int, step: float) -> float:
    """The time at which all buckets are summed, each after the backward pass has made it ready."""
    from keras_multigpu.training.exchange.packing import filling

    if gpus == 1:
        return step
    left_hosts = end = 0.0
    left = training.gradient
    while left > 0:
        bucket = min(left, filling(left))
        left -= bucket
        inside, between = sum_of_bucket(training, bucket, gpus)
        worked = work_done(training.yielded, 1 - left / training.gradient)
        ready = step * (1 - BACKWARD * (1 - worked))
        # One bucket is summed inside the hosts while another one is summed between them.
        left_hosts = max(left_hosts, ready) + inside
        end = max(end, left_hosts) + between
    return end


def work_done(yielded: Yielded, gradients: float) -> float:
    """The share of the backward pass that is done once this share of the gradients is ready."""
    done = 0.0
    for part, work in yielded:
        done += work * min(1, gradients / part)
        gradients -= part
        if gradients <= 0:
            break
    return done


def sum_of_bucket(training: Training, size: float, gpus: int) -> tuple[float, float]:
    """The seconds inside hosts and between hosts of a sum over all GPUs, by the faster way."""
    inside, between = training.inside, training.between
    in_host = min(gpus, training.gpus_per_host)
    hosts = math.ceil(gpus / in_host)
    if hosts == 1:
        return ring(size, gpus, inside), 0.0
    slower = Link(min(inside.rate, between.rate), max(inside.latency, between.latency))
    around_all = 0.0, ring(size, gpus, slower)
    # The longer of the two times counts, because buckets overlap.
    return min(around_all, (ring(size, in_host, inside), halving(size, hosts, between)), key=max)


def ring(size: float, ranks: int, link: Link) -> float:
    """Seconds of a sum around a ring: each rank sends `2 (ranks - 1)` pieces to its neighbor."""
    return 2 * (ranks - 1) * (link.latency + size / ranks / reached(link.rate))


def halving(size: float, ranks: int, link: Link) -> float:
    """Seconds of a sum by recursive halving and doubling: a ring's bytes in fewer messages."""
    messages = 2 * math.ceil(math.log2(ranks))
    sent = 2 * (ranks - 1) / ranks * size
    return messages * link.latency + sent / reached(link.rate)


def reached(rate: float) -> float:
    return max(min(rate, SLOW), USABLE * rate)


def report(predictions: Sequence[Prediction]) -> str:
    """A table, and for each cause of loss the number of GPUs from which it takes a tenth."""
    lines = ["  GPUs  hosts    step ms  examples/s  efficiency  input of a host  bottleneck"]
    lines += (
        f"{one.gpus:6}{one.hosts:7}{one.step * 1e3:11.1f}{one.examples:12,.0f}"
        f"{one.efficiency:12.2f}{one.host_examples:15,.0f}/s  {one.bottleneck}"
        for one in predictions
    )
    found = []
    for cause in dict.fromkeys(cause for one in predictions for cause in one.lost):
        much = [one.gpus for one in predictions if one.lost.get(cause, 0) > MUCH * one.step]
        if much:
            found.append(
                f"From {much[0]} GPUs on, waiting for {cause} takes more than a tenth of a step."
            )
    return "\n".join([*lines, "", *(found or ["No wait takes more than a tenth of a step."])])


COLORS = {
    "the GPU": "#b9c2cc",
    "the slowest GPU": "#e3a857",
    "the link inside a host": "#8ab6d6",
    "the link between hosts": "#0b6e99",
    "the input": "#d1495b",
}


def draw(predictions: Sequence[Prediction], path: Path) -> None:
    """Draw examples a second beside the ideal, and where the time of a step goes."""
    path = checked_png(path)
    figure = new_figure((10, 4.2))
    title(figure, "Training on more GPUs, as predicted", "keras-multigpu plan")
    speed, parts = figure.subplots(1, 2)
    gpus = [one.gpus for one in predictions]
    alone = predictions[0].examples / (predictions[0].gpus * predictions[0].efficiency)
    speed.loglog(gpus, [alone * each for each in gpus], "--", color="#b9c2cc", label="ideal")
    reached = [one.examples for one in predictions]
    speed.loglog(gpus, reached, "o-", color="#0b6e99", label="predicted")
    speed.set(xlabel="GPUs", ylabel="examples a second")
    speed.legend(frameon=False)
    bottom = [0.0] * len(gpus)
    for cause, color in COLORS.items():
        heights = [
            one.efficiency if cause == "the GPU" else one.lost.get(cause, 0) / one.step
            for one in predictions
        ]
        if any(heights):
            parts.bar(range(len(gpus)), heights, bottom=bottom, color=color, label=cause)
        bottom = [one + other for one, other in zip(bottom, heights, strict=True)]
    parts.set_xticks(range(len(gpus)), [str(each) for each in gpus])
    parts.set(xlabel="GPUs", ylabel="share of a step", ylim=(0, 1))
    handles, causes = parts.get_legend_handles_labels()
    figure.legend(handles, causes, frameon=False, loc="outside lower right", ncols=len(causes))
    for axes in (speed, parts):
        plain_axes(axes)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
    write_png(figure, path)
