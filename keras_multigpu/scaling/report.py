"""What the turns show: medians, efficiency, the first limit, and its table and picture."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from keras_multigpu.pictures import new_figure, plain_axes
from keras_multigpu.writing import size_text

WELL = 0.9
"""The efficiency from which nothing is called a limit."""

NO_MEMORY = "memory ran out"

GLOBAL, REPLICA = "global batch", "replica's batch"
"""What stays fixed while the number of replicas grows."""

PARTS = {  # The name of a part in the table, its color, and its name as a limit.
    "data_wait": ("data", "#edae49", "waiting for data"),
    "compute": ("compute", "#2e86ab", "the devices themselves"),
    "step": ("step", "#2e86ab", "the step itself"),
    "all_reduce": ("sums", "#d1495b", "sums"),
    "host": ("host", "#6b7783", "the host (Python, dispatch, update)"),
}


class Row(NamedTuple):
    """A number of replicas: medians over the rounds. `failed` says why there is nothing else.

    Attributes:
        efficiency: The examples a second, relative to as many times those of the fewest replicas:
            the median, smallest and largest ratio of a round.
        parts: The seconds of each part of a step.
        last: The last turn.
    """

    replicas: int
    failed: str | None = None
    step: float = 0.0
    rate: float = 0.0
    efficiency: tuple[float, float, float] = (0.0, 0.0, 0.0)
    parts: Mapping[str, float] = {}
    last: Mapping[str, Any] = {}


Turns = Sequence[Mapping[str, Any]]


def rows_of(turns: Mapping[int, Turns]) -> list[Row]:
    """A row for each number of replicas, the fewest first, from its turns, one for each round."""
    fewest, *_ = turns
    return [row_of(count, turns[count], turns[fewest], fewest) for count in turns]


def row_of(count: int, turns: Turns, first: Turns, fewest: int) -> Row:
    if (failed := turns[-1].get("failed")) is not None:
        return Row(count, failed)
    rates = [turn["examples_per_second"] for turn in turns]
    ratios = [
        rate / base["examples_per_second"] * fewest / count
        for rate, base in zip(rates, first, strict=True)
    ]
    parts = {
        part: statistics.median(turn["parts"][part] / turn["steps"] for turn in turns)
        for part in turns[-1]["parts"]
    }
    step = statistics.median(turn["step_time"] for turn in turns)
    efficiency = statistics.median(ratios), min(ratios), max(ratios)
    return Row(count, None, step, statistics.median(rates), efficiency, parts, turns[-1])


def first_limit(fixed: str, rows: Sequence[Row], shares_cores: bool) -> str:
    """What more replicas meet first, and what to do about it, in a sentence."""
    first, *others = rows
    for row in others:
        where = f"{row.replicas} replicas"
        if row.failed == NO_MEMORY:
            helps = '`compile(micro_batches="auto")`, or what `keras-multigpu memory` names'
            return f"memory, which ran out on {where}; try {helps}."
        if row.failed:
            return f"unknown, since {where} failed: {row.failed}"
        if alone := row.last["alone"]:
            return f"the step: one replica takes the whole batch, because {alone}"
        if row.efficiency[0] >= WELL:
            continue
        # What a part takes beyond perfect scaling, in which replicas divide a global batch.
        ideal = 1.0 if fixed == REPLICA else first.replicas / row.replicas
        lost = {part: took - ideal * first.parts[part] for part, took in row.parts.items()}
        part = max(lost, key=lost.__getitem__)
        what = f"{PARTS[part][2]}: on {where} {1e3 * lost[part]:.1f} ms of each step's "
        what += f"{1e3 * row.step:.1f} ms beyond perfect scaling"
        if part in ("compute", "step") and shares_cores:
            return f"{what}; they share the machine's cores, so try it on GPUs."
        return f"{what}; try {row.last['tries'][part]}."
    return f"none up to {rows[-1].replicas} replicas."


def table_of(rows: Sequence[Row]) -> list[str]:
    """The lines of a Markdown table."""
    names = parts_of(rows)
    heading = ["replicas", "batch", "step, ms", "examples/s", "efficiency (range)"]
    heading += [f"{PARTS[part][0]}, ms" for part in names] + ["memory", "bytes a step"]
    lines = [heading]
    for row in rows:
        if row.failed:
            lines.append([str(row.replicas), row.failed, *[""] * (len(heading) - 2)])
            continue
        lines.append(
            [
                str(row.replicas),
                str(row.last["batch"] or "varies"),
                f"{1e3 * row.step:.1f}",
                f"{row.rate:,.0f}" if row.rate >= 100 else f"{row.rate:.3g}",
                "{:.2f} ({:.2f}–{:.2f})".format(*row.efficiency),
                *(f"{1e3 * row.parts[part]:.1f}" for part in names),
                size_text(max(row.last["peak_memory"])),
                size_text(row.last["bytes"]),
            ]
        )
    lines.insert(1, ["---"] * len(heading))
    return [f"| {' | '.join(line)} |" for line in lines]


def parts_of(rows: Sequence[Row]) -> list[str]:
    return [part for part in PARTS if any(part in row.parts for row in rows)]


def picture_of(tables: Mapping[str, Sequence[Row]], title: str) -> Any:
    """A figure: how many times as fast more replicas are, and where a step's time goes."""
    figure = new_figure((13.0, 4.2))
    speeds, *panels = figure.subplots(1, 1 + len(tables))
    styles = {GLOBAL: ("#2e86ab", "o-"), REPLICA: ("#edae49", "s-")}
    for panel, (fixed, rows) in zip(panels, tables.items(), strict=True):
        good = [row for row in rows if not row.failed]
        numbers = [row.replicas for row in good]
        color, style = styles[fixed]
        times = [row.rate / good[0].rate for row in good]
        speeds.plot(numbers, times, style, color=color, label=f"{fixed} fixed")
        below = [0.0] * len(good)
        for part in parts_of(good):
            name, shade, _ = PARTS[part]
            heights = [1e3 * row.parts[part] for row in good]
            panel.bar(range(len(good)), heights, 0.6, bottom=below, color=shade, label=name)
            below = [low + height for low, height in zip(below, heights, strict=True)]
        panel.set_xticks(range(len(good)), map(str, numbers))
        # Room for the legend.
        panel.set(xlabel="replicas", ylabel="ms", ylim=(0, 1.25 * max(below)))
        panel.set_title(f"a step, {fixed} fixed", fontsize=10)
        panel.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    counts = [row.replicas for row in rows]
    perfect = [count / counts[0] for count in counts]
    speeds.plot(counts, perfect, "--", color="#6b7783", label="perfect scaling", zorder=0)
    speeds.set_xticks(counts)
    speeds.set(xlabel="replicas", ylabel="times the examples a second", ylim=(0, None))
    speeds.legend(frameon=False, fontsize=8)
    for axes in figure.axes:
        plain_axes(axes)
    figure.suptitle(title, fontsize=11)
    return figure
