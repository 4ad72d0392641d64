"""How much memory this process has used, and can still use, in a container too."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

CGROUPS = (
    # Version 2, then version 1: where the groups are, their limit, their use, what can be freed.
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def available_bytes(root: Path = Path("/")) -> int:
    """The bytes left, of the machine and of its control group; 2**63 where no system says."""
    return min(machine_memory(root), *cgroup_memory(root), 2**63)


def machine_memory(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            name, _, amount = line.partition(":")
            # Not MemFree, which leaves out what the system would give back.
            if name == "MemAvailable":
                return int(amount.split()[0]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 2**63


def cgroup_memory(root: Path) -> Iterator[int]:
    """The bytes left in each control group of this process that has a limit."""
    for controller, limit, used, freeable in CGROUPS:
        top = root / "sys/fs/cgroup" / controller
        own = top / cgroup_path(root, controller)
        # A limit of any group above holds as well.
        for group in [own, *own.parents]:
            if not group.is_relative_to(top):
                break
            try:
                most, now = (int((group / name).read_text()) for name in (limit, used))
                lines = (group / "memory.stat").read_text().splitlines()
            except (OSError, ValueError):
                # No such group, or a limit of "max".
                continue
            parts = dict(line.split(maxsplit=1) for line in lines)
            # What is kept of files is given back before a process is killed.
            yield max(most - now + sum(int(parts.get(name, 0)) for name in freeable), 0)


def cgroup_path(root: Path, controller: str) -> str:
    """The control group of this process, as a path below the groups of a controller."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def resident_bytes() -> int | None:
    """What this process holds now; None if the system does not report it."""
    return process_memory("VmRSS")


def peak_bytes() -> int | None:
    """The most that this process has ever held; None if the system does not report it."""
    if sys.platform == "win32":
        return None
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In kilobytes, except on macOS. On Linux it may be that of the process which started this one.
    return process_memory("VmHWM") or (most if sys.platform == "darwin" else most * 1024)


def process_memory(name: str) -> int | None:
    """A number of bytes as Linux names it; None on other systems."""
    try:
        for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
