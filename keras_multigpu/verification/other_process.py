"""Runs a comparison in a fresh process, where TensorFlow has not started yet."""

import functools
import pickle
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_multigpu.checks import runtime_error
from keras_multigpu.processes import functions, new_process
from keras_multigpu.verification import in_this_process
from keras_multigpu.verification.batches import batch_of_arrays, first_batches, to_arrays
from keras_multigpu.verification.verification import Verification

WHY = (
    "TensorFlow has already started in this one, with too few devices (to avoid that, restart "
    "Python and call `verify` first)"
)


def run(
    build_model: Callable[[], Any], data: Any, replicas: Sequence[int], steps: int
) -> Verification:
    """Compare in a new process, on logical CPU devices."""
    own = callable(data)
    request = functions.request(
        precision=(keras.config.floatx(), keras.config.dtype_policy().name),
        build_model=functions.pickle_function("build_model", build_model, WHY),
        data=functions.pickle_function("data", data, WHY) if own else None,
        batches=None if own else [to_arrays(batch) for batch in first_batches(data, steps)],
        replicas=tuple(replicas),
        steps=steps,
    )
    result = ask(request)
    if isinstance(result, BaseException):
        raise result
    return result


def ask(request: bytes) -> Any:
    """Return what `answer` returns in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        question, reply = Path(folder, "question"), Path(folder, "reply")
        question.write_bytes(request)
        # Not `multiprocessing`: a fork would inherit TensorFlow's locks, and spawn would run the
        # user's script again.
        ended = subprocess.run(
            new_process.command(__name__, str(question), str(reply)),
            env=new_process.environment(),
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if reply.exists():
            return pickle.loads(reply.read_bytes())
    raise runtime_error(
        "The process that compares the models has died.",
        "Expected it to finish.",
        "See its output below; it may have run out of memory.",
        exit_code=ended.returncode,
        wrote=ended.stderr[-2000:],
    )


def answer(request: dict[str, Any]) -> Verification | BaseException:
    """Run the comparison in the other process; return its result or its exception."""
    floatx, policy = request["precision"]
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(policy)
    # First, because importing the user's functions may start TensorFlow.
    in_this_process.devices_are_ready(max(request["replicas"]))
    try:
        build_model = functions.function_from(request["build_model"], request["script"])
        if request["batches"] is None:
            data = functions.function_from(request["data"], request["script"])
        else:
            data = functools.partial(iter, list(map(batch_of_arrays, request["batches"])))
        return in_this_process.run(build_model, data, request["replicas"], request["steps"])
    except Exception as error:
        return functions.transportable(error)


if __name__ == "__main__":
    functions.answer_request(answer)
