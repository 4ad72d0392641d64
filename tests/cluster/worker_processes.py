"""Real worker processes on 127.0.0.1, which are started together and always ended.

    outputs = run_workers("tests/cluster/table_of_workers.py", 2, [folder, "name of a row"])

A worker ends when the tests do, however they end.
"""

import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from helpers.graph_optimizer import unoptimized_if_quick
from helpers.processes_left import PATIENCE, PROCESSES, Silence

TESTS = Path(__file__).parents[1]
TAKEN = ("Address already in use", "address already in use", "Could not start gRPC server")
"""TensorFlow's errors if somebody took a port after it was found free."""


@dataclass
class Workers:
    """Worker processes that run one script.

    Args:
        script: The script.
        count: The number of processes.
        arguments: The arguments of the script.
        environment: More environment variables for all of them.
        of_each: More environment variables for each of them.
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
        # A test may read what a worker has said before that worker has begun.
        for output in self.outputs:
            output.touch()
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
            "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
            **self.environment,
            **(self.of_each[index] if self.of_each else {}),
        }
        process = PROCESSES.Process(
            target=run_script,
            args=(str(self.script), list(map(str, self.arguments)), variables, self.outputs[index]),
        )
        process.start()
        return process

    def wait(self):
        silence = Silence()
        while any(process.is_alive() for process in self.processes):
            time.sleep(0.01)
            said = [output.stat().st_size for output in self.outputs]
            if silence.is_too_long(*said):
                break
        self.kill()
        return [process.exitcode for process in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join(PATIENCE)

    def output(self, index):
        return self.outputs[index].read_text(errors="replace")

    def lost_a_port(self):
        """Whether another process took a port after it was found free. If so, start all again."""
        outputs = map(self.output, range(self.count))
        return any(text in output for output in outputs for text in TAKEN)

    def __exit__(self, *_):
        self.kill()
        self.folder.cleanup()


def run_script(script, arguments, variables, output):
    """Turn this process into one that runs a script, from its environment to its exit."""
    with output.open("wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    threading.Thread(target=end_with_parent, daemon=True).start()
    # The process that runs the tests may ignore them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(variables)
    unoptimized_if_quick()
    sys.argv = [script, *arguments]
    sys.path[:0] = [str(TESTS), os.path.dirname(script)]
    code = 0
    try:
        runpy.run_path(script, run_name="__main__")
    except BaseException as error:
        sys.last_value, code = error, 1
        sys.excepthook(type(error), error, error.__traceback__)
    # A forked process would otherwise skip functions registered with `atexit`.
    ctypes.pythonapi.Py_Exit(code)


def end_with_parent():
    multiprocessing.parent_process().join()
    os._exit(99)


def run_workers(script, count, arguments=(), **more):
    """Run a script on workers until all have ended. Returns what each printed.

    If another process took a port after it was found free, all start again.
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
    # Not at the top: a worker imports this file before its environment says that it is one.
    from keras_multigpu.cluster import this_machine

    return this_machine.free_ports(count)
