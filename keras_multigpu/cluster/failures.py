"""What happened to a worker, in a sentence, on every other one.

A worker that fails says so to the others by way of TensorFlow's coordination service, which ends
the exchanges that they wait in. One that dies or freezes is missed by the same service.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_multigpu.checks import problem
from keras_multigpu.cluster.settings import settings
from keras_multigpu.keras_internals import cluster_internals

GONE = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)
TOLD = re.compile(r"keras_multigpu: (.*?) :keras_multigpu", re.DOTALL)
TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")


class WorkerFailure(RuntimeError):
    """Another worker has failed, and this one cannot go on without it."""


@contextlib.contextmanager
def ending_together(workers: Sequence[str], index: int) -> Iterator[None]:
    """Let a failure of one worker end all of them, each with a sentence that names it.

    Args:
        workers: Their addresses.
        index: Which of them this process is.
    """
    try:
        yield
    except WorkerFailure:
        raise
    except GONE as error:
        raise WorkerFailure(sentence(str(error), workers, index)) from error
    except BaseException as error:
        what = f"{type(error).__name__}: {error}".strip()[:2000]
        # Where another worker was first, there is nothing left to tell.
        with contextlib.suppress(tf.errors.OpError):
            cluster_internals.report_error(
                f"keras_multigpu: {name_of(workers, index)} failed: {what} :keras_multigpu"
            )
        raise


def sentence(error: str, workers: Sequence[str], index: int) -> str:
    """What an error of TensorFlow's says about another worker.

    Args:
        workers: Their addresses.
        index: Which of them this process is.
    """
    told = TOLD.search(error)
    others = [int(task) for task in TASK.findall(error) if int(task) != index]
    if told is not None:
        what = told.group(1)
    elif "timed out" in error or "Deadline" in error:
        seconds = settings().exchange_timeout
        what = f"A worker did not come to an exchange within {seconds} seconds"
    elif others:
        what = f"{name_of(workers, others[0])} is gone, or gave no sign of life"
    else:
        what = "Another worker, or the link to it, is gone"
    return problem(
        f"{what}.",
        "Expected all workers to go on together.",
        "Look at what that worker has printed last, then start all of them again: "
        "`kmg.callbacks.ResumableCheckpoint` goes on where they were.",
        worker=name_of(workers, index),
    )


def name_of(workers: Sequence[str], index: int) -> str:
    """What messages call a worker."""
    return f"worker {index} ({workers[index]})"
