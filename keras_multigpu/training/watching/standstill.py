"""Says where training stands still: once, on standard error, and goes on waiting.

A thread looks once a second at what `fit` counts anyway. Where `fit` waits is told by the functions
that it is in, and inside a step by `Progress`. Workers that stand still tell each other.
"""

import contextlib
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import tensorflow as tf

from keras_multigpu.cluster.environment import name_of
from keras_multigpu.keras_internals import cluster_internals
from keras_multigpu.training.watching.whereabouts import whereabouts
from keras_multigpu.writing import time_text

POLL = 1.0
LEAST = 60.0
"""No shorter wait counts, in seconds."""

USUAL = 20
"""Nor one shorter than this many usual steps."""

FIRST = 600.0
"""Before there are usual steps, one may trace a large model."""

IN_HOOKS = 5
"""A callback may take this many times as long: it may save a checkpoint."""

KNOWN = 3
"""How many steps tell how long one usually takes."""

ANSWER = 10
"""How many seconds another worker may take to say where it is."""

DATA, STEP, TRACING = "waits for data", "is in a step", "traces a step"
OTHERS, ELSEWHERE = "waits for the other workers", "is between two steps"
IN_STEP = "the replicas compute, or wait for each other's sums"


class Standstill:
    """Watches one `fit` from another thread.

    Args:
        counts: What changes as long as training goes on; the first is the number of calls of a
            step.
        place: Says how far training is.
        workers: The addresses of all workers, if there are several.
        worker: The number of this one.
    """

    def __init__(
        self,
        counts: Callable[[], Sequence[Any]],
        place: Callable[[], str],
        workers: Sequence[str] = (),
        worker: int = 0,
    ) -> None:
        self._counts, self._place = counts, place
        self._workers, self._worker = workers, worker
        self._thread = threading.get_ident()
        self._over = threading.Event()
        self._times: deque[float] = deque(maxlen=100)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what this thread does in this context."""
        name = "keras_multigpu standstill"
        threading.Thread(target=self._watch, name=name, daemon=True).start()
        try:
            yield
        finally:
            self._over.set()

    def _watch(self) -> None:
        before, since, told, said, over = self._counts(), time.monotonic(), False, False, False
        while not over:
            over = self._over.wait(POLL)
            now, counts = time.monotonic(), self._counts()
            waited = now - since
            if counts != before:
                if said:
                    say(f"Training goes on, after {time_text(waited)}.")
                elif steps := counts[0] - before[0]:
                    self._times.extend([waited / steps] * steps)
                if told:
                    with contextlib.suppress(tf.errors.OpError):
                        cluster_internals.take_back(self._key(self._worker))
                before, since, told, said = counts, now, False, False
            elif not (said or over) and waited >= self._limit:
                where, may_last = where_is(stack_of(self._thread))
                if waited >= self._limit * (IN_HOOKS if may_last else 1):
                    said = True
                    self._report(where, waited)
                if self._workers and not told:
                    told = True
                    text = f"{where} ({self._place()})"
                    with contextlib.suppress(tf.errors.OpError):
                        cluster_internals.publish(self._key(self._worker), text)
                if self._workers and said:
                    # After this worker's own words: if the chief is frozen, it never answers.
                    self._report_others()

    @property
    def _limit(self) -> float:
        if len(self._times) < KNOWN:
            return FIRST
        return max(LEAST, USUAL * statistics.median(self._times))

    @staticmethod
    def _key(worker: int) -> str:
        return f"keras_multigpu/stands/{worker}"

    def _report(self, where: str, waited: float) -> None:
        usual = ""
        if len(self._times) >= KNOWN:
            usual = f"; a step usually takes {time_text(statistics.median(self._times))}"
        who = name_of(self._workers, self._worker) if self._workers else "this process"
        say(
            f"Training stands still, for {time_text(waited)} so far{usual}. {who.capitalize()} "
            f"{where} ({self._place()}). It goes on waiting. What its threads do:\n"
            + "\n".join(threads(self._thread))
        )

    def _report_others(self) -> None:
        for worker in range(len(self._workers)):
            if worker != self._worker:
                try:
                    found = cluster_internals.published(self._key(worker), ANSWER)
                except tf.errors.OpError:
                    found = "says nothing: it goes on, or is frozen, or its machine is"
                say(f"{name_of(self._workers, worker).capitalize()} {found}.")


def say(text: str) -> None:
    # Not through the log, whose lock a thread may hold that is stuck.
    sys.stderr.write(f"\nkeras_multigpu: {text}\n")
    sys.stderr.flush()


def stack_of(thread: int) -> list[FrameType]:
    """The frames of a thread, the outermost first."""
    frame, found = sys._current_frames().get(thread), list[FrameType]()
    while frame is not None:
        found.insert(0, frame)
        frame = frame.f_back
    return found


def where_is(stack: Sequence[FrameType]) -> tuple[str, bool]:
    """What a thread in `fit` waits for, and whether that is a callback's."""
    files = [frame.f_code.co_filename for frame in stack]
    names = [frame.f_code.co_name for frame in stack]

    def is_in(file: str, *functions: str) -> int:
        """The place of the first frame of these functions, or of any there; 0 if none is."""
        for place, pair in enumerate(zip(files, names, strict=True)):
            if file in pair[0] and (pair[1] in functions or not functions):
                return place
        return 0

    if is_in("training/replica_group.py", "exchange_numbers"):
        return OTHERS, False
    if stack and names[-1] in ("_numpy", "numpy") and "tensorflow" in files[-1]:
        return f"waits for a value of the last steps: {IN_STEP}", False
    hook = is_in("callbacks/callback_list.py", *HOOKS) or is_in("training/run.py", "call_after")
    between = ("callback_list.py", "training/run.py")
    inside = [f for f in stack[hook + 1 :] if not f.f_code.co_filename.endswith(between)]
    if hook and inside:
        code, owner = inside[0].f_code, inside[0].f_locals.get("self")
        # Keras calls the functions of a `LambdaCallback` directly.
        name = "" if owner is None else f"{type(owner).__name__}."
        return f"is in a callback: {name}{code.co_name}", True
    if is_in("keras_multigpu/training/feed/"):
        return DATA, False
    if is_in("training/steps/passes.py") or is_in("training/steps/steps_of_model.py", "graph"):
        return TRACING, True
    for frame in stack:
        if frame.f_code.co_qualname == "MadeStep.__call__":
            where = ""
            # Whatever cannot be named, the rest of the report must be written.
            with contextlib.suppress(Exception):
                where = whereabouts(frame.f_locals["self"].runner)
            return f"{STEP}: {where or IN_STEP}", False
    return ELSEWHERE, True


HOOKS = [
    f"{start}on_{kind}_{end}"
    for start in ("", "_")
    for kind in ("train", "test", "predict", "epoch", "batch", "train_batch", "test_batch")
    for end in ("begin", "end")
]


def threads(first: int) -> list[str]:
    """What all threads of this process do, one of them first."""
    names = {each.ident: each.name for each in threading.enumerate()}
    frames = sys._current_frames()
    found = []
    for thread in sorted(frames, key=lambda each: (each != first, each)):
        if thread != threading.get_ident():
            stack = "".join(traceback.format_stack(frames[thread]))
            found.append(f"Thread {names.get(thread, thread)}:\n{stack}")
    return found
