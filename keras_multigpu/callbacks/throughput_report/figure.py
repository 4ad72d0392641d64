"""The picture of `ThroughputReport`: a bar for each epoch, of the parts of a step."""

from collections.abc import Sequence
from typing import Any

from keras_multigpu.callbacks.throughput_report.report import LABELS, Throughput
from keras_multigpu.pictures import GREY, new_figure, plain_axes, title

COLORS = {
    "data_wait": "#d9541e",
    "compute": "#0b6fb3",
    "step": "#0b6fb3",
    "all_reduce": "#8a4fbf",
    "host": "#b9c2c9",
}


def throughput_figure(reports: Sequence[Throughput]) -> Any:
    figure = new_figure((9.5, 4.4))
    bars, speed = figure.subplots(1, 2, sharex=True, width_ratios=(3, 2))
    epochs = [report.epoch + 1 for report in reports]
    below = [0.0] * len(reports)
    for name in reports[0].parts:
        heights = [report.parts[name] / report.steps * 1e3 for report in reports]
        bars.bar(epochs, heights, 0.7, below, color=COLORS[name], label=LABELS[name])
        below = [low + height for low, height in zip(below, heights, strict=True)]
    bars.set_ylabel("milliseconds a step", color=GREY)
    speed.plot(epochs, [r.examples_per_second for r in reports], "-o", color=COLORS["compute"])
    speed.set_ylim(bottom=0)
    speed.set_ylabel("examples a second", color=GREY)
    for axes in (bars, speed):
        plain_axes(axes)
        axes.set_xlabel("epoch", color=GREY)
        axes.locator_params(axis="x", integer=True)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
    title(figure, "Throughput", reports[-1].verdict.partition(";")[0])
    return figure
