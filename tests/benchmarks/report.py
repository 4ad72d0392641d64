"""Writes results of benchmarks, and the machine they ran on, into the page that has their table."""

import math
import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

PAGES = (
    Path(__file__).parents[2] / "docs" / "benchmarks.md",
    Path(__file__).with_name("README.md"),
)
"""The first has what users ask for."""


def machine() -> str:
    """The machine and the versions that a figure depends on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("keras", "tensorflow"))
    return (
        f"{os.cpu_count()} cores of {processor()}, {platform.system()}, "
        f"Python {platform.python_version()}, {packages}."
    )


def processor() -> str:
    """The processor's name, if the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def spread(ratios: Sequence[float]) -> str:
    """The median of some ratios, and their range."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


def verdict(
    ratios: Sequence[float], *, at_least: float = -math.inf, at_most: float = math.inf
) -> str:
    """Whether a limit is met; undecided if it lies within the range."""
    if at_least <= min(ratios) and max(ratios) <= at_most:
        return "met"
    if max(ratios) < at_least or at_most < min(ratios):
        return "missed"
    return "within noise"


def write_section(name: str, lines: list[str], note: str = "") -> None:
    """Put lines between a section's markers, in the page that has them.

    Above them stand the note and, unless it is the one that the page names at its top, the machine.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    page = next((page for page in PAGES if begin in texts[page] and end in texts[page]), None)
    if page is None:
        raise ValueError(f"One of {PAGES} needs the lines {begin} and {end}.")
    text = texts[page]
    told = "" if machine() in text.split("\n## ")[0] else machine()
    heading = " ".join(part for part in (told, note) if part)
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    body = "\n".join([heading, "", *lines] if heading else lines)
    temporary = page.with_suffix(".new")
    temporary.write_text(f"{before}{begin}\n{body}\n{end}{after}", encoding="utf-8")
    os.replace(temporary, page)
