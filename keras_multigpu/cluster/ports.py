"""Free ports of this machine."""

import random
import socket
from collections.abc import Callable

# Below those that systems give to outgoing connections, which could take one at any moment.
PORTS = range(15_000, 31_000)


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
