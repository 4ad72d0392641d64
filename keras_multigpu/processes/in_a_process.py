"""What the process of a function runs; its value or error goes into a file.

python -m keras_multigpu.processes.in_a_process QUESTION REPLY

A worker is started by `AS_WORKER` instead: with `-m` this package joins no cluster.
"""

import sys
import traceback
from typing import Any

from keras_multigpu.checks import value_error
from keras_multigpu.processes import functions


def answer(request: dict[str, Any]) -> tuple[bytes, Exception | None]:
    """What the function returns, pickled, and what it raises."""
    try:
        value = functions.function_from(request["function"], request["script"])()
        try:
            # The value by itself: one that cannot be read is an error of this job, and not of all.
            return functions.dumped(value, request.get("by_value", False)), None
        except Exception as error:  # Any class may do anything here.
            raise value_error(
                f"What the function returned cannot be pickled: {error}.",
                "Expected a model, a history, arrays, or anything else that `pickle` knows.",
                "Return less, or write it to a file and return the path.",
                returned=type(value),
            ) from error
    except Exception as error:
        # So that it appears where it happened, in what the job prints.
        traceback.print_exc()
        return b"", functions.transportable(error)


def answer_as_worker() -> None:
    """Answer, and fail if the function has: what starts workers sees only how each ends."""
    _, error = functions.answered(answer)
    sys.exit(error is not None)


AS_WORKER = f"from {__name__} import answer_as_worker as answer; answer()"

if __name__ == "__main__":
    functions.answered(answer)
