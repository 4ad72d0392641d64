"""Turns TensorFlow's errors about another worker into a sentence that names it.

A worker that fails says why to TensorFlow's coordination service, which ends the exchanges that the
others wait in. One that is killed says nothing: the service misses its heartbeats.
"""

import atexit
import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.checks import problem
from keras_multigpu.cluster import apart, environment
from keras_multigpu.cluster.environment import name_of, settings
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

ENDED = "keras_multigpu/ended"
"""The key under which each worker publishes that its script has ended."""

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

HAS_FAILED = re.compile(r"^worker \d+ \(\S+\) (failed: |is gone)")

SERVER = re.compile(r"/job:ps/(?:replica:\d+/)?task:(\d+)")

TASK = re.compile(r"/job:worker/(?:replica:\d+/)?task:(\d+)")


class WorkerFailure(RuntimeError):
    """Another worker has failed, and this one cannot continue without it."""


def print_briefly(kind: type[BaseException], error: BaseException, place: Any) -> None:
    """Show an uncaught error; without its place if all of it has happened to another worker."""
    if isinstance(error, WorkerFailure) and HAS_FAILED.search(str(error)):
        print(f"{kind.__module__}.{kind.__name__}: {error}", file=sys.stderr)  # noqa: T201
    else:
        sys.__excepthook__(kind, error, place)


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
            report_failure(OTHER_EXCHANGES)
        elif not isinstance(error, GONE):
            report_failure(f"{name_of(workers, index)} failed: {describe_exception(error)}")
            raise
        raise WorkerFailure(describe_error(str(error), workers, index)) from error


@contextlib.contextmanager
def naming_others(workers: Sequence[str], index: int) -> Iterator[None]:
    """Replace TensorFlow's error about another worker by a sentence that names it."""
    try:
        yield
    except GONE as error:
        raise WorkerFailure(describe_error(str(error), workers, index)) from error


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


def report_failure(what: str) -> None:
    """Let TensorFlow's exchanges fail with this sentence, here and soon on all workers."""
    # If the cluster has failed already nothing is left to report.
    with contextlib.suppress(tf.errors.OpError):
        # `MARKED` finds the sentence among TensorFlow's own words.
        cluster_internals.report_error(f"keras_multigpu: {what} :keras_multigpu")


def describe_exception(error: BaseException) -> str:
    """An error's class and message; a `KeyboardInterrupt` has no message."""
    return ": ".join(filter(None, [type(error).__name__, str(error)]))[:2000]


def report_at_exit(workers: Sequence[str], index: int) -> None:
    """When Python ends, tell the others so, or which error ends it."""
    process = os.getpid()

    def at_exit() -> None:
        # A forked process may end while its parent continues.
        if os.getpid() != process:
            return
        # Python keeps uncaught errors here.
        if error := getattr(sys, "last_value", None):
            report_failure(f"{name_of(workers, index)} failed: {describe_exception(error)}")
        else:
            publish(ENDED, index)
            apart.warn_if_unused(len(workers), index)

    atexit.register(at_exit)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = print_briefly


def describe_error(error: str, workers: Sequence[str], index: int) -> str:
    """What TensorFlow's error on worker `index` says about another worker."""
    found = MARKED.search(error)
    others = [int(task) for task in TASK.findall(error) if int(task) != index]
    if found is not None:
        what = found.group(1)
    elif MIXED_UP.search(error):
        what = OTHER_EXCHANGES
    elif HEARTBEAT in error:
        # A frozen chief must not be asked anything: it would never answer.
        what = f"{name_of(workers, 0)} is gone, or gave no sign of life"
    elif "timed out" in error or "Deadline" in error:
        late = find_missing(len(workers), index)
        who = [name_of(workers, each) for each in late] or ["A worker"]
        seconds = settings().exchange_timeout
        what = f"{' and '.join(who)} did not come to an exchange within {seconds} seconds"
    # The chief takes what it has published with it.
    elif others and others[0] and has_published(ENDED, others[0], 1):
        what = f"{name_of(workers, others[0])} has come to the end of its script"
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


def find_missing(workers: int, index: int) -> list[int]:
    """The workers that did not come to the exchange in which worker `index` has waited in vain.

    Empty if the chief cannot be asked.
    """
    publish(WAITED, index)
    others = [each for each in range(workers) if each != index]
    return [each for each in others if not has_published(WAITED, each, SOON)]


def publish(what: str, index: int) -> None:
    """Let others know something about this worker, if the chief can be told."""
    with contextlib.suppress(tf.errors.OpError):
        cluster_internals.publish(f"{what}/{index}", "yes")


def has_published(what: str, worker: int, seconds: int) -> bool:
    try:
        cluster_internals.published(f"{what}/{worker}", seconds)
    except tf.errors.OpError:
        return False
    return True
