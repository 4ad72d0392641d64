"""What this machine has for workers: GPUs, found without starting TensorFlow, and free ports."""

import os
import random
import shutil
import socket
import subprocess
from collections.abc import Callable, Sequence

from keras_multigpu.checks import value_error

LOOPBACK = "127.0.0.1"
"""Where only processes of this machine reach a worker."""

# Below those that systems give to outgoing connections, which could take one at any moment.
PORTS = range(15_000, 31_000)


def visible_gpus() -> list[str]:
    """What CUDA calls the GPUs that this process may use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA shows no device from the first number on that does not exist.
        return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    if not shutil.which("nvidia-smi"):
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    lines = [line for line in listed.stdout.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(lines))]


def shared_out(gpus: Sequence[str], workers: int, each: int | None) -> list[dict[str, str]]:
    """For each worker the environment variable that gives it its devices.

    That is as many GPUs as possible, or `each`; a `ValueError` if there are too few. Without GPUs
    it is parts of the CPU, which is good for tests.
    """
    if not gpus:
        return [{"KERAS_MULTIGPU_CPU_DEVICES": str(each)} if each else {}] * workers
    count = each or len(gpus) // workers
    if not count or count * workers > len(gpus):
        raise value_error(
            "There are too few GPUs for the workers.",
            f"Expected at least {workers * (each or 1)}, since no two workers share one.",
            "Start fewer workers, or give each fewer devices; CUDA_VISIBLE_DEVICES=-1 hides "
            "all GPUs.",
            gpus=list(gpus),
            workers=workers,
            devices_per_worker=each,
        )
    parts = [gpus[index * count : (index + 1) * count] for index in range(workers)]
    return [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts]


def free_ports(
    count: int, address: str, choose: Callable[[range, int], list[int]] = random.sample
) -> list[int]:
    found: list[int] = []
    # By default at random: two launches at the same time would find the same ports free.
    for port in choose(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if is_free(port, address):
            found.append(port)
    return found


def is_free(port: int, address: str) -> bool:
    """Whether TensorFlow could listen there; it does so at all addresses of the machine."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        # As gRPC does. Otherwise a port whose connections have just ended counts as taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True
