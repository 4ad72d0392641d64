"""`local`: call a function on several workers of this machine, from a script or a notebook."""

import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from keras_multigpu.checks import require_positive_integer, runtime_error
from keras_multigpu.cluster.launcher import Failure, Printer, on_this_machine, run_once
from keras_multigpu.cluster.this_machine import share_out, visible_gpus
from keras_multigpu.processes import functions, new_process
from keras_multigpu.processes.groups import Interrupts

GRACE = 10.0
"""Seconds that workers have to save and end after Ctrl-C or the failure of one."""


def local(
    fn: Callable[[], Any], num_workers: int = 2, *, devices_per_worker: int | None = None
) -> Any:
    """Train on several workers of this machine, from a notebook cell or a script.

    Each worker is a new process that calls the same function, which trains as on one device:
    `kmg.distribute` finds the other workers. Their output is printed here, with the worker's number
    before each line. If one fails the others are ended; Ctrl-C and a notebook's stop button end
    all.

    Args:
        fn: A function without arguments, such as `functools.partial(train, epochs=3)`. A function
            typed into a notebook is copied with what it uses, which needs
            `pip install cloudpickle`. Others are imported by name, so a script must call this
            under `if __name__ == "__main__":`.
        num_workers: How many processes train.
        devices_per_worker: GPUs of each worker, or logical devices of the CPU. By default the
            workers share all GPUs out.

    Returns:
        What the function returned on the first worker: anything that can be pickled.

    Raises:
        Exception: What the function raised, with its worker's traceback as a note.
        RuntimeError: If a worker died.

    Example:

    ```python
    history = kmg.cluster.local(train, 2)
    ```
    """
    functions.refuse_while_importing("kmg.cluster.local")
    require_positive_integer("num_workers", num_workers)
    devices = share_out(visible_gpus(), num_workers, devices_per_worker)
    # A notebook need not show how TensorFlow's servers start.
    quiet = {"TF_CPP_MIN_LOG_LEVEL": os.environ.get("TF_CPP_MIN_LOG_LEVEL", "1")}
    variables = [new_process.environment(**quiet, **own) for own in devices]
    with tempfile.TemporaryDirectory() as folder:
        question = Path(folder, "question")
        question.write_bytes(functions.function_request("fn", fn, "each worker is one"))
        replies = [Path(folder, f"reply{index}") for index in range(num_workers)]
        commands = [
            new_process.code(functions.CALL_OR_FAIL, str(question), str(reply)) for reply in replies
        ]
        with Interrupts([signal.SIGINT]) as interrupts:
            workers = on_this_machine(commands, variables)
            failure = run_once(workers, Printer(interrupts), interrupts, GRACE)
        if interrupts.first is not None:
            # All workers have ended by now.
            raise KeyboardInterrupt
        if failure is not None:
            raise cause(replies, failure)
        value, _ = functions.result_from(replies[0].read_bytes())
        return functions.result_from(value)


def cause(replies: list[Path], failure: Failure) -> Exception:
    """The error of the worker that failed first, not of one that it stopped."""
    answers = [functions.result_from(each.read_bytes()) for each in replies if each.exists()]
    errors = [error for _, error in answers if error is not None]
    # By name, since importing that class would import TensorFlow.
    own = [error for error in errors if type(error).__name__ != "WorkerFailure"]
    died = runtime_error(
        f"{failure.what[0].upper()}{failure.what[1:]}.",
        "Expected all workers to come to the end of the function.",
        "See its output; SIGKILL may mean that memory ran out.",
        last_line=failure.lines[-1] if failure.lines else None,
    )
    return (own or errors or [died])[0] if "SIGKILL" not in failure.what or own else died
