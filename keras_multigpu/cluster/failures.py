"""Turns TensorFlow's errors about another worker into a sentence that names it.

A worker that fails says why on its line to the others, see `lifelines`, and to TensorFlow's
coordination service, which ends the exchanges that they wait in.
"""

import contextlib
import re
from collections.abc import Iterator, Sequence

import tensorflow as tf

from keras_multigpu.checks import problem
from keras_multigpu.cluster import environment, lifelines
from keras_multigpu.cluster.environment import settings
from keras_multigpu.cluster.lifelines import name_of
from keras_multigpu.keras_internals import cluster_internals

GONE = (
    tf.errors.UnavailableError,
    tf.errors.DeadlineExceededError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.InternalError,
)
"""The errors by which TensorFlow reports another worker's end."""

MARKED = re.compile(r"keras_multigpu: (.*?) :keras_multigpu", re.DOTALL)

WAITED = "keras_multigpu/waited"
"""The key under which each worker publishes that it has waited in vain."""

HEARTBEAT = "CoordinationService/Heartbeat"
"""The call that fails if the chief, which runs the coordination service, is frozen."""

SOON = 3
"""Seconds within which all workers that wait in vain give up."""

MIXED_UP = re.compile(r"Collective instance \d+ expected|Shape mismatch in the collective instance")
"""TensorFlow's messages when workers are in different exchanges."""

OTHER_EXCHANGES = (
    "The workers have come to different exchanges: one does something that others do not, for "
    "example in a callback that only it has"
)

SERVER = re.compile(r"/job:ps/(?:replica:\d+/)?task:(\d+)")

TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")


class WorkerFailure(RuntimeError):
    """Another worker has failed, and this one cannot continue without it."""


@contextlib.contextmanager
def ending_together(workers: Sequence[str], index: int) -> Iterator[None]:
    """Let a failure of one worker end all of them, each with a sentence that names it."""
    try:
        yield
    except WorkerFailure:
        raise
    except BaseException as error:
        if isinstance(error, tf.errors.OpError) and MIXED_UP.search(str(error)):
            # TensorFlow tells one worker only; the others would just see it end.
            lifelines.fail(OTHER_EXCHANGES)
        elif not isinstance(error, GONE):
            lifelines.fail(f"{name_of(workers, index)} failed: {lifelines.in_words(error)}")
            raise
        raise WorkerFailure(sentence(str(error), workers, index)) from error


@contextlib.contextmanager
def naming_others(workers: Sequence[str], index: int) -> Iterator[None]:
    """Replace TensorFlow's error about another worker by a sentence that names it."""
    try:
        yield
    except GONE as error:
        raise WorkerFailure(sentence(str(error), workers, index)) from error


@contextlib.contextmanager
def naming_servers() -> Iterator[None]:
    """Replace TensorFlow's error about a parameter server by a sentence that names it."""
    try:
        yield
    except GONE as error:
        found, config = SERVER.search(str(error)), environment.tf_config()
        servers = config.addresses.get("ps", ()) if config else ()
        if found is None or int(found[1]) >= len(servers):
            raise
        raise WorkerFailure(
            problem(
                f"Parameter server {found[1]} ({servers[int(found[1])]}) is gone.",
                "Expected it to hold its weights until training ends.",
                "Look at what it has printed last, then start all processes again: "
                "`kmg.callbacks.ResumableCheckpoint` resumes where they stopped.",
                servers=list(servers),
            )
        ) from error


def sentence(error: str, workers: Sequence[str], index: int) -> str:
    """What TensorFlow's error on worker `index` says about another worker."""
    found, ended = MARKED.search(error), lifelines.ended()
    others = [int(task) for task in TASK.findall(error) if int(task) != index]
    if found is not None:
        what = found.group(1)
    elif MIXED_UP.search(error):
        what = OTHER_EXCHANGES
    elif ended:
        what = f"{name_of(workers, ended[0])} has come to the end of its script"
    elif HEARTBEAT in error:
        # A frozen chief must not be asked anything: it would never answer.
        what = f"{name_of(workers, 0)} is gone, or gave no sign of life"
    elif "timed out" in error or "Deadline" in error:
        who = [name_of(workers, other) for other in missing(len(workers), index)] or ["A worker"]
        seconds = settings().exchange_timeout
        what = f"{' and '.join(who)} did not come to an exchange within {seconds} seconds"
    elif others:
        what = f"{name_of(workers, others[0])} is gone, or gave no sign of life"
    else:
        what = "Another worker, or the link to it, is gone"
    return problem(
        f"{what}.",
        "Expected all workers to continue together.",
        "Look at what that worker has printed last, then start all of them again: "
        "`kmg.callbacks.ResumableCheckpoint` resumes where they stopped.",
        worker=name_of(workers, index),
    )


def missing(workers: int, index: int) -> list[int]:
    """The workers that did not come to the exchange in which worker `index` has waited in vain.

    Empty if the chief cannot be asked.
    """

    def has_waited(worker: int) -> bool:
        try:
            cluster_internals.published(f"{WAITED}/{worker}", SOON)
        except (tf.errors.NotFoundError, tf.errors.DeadlineExceededError):
            return False
        return True

    try:
        cluster_internals.publish(f"{WAITED}/{index}", "in vain")
        return [each for each in range(workers) if each != index and not has_waited(each)]
    except tf.errors.OpError:
        return []
