"""Draws the pictures that explain order, sums and benchmarks while the docs are built.

Every picture of a page is a link to itself: on a phone its words can be read once it is opened.

What they show is taken from where it is true: orders are drawn by the code that makes them,
ratios are read off the tables of their page. mkdocs calls `on_files` and `on_page_content`: see
`hooks` in mkdocs.yml.
"""

import functools
import logging
import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parent

EXAMPLES = 6000
"""Enough that `BUFFER` is small against them."""

BUFFER = 8 * 32
"""Of `image_dataset_from_directory`: 8 batches (Keras 3.15), which have 32 files by default."""

OURS, STOCK = "#2a7f62", "#c8553d"


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pictures to the files of the site.

    Args:
        files: The files.
        config: The settings of mkdocs.
    """
    for path, content in pictures().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Let each picture of a page open in full.

    Args:
        html: The content of a page.
    """
    return re.sub(r'<img [^>]*\bsrc="(?!data:)([^"]+)"[^>]*>', r'<a href="\1">\g<0></a>', html)


@functools.cache
def pictures() -> dict[str, bytes]:
    """Every picture by its place in the site, drawn once for all builds of `mkdocs serve`."""
    # Neither needs a GPU, nor does anybody want to read what TensorFlow logs about it.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    from keras_multigpu.pictures import png_of

    return {
        "guarantees/images/order.png": png_of(order()),
        "how_it_works/images/sums.png": png_of(sums()),
        "how_it_works/images/journey.png": png_of(journey()),
        "images/benchmarks.png": png_of(benchmarks()),
    }


def order() -> Any:
    """Where each example stands in two epochs: Keras's buffer, and our order."""
    import numpy as np

    from keras_multigpu import pictures

    figure = pictures.new_figure((8.4, 4.2))
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, name, color, epochs in (
        (left, f"a buffer of {BUFFER} examples", STOCK, buffered_orders()),
        (right, "keras_multigpu", OURS, our_orders()),
    ):
        first, second = (np.argsort(numbers) for numbers in epochs)
        pictures.plain_axes(axes)
        axes.plot(first, second, ".", markersize=1.2, color=color, alpha=0.6)
        correlation = np.corrcoef(first, second)[0, 1]
        axes.set_title(f"{name}: correlation {abs(correlation):.2f}", fontsize=10, color=color)
        axes.set_xlabel("position in one epoch", fontsize=9, color=pictures.GREY)
        axes.set_aspect("equal")
    left.set_ylabel("position in the next epoch", fontsize=9, color=pictures.GREY)
    return figure


def buffered_orders() -> list[list[int]]:
    """Two epochs as `image_dataset_from_directory` makes them: a fixed order through a buffer."""
    import tensorflow as tf

    dataset = tf.data.Dataset.range(EXAMPLES).shuffle(BUFFER, seed=1)
    return [list(dataset.as_numpy_iterator()) for _ in range(2)]


def our_orders() -> list[list[int]]:
    """Two epochs of `Batches`."""
    import numpy as np

    from keras_multigpu.data import from_arrays

    batches = from_arrays(np.arange(EXAMPLES), global_batch_size=500, seed=1)
    return [
        np.concatenate([batch.numpy() for batch in batches.epoch(epoch)]).tolist()
        for epoch in range(2)
    ]


def sums() -> Any:
    """What each of five examples counts, on two replicas."""
    from keras_multigpu import pictures

    figure = pictures.new_figure((8.4, 2.9))
    for axes, name, color, counts in zip(
        figure.subplots(1, 2, sharey=True),
        ("mean of means: stock Keras", "sum, divided once: keras_multigpu"),
        (STOCK, OURS),
        ([1 / 6] * 3 + [1 / 4] * 2, [1 / 5] * 5),
        strict=True,
    ):
        pictures.plain_axes(axes)
        axes.axhline(0.2, color=pictures.INK, linewidth=1, linestyle=":")
        # Two groups: the shares of the two replicas.
        bars = axes.bar([0, 1, 2, 3.6, 4.6], counts, color=color, width=0.8)
        axes.bar_label(
            bars, ["1/6"] * 3 + ["1/4"] * 2 if max(counts) > 0.2 else ["1/5"] * 5, fontsize=9
        )
        axes.set_xticks([1, 4.1], ["replica 0: three rows", "replica 1: two rows"])
        axes.set_ylim(0, 0.3)
        axes.set_title(name, fontsize=10, color=color)
    figure.supylabel("weight of an example", fontsize=9, color=pictures.GREY)
    return figure


