"""The picture of `keras-multigpu plan`."""

from collections.abc import Sequence
from pathlib import Path

from keras_multigpu.commands.plan_prediction import Prediction
from keras_multigpu.pictures import INK, checked_png, new_figure, plain_axes, title, write_png

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
