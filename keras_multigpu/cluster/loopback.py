"""Workers of one machine listen to that machine only.

TensorFlow listens at every address, whatever TF_CONFIG says, and has no authentication. A socket
that already listens can still be tied to the loopback device, out of reach of other machines.
"""

import ipaddress
import logging
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from keras_multigpu.cluster.environment import Cluster, place_of

logger = logging.getLogger("keras_multigpu")


def keep_to_loopback(cluster: Cluster) -> None:
    """Tie this worker's listening sockets to the loopback device, if all workers are on it.

    A warning is logged where the system does not allow it.
    """
    if not all_on_loopback(cluster.workers):
        return
    _, port = place_of(cluster.workers[cluster.index])
    try:
        for number in map(int, os.listdir("/proc/self/fd")):
            with listener(number, port) as found:
                if found:
                    found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"lo\0")
    except (OSError, AttributeError) as error:  # macOS; Linux before 5.7.
        logger.warning(
            "Other machines can reach this worker's port %d, which has no authentication: it could "
            "not be tied to the loopback device (%s).",
            port,
            error,
        )


def all_on_loopback(addresses: Iterable[str]) -> bool:
    return all(is_loopback(place_of(address)[0]) for address in addresses)


def is_loopback(host: str) -> bool:
    """Whether a name or an address is that of the machine itself, for itself alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def listener(number: int, port: int) -> Iterator[socket.socket | None]:
    """The socket of this file number, if it listens at this port."""
    try:
        found = socket.socket(fileno=os.dup(number))
    except OSError:  # A file, or closed by now.
        yield None
        return
    with found:
        is_ip = found.family in (socket.AF_INET, socket.AF_INET6)
        listens = is_ip and found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        yield found if listens and found.getsockname()[1] == port else None