def journey() -> Any:
    """Ten examples on four replicas, from the batch to the new weight."""
    import numpy as np

    from keras_multigpu import pictures
    from keras_multigpu.batch_sizes import shares

    figure = pictures.new_figure((8.4, 4.6))
    axes = figure.subplots()
    axes.set_axis_off()
    axes.set_xlim(-1.25, 3.5)
    axes.set_ylim(-0.55, 4.5)

    def box(x: float, y: float, text: str, color: str) -> None:
        axes.text(
            x, y, text, ha="center", va="center", fontsize=9, color="white", linespacing=1.5,
            bbox={"boxstyle": "round,pad=0.55", "facecolor": color, "edgecolor": "none"},
        )  # fmt: skip

    def arrow(start: tuple[float, float], end: tuple[float, float]) -> None:
        axes.annotate(
            "", end, start, arrowprops={"arrowstyle": "-|>", "color": pictures.GREY, "lw": 1.1}
        )

    x = np.arange(1.0, 11.0)
    host, replica, link = pictures.INK, OURS, "#3a6ea5"
    box(1.5, 4.2, "host: the global batch, x = 1 … 10", host)
    loss = gradient = 0.0
    for number, (start, stop) in enumerate(shares(10, 4)):
        rows = x[start:stop]
        part, slope = np.sum(rows**2) / 10, np.sum(-2 * rows**2) / 10
        loss, gradient = loss + part, gradient + slope
        arrow((1.5, 3.95), (number, 3.32))
        box(number, 3.05, f"replica {number}\n" + ", ".join(f"{row:.0f}" for row in rows), replica)
        arrow((number, 2.72), (number, 2.2))
        box(number, 1.9, f"loss {part:.1f}\ngradient {slope:.1f}", replica)
        arrow((number, 1.57), (1.5, 1.06))
        arrow((1.5, 0.68), (number, 0.12))
        box(number, -0.12, "w = 1.77", replica)
    box(1.5, 0.87, f"sum over the replicas: loss {loss:.1f}, gradient {gradient:.0f}", link)
    for y, text in ((3.62, "cut"), (2.46, "losses divided by 10"), (1.32, "sum"), (0.4, "update")):
        axes.text(-1.2, y, text, fontsize=9, color=pictures.GREY, ha="left", va="center")
    return figure


def benchmarks() -> Any:
    """How many times as fast as its peer each thing is, with the range of its pairs."""
    from keras_multigpu import pictures

    bars = [bar for section in SECTIONS for bar in section_bars(*section)]
    figure = pictures.new_figure((8.4, 0.27 * len(bars) + 1.0))
    axes = figure.subplots()
    pictures.plain_axes(axes)
    axes.set_xscale("log")
    for y, (_, speed, low, high) in enumerate(bars):
        color = pictures.GREY if low < 1 < high else OURS if speed >= 1 else STOCK
        axes.plot([low, high], [y, y], color=color, alpha=0.35, linewidth=5, solid_capstyle="round")
        axes.plot(speed, y, "o", color=color, markersize=6)
        axes.annotate(
            f"{speed:.3g}", (max(high, speed), y), (8, 0), textcoords="offset points", fontsize=8,
            va="center", color=pictures.GREY,
        )  # fmt: skip
    axes.axvline(1, color=pictures.INK, linewidth=1)
    axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xticks([0.5, 1, 2, 5, 10, 20, 40], ["0.5", "1", "2", "5", "10", "20", "40"])
    axes.minorticks_off()
    # The largest speed still has its number to the right of its band.
    axes.set_xlim(0.5, 60)
    axes.set_xlabel(
        "times as fast as the peer; bands are ranges of all pairs, grey if noise",
        fontsize=9,
    )
    return figure


SECTIONS = (
    # The name of a table, and whether its ratio is one of times.
    ("step", True),
    ("data", False),
    ("augmentation", False),
)


def section_bars(name: str, of_times: bool) -> list[tuple[str, float, float, float]]:
    """Label, speed, lowest and highest of every row of a table that compares with a peer."""
    text = DOCS.joinpath("benchmarks.md").read_text()
    part = text.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0]
    found = []
    for rows in tables(part):
        names = rows[0]
        if not any(cell.startswith("ratio") for cell in names):
            continue
        column = next(n for n, cell in enumerate(names) if cell.startswith("ratio"))
        for row in rows[1:]:
            peer = next(
                (cell.split(":")[0] for cell in row[1:] if re.match("[a-zA-Z]+.*: ", cell)), ""
            )
            peer = row[1] if names[1] == "against" else peer or names[1]
            ratio, low, high = (float(number) for number in re.findall(r"\d+\.\d+", row[column]))
            if of_times:
                ratio, low, high = 1 / ratio, 1 / high, 1 / low
            found.append((f"{row[0]}  /  {peer}".replace("`", ""), ratio, low, high))
    return found


def tables(text: str) -> list[list[list[str]]]:
    """The tables of a text, each as rows of cells, without the line below the headings."""
    blocks = re.findall(r"(?:^\|.*\n)+", text + "\n", re.MULTILINE)
    return [
        [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for n, line in enumerate(block.splitlines())
            if n != 1
        ]
        for block in blocks
    ]
