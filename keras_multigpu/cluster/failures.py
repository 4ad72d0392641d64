"""What happened to a worker, in a sentence, on every other one.

A worker that fails says so on its line to the others, see `lifelines`, and to TensorFlow's
coordination service, which ends the exchanges that they wait in.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_multigpu.checks import problem
from keras_multigpu.cluster import lifelines
from keras_multigpu.cluster.lifelines import name_of
from keras_multigpu.cluster.settings import settings

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
        lifelines.fail(f"{name_of(workers, index)} failed: {what}")
        raise


def sentence(error: str, workers: Sequence[str], index: int) -> str:
    """What an error of TensorFlow's says about another worker.

    Args:
        workers: Their addresses.
        index: Which of them this process is.
    """
    found = TOLD.search(error)
    others = [int(task) for task in TASK.findall(error) if int(task) != index]
    if found is not None:
        what = found.group(1)
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
