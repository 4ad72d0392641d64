"""What the process of a job runs: the function, whose value or error goes into a file.

python -m keras_multigpu.separately.in_a_process QUESTION REPLY
"""

import pickle
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
            return pickle.dumps(value), None
        except Exception as error:  # Any class may do anything here.
            raise value_error(
                f"What the job returned cannot be pickled: {error}.",
                "Expected a model, a history, arrays, or anything else that `pickle` knows.",
                "Return less, or write it to a file and return the path.",
                returned=type(value),
            ) from error
    except Exception as error:
        # So that it appears where it happened, in what the job prints.
        traceback.print_exc()
        return b"", functions.transportable(error)


if __name__ == "__main__":
    functions.answered(answer)
