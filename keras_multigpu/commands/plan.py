"""`keras-multigpu plan`: how fast a training will be on N GPUs, and what will be in the way."""

import argparse
import math
import re
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from keras_multigpu.commands.plan_prediction import (
    EVENLY,
    Link,
    Prediction,
    Training,
    Yielded,
    predicted,
)
from keras_multigpu.commands.usage import (
    UsageError,
    at_least,
    usage_error,
    without_library_messages,
)
from keras_multigpu.pictures import INK, checked_png, new_figure, plain_axes, title, write_png

RATES = {"nvlink": "160gbit", "pcie": "80gbit"}
"""Approximate rates between the GPUs of a host, by name."""

MUCH = 0.1
"""The part of a step from which a loss gets a sentence."""

STEPS = 5
"""How many steps are timed."""


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
    add(
        "--latency-us", type=positive, default=20.0, metavar="US", help="of that link (default: 20)"
    )
    add("--inside", default="nvlink", metavar="RATE", help="nvlink (the default), pcie, or a rate")
    add("--input-rate", type=positive, metavar="N", help="examples a second that a host can read")
    add("--picture", metavar="PNG", help="a file to draw the prediction in")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    training = training_of(arguments)
    predictions = [predicted(training, gpus) for gpus in numbers_of_gpus(arguments.gpus)]
    print(table(predictions))
    print("\n".join(sentences(predictions)))
    if arguments.picture:
        try:
            draw(predictions, Path(arguments.picture))
        except (ImportError, ValueError) as error:
            raise UsageError(str(error)) from error
        print(f"See {arguments.picture}.")
    return 0


def training_of(arguments: argparse.Namespace) -> Training:
    step, gradient = arguments.step_ms, arguments.gradient_mb
    yielded = EVENLY
    if arguments.model:
        with without_library_messages():
            model = application(arguments.model)
            weights = sum(variable.shape.num_elements() for variable in model.trainable_variables)
            gradient = gradient or weights * 4 / 1e6
            yielded = in_backward_order(model)
            step = step or measured(model, arguments.batch) * 1e3
        print(f"{arguments.model}: {gradient:.1f} MB of gradients, {step:.1f} ms a step.\n")
    if not step or not gradient:
        raise usage_error(
            "It is not known what to train.",
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
        arguments.input_rate or float("inf"),
        yielded,
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
            "`--gpus` does not say how many GPUs.",
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
    """How a model's layers yield their gradients."""
    # A layer's work is about its number of weights, times the places where it applies them.
    layers = [layer for layer in reversed(model.layers) if layer.trainable_variables]
    sizes = [sum(v.shape.num_elements() for v in layer.trainable_variables) for layer in layers]
    places = [math.prod(size or 1 for size in layer.output.shape[1:-1]) for layer in layers]
    work = [size * count for size, count in zip(sizes, places, strict=True)]
    return tuple((a / sum(sizes), b / sum(work)) for a, b in zip(sizes, work, strict=True))


def measured(model: Any, batch: int) -> float:
    """Seconds of a training step on the first device of this machine; how far it is, is printed."""
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
    return statistics.median(seconds[1:])  # The first one compiles.


def table(predictions: Sequence[Prediction]) -> str:
    lines = (
        f"{one.gpus:6}{one.hosts:7}{one.step * 1e3:11.1f}{one.examples:12,.0f}"
        f"{one.efficiency:12.2f}{one.host_examples:15,.0f}/s  {one.bottleneck}"
        for one in predictions
    )
    title = "  GPUs  hosts    step ms  examples/s  efficiency  input of a host  bottleneck"
    return "\n".join([title, *lines])


def sentences(predictions: Sequence[Prediction]) -> list[str]:
    """From how many GPUs on something costs much."""
    found = [""]
    for cause in dict.fromkeys(cause for one in predictions for cause in one.lost):
        from_here = [one for one in predictions if one.lost.get(cause, 0) > MUCH * one.step]
        if from_here:
            found.append(
                f"Waiting for {cause} takes more than a tenth of a step from "
                f"{from_here[0].gpus} GPUs on."
            )
    return found if found[1:] else ["", "Nothing takes more than a tenth of a step away."]


COLORS = {
    "the GPU": "#b9c2cc",
    "the slowest GPU": "#e3a857",
    "the link inside a host": "#8ab6d6",
    "the link between hosts": "#0b6e99",
    "the input": "#d1495b",
}


def draw(predictions: Sequence[Prediction], path: Path) -> None:
    """Examples a second beside what is ideal, and where the time of a step goes."""
    path = checked_png(path)
    figure = new_figure((10, 4.2))
    title(figure, "Training on more GPUs, as predicted", "keras-multigpu plan")
    speed, parts = figure.subplots(1, 2)
    gpus = [one.gpus for one in predictions]
    alone = predictions[0].examples / (predictions[0].gpus * predictions[0].efficiency)
    speed.loglog(gpus, [alone * each for each in gpus], "--", color="#b9c2cc", label="ideal")
    speed.loglog(gpus, [one.examples for one in predictions], "o-", color="#0b6e99", label="here")
    speed.set(xlabel="GPUs", ylabel="examples a second")
    speed.legend(frameon=False)
    bottom = [0.0] * len(gpus)
    places = range(len(gpus))
    for cause, color in COLORS.items():
        heights = [share(one, cause) for one in predictions]
        if any(heights):
            parts.bar(places, heights, bottom=bottom, color=color, width=0.8, label=cause)
        bottom = [one + other for one, other in zip(bottom, heights, strict=True)]
    parts.set_xticks(places, [str(each) for each in gpus])
    parts.set(xlabel="GPUs", ylabel="part of a step spent on", ylim=(0, 1))
    parts.legend(frameon=True, facecolor="white", edgecolor="none", loc="lower left", fontsize=8)
    for axes in (speed, parts):
        plain_axes(axes)
        axes.xaxis.label.set_color(INK)
        axes.yaxis.label.set_color(INK)
    write_png(figure, path)


def share(prediction: Prediction, cause: str) -> float:
    if cause == "the GPU":
        return prediction.efficiency
    return prediction.lost.get(cause, 0.0) / prediction.step
