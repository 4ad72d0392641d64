"""A long cable: two network devices, and a process that carries packets between them.

    python tests/benchmarks/delaying_link.py DEVICE DEVICE MILLISECONDS

It does what `tc netem delay` does, which many kernels lack: it holds each packet for a while. Once
the devices exist it prints "ready"; when its input ends, the processor seconds that it took.
"""

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
TUN, NO_PACKET_INFO, WITH_HEADER = 0x0001, 0x1000, 0x4000
# Without checksums and unsegmented, as over veth: up to 64 KiB at once.
CHECKSUM, TCP_SEGMENTS = 1, 2
LARGEST = 2**16 + 10
"""Bytes of a packet, and of the header that says which offloads are left to do."""


def device(name):
    """A new network device; what is sent there is read from its file."""
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = TUN | NO_PACKET_INFO | WITH_HEADER
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(file, TUNSETOFFLOAD, CHECKSUM | TCP_SEGMENTS)
    return file


def carry(one, other, seconds):
    """Carry packets between two devices, each `seconds` later, until the input ends."""
    across, waiting = {one: other, other: one}, deque()
    while True:
        # All packets wait equally long, so they leave in the order of their arrival.
        left = max(waiting[0][0] - time.monotonic(), 0) if waiting else None
        ready, _, _ = select.select([one, other, sys.stdin], [], [], left)
        if sys.stdin in ready:
            return
        for file in ready:
            waiting.append((time.monotonic() + seconds, across[file], os.read(file, LARGEST)))
        while waiting and waiting[0][0] <= time.monotonic():
            _, file, packet = waiting.popleft()
            with contextlib.suppress(OSError):  # The other end is not up yet: the packet is lost.
                os.write(file, packet)


def main(one, other, milliseconds):
    """Make the devices and carry."""
    files = device(one), device(other)
    print("ready", flush=True)
    carry(*files, float(milliseconds) / 1000)
    print(f"{time.process_time():.3f}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
