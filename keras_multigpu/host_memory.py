"""How much memory this process has used, and how much is left to it, in a container too."""

from collections.abc import Iterator
from pathlib import Path

CGROUPS = (
    # Version 2, then version 1: the controller, its limit, its use, what it can free.
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    (
        "memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_inactive_file", "total_active_file"),
    ),
)


def available_bytes(root: Path = Path("/")) -> int:
    """The bytes left on the machine and in its control groups; 2**63 if nothing reports them."""
    return min(machine_memory(root), *cgroup_memory(root), 2**63)


def machine_memory(root: Path) -> int:
    # MemFree would leave out what the system can free.
    left = read_bytes_of(root / "proc/meminfo", "MemAvailable")
    return 2**63 if left is None else left


def cgroup_memory(root: Path) -> Iterator[int]:
    """The bytes left in each control group of this process that has a limit."""
    for controller, limit, used, freeable in CGROUPS:
        for group in control_groups(root, controller):
            try:
                most, now = (int((group / name).read_text()) for name in (limit, used))
                lines = (group / "memory.stat").read_text().splitlines()
            except (OSError, ValueError):
                # No such group, or a limit of "max".
                continue
            parts = dict(line.split(maxsplit=1) for line in lines)
            # The system drops cached files before it kills a process.
            yield max(most - now + sum(int(parts.get(name, 0)) for name in freeable), 0)


def control_groups(root: Path, controller: str) -> list[Path]:
    """The control groups of this process, all of whose limits apply; "" stands for version 2."""
    top = own = root / "sys/fs/cgroup" / controller
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            own = top / path.lstrip("/")
            break
    return [group for group in (own, *own.parents) if group.is_relative_to(top)]


def resident_bytes() -> int | None:
    """The memory that this process holds now; None if the system does not report it."""
    return read_bytes_of(Path("/proc/self/status"), "VmRSS")


def peak_bytes() -> int | None:
    """The most memory that this process has ever held; None if the system does not report it."""
    # `ru_maxrss` may be that of the process which started this one.
    return read_bytes_of(Path("/proc/self/status"), "VmHWM")


def read_bytes_of(file: Path, name: str) -> int | None:
    """The value of a line such as `VmRSS: 12 kB` in a file of Linux; None on other systems."""
    try:
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None
