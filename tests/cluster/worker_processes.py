"""Real worker processes on 127.0.0.1: started together, always ended, each result known.

    results = run_workers("tests/cluster/table.py", workers=2, arguments=["name of a row"])

A worker ends when its standard input does, so none outlives the tests, whatever becomes of them.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from processes_left import PATIENCE

TESTS = Path(__file__).parents[1]
RUN = """
import os, runpy, sys, threading

def end_with_parent():
    sys.stdin.read()
    os._exit(99)

threading.Thread(target=end_with_parent, daemon=True).start()
sys.argv = sys.argv[1:]
sys.path[:0] = [os.environ["KMG_TESTS"], os.path.dirname(sys.argv[0])]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
TAKEN = ("Address already in use", "address already in use", "Could not start gRPC server")
"""What TensorFlow says of a port that somebody took after it was found free."""


@dataclass
class Workers:
    """Worker processes that run one script.

    Args:
        script: The script.
        count: How many processes there are.
        arguments: What each is given.
        environment: More variables for all of them.
        of_each: More variables for each.
    """

    script: Path
    count: int
    arguments: tuple = ()
    environment: dict = field(default_factory=dict)
    of_each: tuple = ()

    def __enter__(self):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(self.count)]
        self.folder = tempfile.TemporaryDirectory()
        self.outputs = [Path(self.folder.name, f"{i}.txt") for i in range(self.count)]
        self.processes = [self._started(index, addresses) for index in range(self.count)]
        return self

    def _started(self, index, addresses):
        task = {"type": "worker", "index": index}
        variables = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "-1",
            "KERAS_BACKEND": "tensorflow",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "KERAS_MULTIGPU_EXCHANGE_TIMEOUT": str(PATIENCE),
            "KMG_TESTS": str(TESTS),
            "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
            **self.environment,
            **(self.of_each[index] if self.of_each else {}),
        }
        command = [sys.executable, "-c", RUN, str(self.script), *map(str, self.arguments)]
        with self.outputs[index].open("wb") as output:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=output, stderr=output, env=variables
            )

    def wait(self):
        """The exit codes, once all have ended; those that take too long are killed."""
        end = time.monotonic() + PATIENCE
        for process in self.processes:
            try:
                process.wait(max(end - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                self.kill()
        return [process.wait() for process in self.processes]

    def kill(self):
        """End all that still run."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()

    def output(self, index):
        """What a worker has printed so far."""
        return self.outputs[index].read_text(errors="replace")

    def lost_a_port(self):
        """Whether another process took a port after it was found free: all may start again."""
        outputs = map(self.output, range(self.count))
        return any(text in output for output in outputs for text in TAKEN)

    def __exit__(self, *_):
        self.kill()
        for process in self.processes:
            process.wait()
            process.stdin.close()
        self.folder.cleanup()


def run_workers(script, count, arguments=(), **more):
    """Run a script on workers until all have ended; what each printed.

    Where another process took a port after it was found free, all start again.
    """
    for _ in range(3):
        with Workers(Path(script), count, tuple(arguments), **more) as workers:
            codes = workers.wait()
            outputs = [workers.output(index) for index in range(count)]
            if not workers.lost_a_port():
                break
    assert codes == [0] * count, "\n".join(
        f"{c}:\n{o}" for c, o in zip(codes, outputs, strict=True)
    )
    return outputs


def free_ports(count):
    """Ports of this machine that nobody uses now, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
