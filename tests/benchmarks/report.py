"""Where benchmarks write their results: sections of docs/benchmarks.md, and on what machine."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def machine() -> str:
    """The machine and the versions that a figure depends on."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("keras", "tensorflow"))
    return (
        f"{os.cpu_count()} cores of {processor()}, {platform.system()}, "
        f"Python {platform.python_version()}, {packages}."
    )


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def write_section(name: str, lines: list[str]) -> None:
    """Put the lines between a section's markers in docs/benchmarks.md."""
    text = PAGE.read_text()
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if begin not in text or end not in text:
        raise ValueError(f"A section of {PAGE} needs the lines {begin} and {end}; it has not both.")
    before, rest = text.split(begin)
    after = rest.split(end)[1]
    temporary = PAGE.with_suffix(".new")
    temporary.write_text(f"{before}{begin}\n" + "\n".join(lines) + f"\n{end}{after}")
    os.replace(temporary, PAGE)
