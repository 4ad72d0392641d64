"""A single exchange between two workers: TensorFlow's on the host beside PyTorch's gloo.

    python tests/benchmarks/bench_exchange.py [--torch PYTHON] [--rounds N] [--write]

Two processes on loopback sum float32 numbers of each size, in one pack or in several at once; all
ways take turns. A small step takes this long, and its own operations.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from report import machine, spread, write_section

SIZES = {"4 KiB": 2**10, "1 MiB": 2**18, "4 MiB": 2**20}
WAYS = {
    "RING, one pack": ("RING", 1),
    "AUTO, one pack": ("AUTO", 1),
    "RING, 4 packs": ("RING", 4),
    "RING, 16 packs": ("RING", 16),
    "gloo, one pack": ("gloo", 1),
}
TIMES = 20


def tensorflow_sums(rank, addresses):
    """Make a function that sums with TensorFlow's collectives, in a graph."""
    task = {"type": "worker", "index": rank}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    import tensorflow as tf

    strategy = tf.distribute.MultiWorkerMirroredStrategy()

    def summing(kind, count, packs):
        hint = tf.distribute.experimental.CommunicationImplementation[kind]
        options = tf.distribute.experimental.CommunicationOptions(implementation=hint)
        given = tf.ones([count])

        def on_replica():
            context = tf.distribute.get_replica_context()
            parts = tf.split(given, packs) if packs > 1 else [given]
            add = tf.distribute.ReduceOp.SUM
            return [context.all_reduce(add, tf.identity(part), options)[:1] for part in parts]

        function = tf.function(lambda: strategy.run(on_replica))
        return lambda: [float(part[0]) for part in function()]

    return summing


def gloo_sums(rank, addresses):
    """Make a function that sums with gloo."""
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses)
    )

    def summing(kind, count, packs):
        given = torch.ones(count)

        def run():
            distributed.all_reduce(given)
            given.fill_(1.0)

        return run

    return summing


def work(side, rank, addresses):
    """Sum as standard input asks: how, and how many numbers."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    summing = {"tensorflow": tensorflow_sums, "gloo": gloo_sums}[side](rank, addresses)
    known = {}
    for line in sys.stdin:
        kind, count, packs = key = tuple(json.loads(line))
        run = known.setdefault(key, summing(kind, count, packs))
        run()
        start = time.perf_counter()
        for _ in range(TIMES):
            run()
        print(json.dumps((time.perf_counter() - start) / TIMES), flush=True)
    os._exit(0)


class Pair:
    """The two processes of a side, which sum together on request."""

    def __init__(self, python, side):
        # A worker of PyTorch does not need it, and may not have it.
        from keras_multigpu.cluster.this_machine import free_ports

        addresses = ",".join(f"127.0.0.1:{port}" for port in free_ports(2, "127.0.0.1"))
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "CUDA_VISIBLE_DEVICES": "-1",
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        self._processes = [
            subprocess.Popen(
                [python, __file__, "--work", side, str(rank), addresses],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(2)
        ]

    def seconds(self, *how):
        for process in self._processes:
            process.stdin.write(json.dumps(how) + "\n")
            process.stdin.flush()
        return max(float(process.stdout.readline()) for process in self._processes)

    def end(self):
        for process in self._processes:
            process.kill()
            process.wait()


def main():
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]), sys.argv[4].split(","))
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    here = sys.executable if importlib.util.find_spec("torch") else None
    parser.add_argument("--torch", default=here, help="a Python that has PyTorch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    ways = {name: how for name, how in WAYS.items() if how[0] != "gloo" or arguments.torch}
    sides = {"tensorflow": Pair(sys.executable, "tensorflow")}
    if arguments.torch:
        sides["gloo"] = Pair(arguments.torch, "gloo")
    times = {}
    try:
        for _ in range(arguments.rounds):
            for size, count in SIZES.items():
                for name, (kind, packs) in ways.items():
                    pair = sides["gloo" if kind == "gloo" else "tensorflow"]
                    times.setdefault((size, name), []).append(pair.seconds(kind, count, packs))
    finally:
        for pair in sides.values():
            pair.end()
    lines = [f"| {' | '.join(['sum of', *ways])} |", "|" + "---|" * (1 + len(ways))]
    for size in SIZES:
        cells = [spread([1000 * each for each in times[size, name]]) for name in ways]
        lines.append(f"| {' | '.join([size, *cells])} |")
    print(machine(), *lines, sep="\n")
    if arguments.write:
        write_section("exchange", lines, "Milliseconds.")


if __name__ == "__main__":
    main()
