"""The demo's picture: the loss curves of one device, this package and stock Keras."""

from pathlib import Path
from typing import Any

import numpy as np

from keras_multigpu.commands.demo_cases import BATCH_SIZE
from keras_multigpu.commands.demo_cases import CASES
from keras_multigpu.commands.demo_cases import EPOCHS
from keras_multigpu.commands.demo_cases import WAYS
from keras_multigpu.commands.demo_cases import Results
from keras_multigpu.pictures import write_png

SMALLEST = 1e-8
ROUNDING = 1e-5

STYLES: dict[str, dict[str, Any]] = {
    "one": {"color": "#b9c2cc", "linewidth": 7, "solid_capstyle": "round"},
    "ours": {"color": "#0b6e99", "linewidth": 2, "marker": "o", "markersize": 4},
    "stock": {
        "color": "#d1495b",
        "linewidth": 2,
        "linestyle": "--",
        "marker": "s",
        "markersize": 4,
    },
}


def draw(results: Results, path: Path) -> Path:
    """Draw the curves of all cases into a PNG file; its path."""
    import matplotlib

    # No window, whatever the user has configured.
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(CASES), figsize=(13, 7), sharex=True, layout="constrained", height_ratios=(3, 2)
    )
    figure.suptitle(
        "Two replicas with keras_multigpu train as one device does; with stock Keras they do not",
        fontsize=15,
        fontweight="bold",
    )
    for index, case in enumerate(CASES):
        draw_losses(axes[0, index], results, index)
        draw_distances(axes[1, index], results, index)
        axes[0, index].set_title(f"{case.title}\n{case.batches}", fontsize=11)
    figure.supxlabel(
        f"Two replicas share each batch of {BATCH_SIZE} digits; the last batch of an epoch cannot "
        "be shared evenly.",
        fontsize=11,
    )
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("distance from\none device's loss")
    axes[0, 0].legend(frameon=False)
    figure.set_dpi(120)
    write_png(figure, path)
    pyplot.close(figure)
    return path


def draw_losses(axes: Any, results: Results, index: int) -> None:
    """One case's loss curves."""
    for way, label in WAYS.items():
        losses = results[way][index].losses
        axes.plot(range(1, len(losses) + 1), losses, label=label, **STYLES[way])
    note = what_happened_to_stock(results, index)
    if note:
        axes.text(
            0.5, 0.6, note, transform=axes.transAxes, ha="center", color=STYLES["stock"]["color"]
        )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def draw_distances(axes: Any, results: Results, index: int) -> None:
    """How far the curves of one case are from that of one device."""
    one = np.array(results["one"][index].losses)
    for way in ("ours", "stock"):
        losses = np.array(results[way][index].losses)
        distances = np.abs(losses - one[: len(losses)])
        # Where nothing differs there is no logarithm.
        shown = np.maximum(distances, SMALLEST)
        axes.plot(range(1, len(losses) + 1), shown, **STYLES[way])
    axes.axhspan(SMALLEST, ROUNDING, color="#0b6e99", alpha=0.08, linewidth=0)
    axes.text(EPOCHS, ROUNDING / 2, "rounding", ha="right", va="top", fontsize=9, color="#0b6e99")
    axes.set_yscale("log")
    axes.set_ylim(SMALLEST, 1)
    axes.set_xticks(range(1, EPOCHS + 1))
    axes.set_xlabel("epoch")
    axes.grid(alpha=0.25)


def what_happened_to_stock(results: Results, index: int) -> str:
    """A note where stock Keras has no whole curve."""
    stock = results["stock"][index]
    finite = int(np.isfinite(stock.losses).sum())
    if stock.error:
        return f"stock Keras failed in epoch {len(stock.losses) + 1}:\n{stock.error}"
    return f"stock Keras: NaN from epoch {finite + 1}" if finite < len(stock.losses) else ""
