"""`Report` of one number of replicas, and `Verification`: all reports, and a table of them."""

import dataclasses
import textwrap
from collections.abc import Sequence

HEADINGS = ("replicas", "verdict", "loss on one", "loss on N", "difference", "first to differ")
WIDTH = 88


@dataclasses.dataclass(frozen=True)
class Report:
    """How training on N replicas compared with one device.

    Args:
        replicas: The number of replicas.
        loss_on_one_device: The logged loss of the last step; None if nothing was logged.
        loss_on_replicas: The same on the replicas; None also if they crashed.
        largest_difference: The largest difference of a weight or optimizer variable after
            the last step, relative to its largest value. It distinguishes rounding from errors.
        first_difference: The first weight, in the model's order, that differs by more than
            rounding; None if all agree.
        step: The step after which it differed, or in which the replicas crashed; the first is 1.
        error: What the replicas raised; None if they trained to the end.
        remark: What to know about a difference or a crash.
        parts: What replicas gather and compute whole, in one line; None if they share everything.
    """

    replicas: int
    loss_on_one_device: float | None = None
    loss_on_replicas: float | None = None
    largest_difference: float | None = None
    first_difference: str | None = None
    step: int | None = None
    error: str | None = None
    remark: str | None = None
    parts: str | None = None

    @property
    def agrees(self) -> bool:
        """Whether the replicas trained as one device."""
        return self.first_difference is None and self.error is None


@dataclasses.dataclass(frozen=True, repr=False)
class Verification:
    """What `keras_multigpu.verify` has found and printed.

    Args:
        reports: One `Report` for each number of replicas.
        steps: How many steps were trained.
        devices: What the replicas were: `"GPUs"` or `"logical CPU devices"`.
        tolerance: The relative difference up to which weights agree.
    """

    reports: tuple[Report, ...]
    steps: int
    devices: str
    tolerance: float

    @property
    def agrees(self) -> bool:
        """Whether all replica counts trained as one device."""
        return all(report.agrees for report in self.reports)

    def __repr__(self) -> str:
        verdicts = ", ".join(f"{report.replicas}: {verdict(report)}" for report in self.reports)
        return f"<Verification {verdicts}>"

    @property
    def text(self) -> str:
        """The table that was printed, with remarks."""
        counts = join_words([str(report.replicas) for report in self.reports])
        steps = "1 training step" if self.steps == 1 else f"{self.steps} training steps"
        title = f"One device against {counts} {self.devices}, after {steps}"
        parts = [title, table([row(report) for report in self.reports]), *self._remarks()]
        return "\n\n".join(parts)

    def _remarks(self) -> list[str]:
        """Each remark once, with the replica counts that it concerns."""
        remarks: dict[str, list[str]] = {}
        for report in self.reports:
            for remark in filter(None, (report.error, report.remark, report.parts)):
                remarks.setdefault(remark, []).append(str(report.replicas))
        texts = [f"{join_words(counts)} replicas: {text}" for text, counts in remarks.items()]
        texts.append(
            "Difference: of the weight or optimizer variable that differs most, relative to its "
            f"largest value. Up to {self.tolerance:g} counts as rounding."
        )
        return [textwrap.fill(text, WIDTH) for text in texts]


def verdict(report: Report) -> str:
    if report.error is not None:
        return "crashes"
    return "agrees" if report.agrees else "DIFFERS"


def row(report: Report) -> tuple[str, ...]:
    return (
        str(report.replicas),
        verdict(report),
        number(report.loss_on_one_device, ".6g"),
        number(report.loss_on_replicas, ".6g"),
        number(report.largest_difference, ".1e"),
        place(report),
    )


def place(report: Report) -> str:
    if report.error is not None:
        return f"in step {report.step}"
    if report.first_difference is None:
        return "-"
    return f"{report.first_difference}, after step {report.step}"


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def table(rows: Sequence[Sequence[str]]) -> str:
    """Align rows in columns under the headings."""
    lines = [HEADINGS, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def join_words(words: Sequence[str]) -> str:
    """Join words for a sentence: "2", "2 and 4", "2, 3 and 4"."""
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last
