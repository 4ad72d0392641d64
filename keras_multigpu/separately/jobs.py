"""A job: a function or a script that runs in its own process, and its result."""

import functools
import os
import pickle
import signal
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from keras_multigpu.checks import runtime_error, shorten, value_error
from keras_multigpu.processes import functions, new_process
from keras_multigpu.processes.groups import Group, Groups
from keras_multigpu.separately.slots import Slot

# The number of lines kept of what a job prints.
LAST_LINES = 1000

WHY = "each job runs in one of its own"


class JobResult:
    """The result of one job of `train_separately`.

    Attributes:
        name: The function's name and arguments, or the script's command line.
        device: Where it ran, such as `"GPU:1"`.
        seconds: How long it ran.
        output: The last 1000 lines that it printed.
        error: The exception, with its process's traceback as a note; None if it succeeded.
    """

    def __init__(
        self, name: str, device: str, seconds: float, output: str, value: Any, error: Any
    ) -> None:
        self.name = name
        self.device = device
        self.seconds = seconds
        self.output = output
        self.error: Exception | None = error
        self._value = value

    @property
    def value(self) -> Any:
        """What the function returned, None for a script. Raises `error` if there is one."""
        if self.error is not None:
            raise self.error
        return self._value

    def __repr__(self) -> str:
        ended = "failed" if self.error else "ended"
        return f"<JobResult {self.name} {ended} on {self.device} after {self.seconds:.1f} s>"


class Job:
    """A job; numbers start at 1, and `folder` is for the function and its result."""

    def __init__(self, number: int, job: Any, folder: Path) -> None:
        self.number = number
        self.lines: deque[str] = deque(maxlen=LAST_LINES)
        self.slot: Slot | None = None
        self._began = self._ended = 0.0
        self._group: Group | None = None
        self._reply: Path | None = None
        if callable(job):
            self.name = call_name(job)
            question, self._reply = folder / f"question{number}", folder / f"reply{number}"
            function = functions.pickle_function(f"jobs[{number - 1}]", job, WHY)
            question.write_bytes(functions.request(function=function))
            self._command = new_process.code(functions.CALL, str(question), str(self._reply))
        else:
            words = script_words(number, job)
            self.name = " ".join(words)
            self._command = new_process.script(*words)

    def start(self, groups: Groups, slot: Slot) -> None:
        self.slot = slot
        # Each line arrives when it is printed, and not when Python's buffer is full.
        variables = slot.variables | {"PYTHONUNBUFFERED": "1"}
        self._began = time.monotonic()
        environment = new_process.environment(**variables)
        self._group = groups.start(self._command, environment, self.lines.append, slot.cores)

    @property
    def seconds(self) -> float:
        return (self._ended or time.monotonic()) - self._began

    def exit_code(self) -> int | None:
        """The exit code; None while the job runs."""
        assert self._group is not None
        code = self._group.exit_code()
        if code is not None and not self._ended:
            self._ended = time.monotonic()
        return code

    def error(self) -> Exception | None:
        code = self.exit_code()
        if code != 0:
            return death_error(self.name, code or 0, self.lines)
        return self._answer()[1]

    def result(self) -> JobResult:
        assert self.slot is not None
        value, error = None, self.error()
        if error is None:
            try:
                value = functions.result_from(self._answer()[0])
            except Exception as reason:  # A class may be missing here, or a model fail to build.
                error = functions.transportable(reason)
        output = "\n".join(self.lines)
        return JobResult(self.name, self.slot.name, self.seconds, output, value, error)

    def _answer(self) -> tuple[bytes, Exception | None]:
        """What the job returned, pickled, and the exception it raised."""
        if self._reply is None:
            return pickle.dumps(None), None
        return functions.result_from(self._reply.read_bytes())


def call_name(function: Callable[..., Any]) -> str:
    """`train(0, rate=0.1)` for a partial function, `train` for others."""
    if not isinstance(function, functools.partial):
        return getattr(function, "__qualname__", type(function).__qualname__)

    def word(value: object) -> str:
        plain = isinstance(value, bool | int | float | str | tuple | Path)
        return shorten(value, 40) if plain else "..."

    words = [word(value) for value in function.args]
    words += [f"{name}={word(value)}" for name, value in function.keywords.items()]
    return f"{call_name(function.func)}({', '.join(words)})"


def script_words(number: int, job: Any) -> list[str]:
    is_list = isinstance(job, Sequence) and not isinstance(job, str | bytes)
    words = list(job) if is_list else [job]
    if not words or not all(isinstance(word, str | os.PathLike | int | float) for word in words):
        raise job_error(number, job, "is neither a function nor a script")
    texts = [str(word) for word in words]
    if not os.path.isfile(texts[0]):
        raise job_error(number, job, "is a script that does not exist")
    return texts


def job_error(number: int, job: object, what: str) -> ValueError:
    return value_error(
        f"`jobs[{number - 1}]` {what}.",
        "Expected a function without arguments, the path of a script, or a list of a path and "
        "arguments.",
        "Pass, for example, `functools.partial(train, fold=3)` or `['train.py', '--fold=3']`.",
        job=job,
    )


def death_error(name: str, code: int, lines: Sequence[str]) -> RuntimeError:
    """The error for a process that ended without an answer."""
    how = f"exit code {code}" if code > 0 else f"signal {signal.Signals(-code).name}"
    error = runtime_error(
        f"The process of {name} ended with {how}.",
        "Expected it to finish.",
        "See its output below; SIGKILL may mean that memory ran out.",
        exit_code=code,
    )
    error.add_note("\n".join(list(lines)[-30:]))
    return error
