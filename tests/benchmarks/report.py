"""What benchmarks share: tables, the pages that have them, processes of their own, verdicts."""

import argparse
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGES = (
    DOCS / "benchmarks.md",
    DOCS / "how_it_works" / "whole_trainings.md",
    Path(__file__).with_name("README.md"),
)
"""The first two have what users ask for."""
MEASURE = "--measure"

Table = tuple[str, Callable[[int], Iterable[Sequence[object]]]]
"""The names of the columns, and what gives the rows from so many rounds."""


def main(doc: str, tables: Mapping[str, Table], rounds: int = 5, note: str = "") -> None:
    """Print the tables that the command line names, or all; `--write` puts them into their page."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", nargs="*", choices=[[], *tables], metavar="table")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--write", action="store_true")
    chosen = parser.parse_args()
    print(machine(), note, flush=True)
    for name in chosen.tables or tables:
        columns, rows = tables[name]
        lines = [f"| {columns} |", "|" + "---|" * (1 + columns.count(" | "))]
        print(*lines, sep="\n", flush=True)
        for row in rows(chosen.rounds):
            lines.append(f"| {' | '.join(map(str, row))} |")
            print(lines[-1], flush=True)
        if chosen.write:
            write_section(name, lines, note)


def alone(script: str, *arguments: object, **environment: str) -> list[float]:
    """The numbers that a script prints in a process of its own, which measures."""
    command = [sys.executable, script, MEASURE, *map(str, arguments)]
    quiet = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", **environment}
    ended = subprocess.run(command, env=quiet, check=True, stdout=subprocess.PIPE, text=True)
    return [float(number) for number in ended.stdout.splitlines()[-1].split()]


def measures() -> list[str] | None:
    """What this process is to measure; None if it is the one that prints the tables."""
    return sys.argv[2:] if sys.argv[1:2] == [MEASURE] else None


def split_cpu(count: int) -> list[str]:
    """Make logical CPU devices, before anything starts TensorFlow; their names."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(count)]
    tf.config.set_logical_device_configuration(cpu, devices)
    return [f"CPU:{number}" for number in range(count)]


def resident(kind: str) -> float:
    """The memory of this process in MiB: `VmRSS` now, `VmHWM` at its peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(kind))


def start_peak() -> None:
    """Let the peak of this process begin anew."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


# Each tensor comes from the system by itself: the C library's allocator would also hold memory
# between tensors, now more and now less, and oneDNN's as well.
EXACT_MEMORY = {"MALLOC_MMAP_THRESHOLD_": "65536", "TF_ENABLE_ONEDNN_OPTS": "0"}


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


def in_turn(found: Sequence[Any], rounds: int) -> Iterable[Any]:
    """Contenders round by round, every other round in reverse."""
    for number in range(rounds):
        yield from found if number % 2 == 0 else reversed(found)


def write_section(name: str, lines: Sequence[str], note: str = "") -> None:
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
