"""Weak scaling from one worker to two, beside PyTorch's DDP and a raw TensorFlow loop.

    python tests/benchmarks/bench_scaling.py [--write]

Each worker has its own core, and the same network and batch; all sides take turns in each
round. "layers" are a hundred of 10 kB, "dense" is one of 4 MB, "embedding" one of
6.4 MB. The links with a rate are two network namespaces joined by a veth pair, or by
delaying_link.py, shaped with `tc tbf`; they need root, and the script says so if it has no
rights. PyTorch takes part in the Python that KMG_TORCH names.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import scaling_sides
from report import main, spread

from keras_multigpu.cluster.this_machine import free_ports

HERE = Path(__file__).parent
NAMES = {"ours": "keras_multigpu", "raw": "raw loop", "ddp": "DDP, gloo"}
NETWORKS = ("convolutions", "layers", "dense", "embedding")
LINKS = {"loopback": None, "1gbit": ("1gbit", None), "200mbit": ("200mbit", 1)}
"""Each link's rate, and its delay in milliseconds."""

STEPS = 20
TORCH = os.environ.get("KMG_TORCH")
"""A Python that has PyTorch."""
SPACES = ("kmg_scaling_0", "kmg_scaling_1")
HOSTS = ("10.99.77.1", "10.99.77.2")


class Workers:
    """The processes of one side, which take steps together on request."""

    def __init__(self, python, side, network, count, spaces):
        hosts = HOSTS if spaces else ["127.0.0.1"] * count
        ports = free_ports(count)
        addresses = [f"{host}:{port}" for host, port in zip(hosts, ports, strict=False)]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
            "CUDA_VISIBLE_DEVICES": "-1",
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "GLOO_SOCKET_IFNAME": "veth" if spaces else "lo",
        }
        script = [python, scaling_sides.__file__, side, network]
        self._processes = [
            subprocess.Popen(
                [*(f"ip netns exec {spaces[rank]}".split() if spaces else ()), *script]
                + [str(rank), ",".join(addresses)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(count)
        ]
        self.weights = [self._said(process) for process in self._processes][0]

    def step(self):
        """How many seconds a step took on the slower worker."""
        for process in self._processes:
            process.stdin.write(f"{STEPS}\n")
            process.stdin.flush()
        return max(self._said(process) for process in self._processes)

    def end(self):
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()

    def _said(self, process):
        for line in process.stdout:
            with contextlib.suppress(ValueError):
                return json.loads(line)
        raise RuntimeError(f"A worker ended: {process.args}")


def run(command):
    """Run a system command."""
    subprocess.run(command.split(), check=True, capture_output=True)


@contextlib.contextmanager
def link(rate, delay):
    """Two namespaces joined by a link with a rate and, if asked for, a delay."""
    with contextlib.ExitStack() as ends:
        for space in SPACES:
            run(f"ip netns add {space}")
            ends.callback(run, f"ip netns delete {space}")
        if delay is None:
            run(f"ip link add veth netns {SPACES[0]} type veth peer name veth netns {SPACES[1]}")
        else:
            ends.enter_context(delayed(delay))
        for space, host in zip(SPACES, HOSTS, strict=True):
            inside = f"ip netns exec {space}"
            run(f"{inside} ip address add {host}/24 dev veth")
            for device in ("lo", "veth"):
                run(f"{inside} ip link set {device} up")
            run(f"{inside} tc qdisc add dev veth root tbf rate {rate} burst 256kb latency 100ms")
        yield


@contextlib.contextmanager
def delayed(milliseconds):
    """A link between the namespaces that delays each packet."""
    names = ("kmg_delay_0", "kmg_delay_1")
    command = [sys.executable, str(HERE / "delaying_link.py"), *names, str(milliseconds)]
    began = time.perf_counter()
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as carrier:
        try:
            carrier.stdout.readline()
            for name, space in zip(names, SPACES, strict=True):
                run(f"ip link set {name} netns {space} name veth")
            yield
        finally:
            took, share = time.perf_counter() - began, carrier.communicate()[0]
            print(f"the link took {float(share or 0) / took:.1%} of a core", file=sys.stderr)


def measured(name, network, compared, rounds):
    """The rows of a link for a network, and the sides that are compared."""
    shape = LINKS[name]
    with link(*shape) if shape else contextlib.nullcontext():
        spaces = SPACES if shape else None
        sides, times = {}, {}
        try:
            for side in compared:
                python = TORCH if side == "ddp" else sys.executable
                for count in (1, 2):
                    own = spaces if count == 2 else None
                    sides[side, count] = Workers(python, side, network, count, own)
            assert len({workers.weights for workers in sides.values()}) == 1
            for _ in range(rounds):
                for key, workers in sides.items():
                    times.setdefault(key, []).append(workers.step())
        finally:
            for workers in sides.values():
                workers.end()
    title = f"{name}, {shape[1]} ms" if shape and shape[1] else name
    for side in compared:
        one, two = times[side, 1], times[side, 2]
        efficiencies = [a / b for a, b in zip(one, two, strict=True)]
        of_ddp = [a / b for a, b in zip(two, times.get(("ddp", 2), two), strict=True)]
        medians = [f"{1000 * statistics.median(each):.1f}" for each in (one, two)]
        beside = spread(of_ddp) if side != "ddp" and "ddp" in compared else ""
        yield network, title, NAMES[side], *medians, spread(efficiencies), beside


def scaling(rounds):
    compared = [side for side in NAMES if side != "ddp" or TORCH]
    for network in NETWORKS:
        for name in LINKS:
            yield from measured(name, network, compared, rounds)


HEAD = "network | link | side | one worker, ms | two workers, ms | efficiency (range)"
TABLES = {"scaling": (f"{HEAD} | step of DDP's (range)", scaling)}

if __name__ == "__main__":
    if len(os.sched_getaffinity(0)) < 2 or os.geteuid() != 0:
        sys.exit("Two cores are needed, and root, who alone may shape a link.")
    main(__doc__, TABLES)
