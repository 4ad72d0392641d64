"""`train_separately`: independent models in parallel, one on each device."""

import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_multigpu.checks import value_error
from keras_multigpu.processes import functions
from keras_multigpu.processes.groups import POLL, Groups, Interrupts
from keras_multigpu.separately.jobs import Job, JobResult
from keras_multigpu.separately.slots import Slot, slots
from keras_multigpu.writing import say


def train_separately(
    jobs: Sequence[Callable[[], Any] | str | Path | Sequence[Any]],
    *,
    devices: Sequence[str] | int | None = None,
) -> list[JobResult]:
    """Train several independent models in parallel, one on each device.

    For an ensemble, a sweep or the folds of a cross-validation. Each job runs in its own process,
    which sees one GPU or, on a machine without any, has some of the CPU's cores to itself. If there
    are more jobs than devices, the rest wait. A job that fails does not affect the others. Ctrl-C
    ends all jobs.

    Args:
        jobs: Functions without arguments, such as `functools.partial(train, fold=3)`, paths of
            scripts, or lists of a path and its arguments, such as `["train.py", "--fold", "3"]`. A
            function is imported by name: define it at the top level of a file, and guard what the
            file runs with `if __name__ == "__main__":`.
        devices: Names such as `["GPU:0", "GPU:2"]`, or how many: GPUs, or parts of the CPU on a
            machine without a GPU. `None` means all GPUs, or all cores.

    Returns:
        A `JobResult` for each job, in order. `result.value` is what the function returned: anything
        that `pickle` can save, such as a model or a `History`. It raises what the function raised;
        `result.error` holds that without raising.

    Raises:
        ValueError: If an argument makes no sense.

    Example:

    ```python
    results = kmg.train_separately([functools.partial(train, fold=k) for k in range(5)])
    models = [result.value for result in results]
    ```
    """
    functions.refuse_while_importing("train_separately")
    if isinstance(jobs, str) or not isinstance(jobs, Sequence) or not jobs:
        raise value_error(
            "`jobs` is not a non-empty list.",
            "Expected a list of functions or scripts.",
            "Pass, for example, `[functools.partial(train, fold=k) for k in range(5)]`.",
            jobs=jobs,
        )
    places = slots(devices)
    with tempfile.TemporaryDirectory() as folder:
        queue = [Job(number, job, Path(folder)) for number, job in enumerate(jobs, 1)]
        run(queue, places)
        # Only now, because a model in this process takes memory on a GPU that a job may use.
        return [job.result() for job in queue]


def run(jobs: Sequence[Job], places: Sequence[Slot]) -> None:
    waiting, running, free = list(jobs), list[Job](), list(places)
    with Interrupts([signal.SIGINT]) as interrupts, Groups() as groups:
        while (waiting or running) and interrupts.first is None:
            while waiting and free:
                running.append(waiting.pop(0))
                running[-1].start(groups, free.pop(0))
                say_of(running[-1], len(jobs), "started")
            for job in [job for job in running if job.exit_code() is not None]:
                running.remove(job)
                assert job.slot is not None
                free.append(job.slot)
                report_end(job, len(jobs))
            time.sleep(POLL)
    if interrupts.first is not None:
        # After `Groups` has ended all processes.
        raise KeyboardInterrupt


def report_end(job: Job, count: int) -> None:
    """Say that a job has ended, with its traceback if it failed."""
    error = job.error()
    say_of(job, count, f"{'FAILED' if error else 'ended'} after {job.seconds:.1f} s")
    for text in [str(error), *error.__notes__] if error else []:
        for line in text.splitlines():
            say(f"    {line}")


def say_of(job: Job, count: int, what: str) -> None:
    assert job.slot is not None
    say(f"[{job.number}/{count}] {job.name} on {job.slot.name} {what}")
