"""What workers share on one machine: its GPUs, its ports, and its loopback device.

TensorFlow listens at every address, whatever TF_CONFIG says, and has no authentication. So the
sockets of workers that are all on one machine are tied to the loopback device, which other machines
cannot reach.
"""

import ipaddress
import logging
import os
import random
import shutil
import socket
from collections.abc import Callable, Iterable, Sequence

from keras_multigpu.checks import value_error
from keras_multigpu.cluster.environment import Cluster, place_of
from keras_multigpu.processes import new_process

LOOPBACK = "127.0.0.1"
"""Only processes of this machine reach a worker at this address."""

# Below the ports of outgoing connections, one of which could take a port at any moment.
PORTS = range(15_000, 31_000)

# Python's own generator is the user's, and two launches may have seeded it alike.
_random = random.SystemRandom()

logger = logging.getLogger("keras_multigpu")


def visible_gpus() -> list[str]:
    """CUDA's names of the GPUs that this process may use, found without starting TensorFlow."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        # CUDA ignores everything from the first -1 on.
        return names[: names.index("-1")] if "-1" in names else [name for name in names if name]
    if not shutil.which("nvidia-smi"):
        return []
    listed = new_process.answer("nvidia-smi", "-L")
    lines = [line for line in listed.splitlines() if line.startswith("GPU ")]
    return [str(index) for index in range(len(lines))]


def share_out(gpus: Sequence[str], workers: int, each: int | None) -> list[dict[str, str]]:
    """For each worker the environment variable that gives it its devices.

    Workers get `each` GPUs, by default as many as possible; a `ValueError` if there are too few.
    Without GPUs they get logical devices of the CPU, which is good for tests.
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


def free_ports(count: int, choose: Callable[[range, int], list[int]] = _random.sample) -> list[int]:
    found: list[int] = []
    # In random order, because two launches at a time would find the same ports free.
    for port in choose(PORTS, len(PORTS)):
        if len(found) == count:
            break
        if is_free(port):
            found.append(port)
    return found


def is_free(port: int) -> bool:
    """Whether TensorFlow could listen at a port, which it does at all addresses of the machine."""
    with socket.socket() as listener:
        # As in gRPC. Otherwise a port whose connections have just ended counts as taken.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", port))
        except OSError:
            return False
    return True


def all_on_loopback(addresses: Iterable[str]) -> bool:
    return all(is_loopback(place_of(address)[0]) for address in addresses)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def keep_to_loopback(cluster: Cluster) -> None:
    """Tie this worker's listening sockets to the loopback device, if all workers are on it."""
    if not all_on_loopback(cluster.workers):
        return
    _, port = place_of(cluster.workers[cluster.index])
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            try:
                found = socket.socket(fileno=os.dup(number))
            except OSError:  # Not a socket, or closed by now.
                continue
            with found:
                is_ip = found.family in (socket.AF_INET, socket.AF_INET6)
                listens = is_ip and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                if listens and found.getsockname()[1] == port:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    except (OSError, AttributeError) as error:  # macOS; Linux before 5.7.
        logger.warning(
            "Other machines can reach this worker's port %d, which has no authentication: it could "
            "not be tied to the loopback device (%s).",
            port,
            error,
        )
