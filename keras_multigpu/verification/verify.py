"""`verify`: trains a model on one device and on N replicas, and compares after every step."""

from collections.abc import Callable, Sequence
from typing import Any

import keras

from keras_multigpu.checks import require_positive_integer, runtime_error, value_error
from keras_multigpu.verification import in_this_process
from keras_multigpu.verification.verification import Verification


def verify(
    build_model: Callable[[], keras.Model],
    data: Any,
    *,
    replicas: Sequence[int] | None = None,
    steps: int = 10,
) -> Verification:
    """Check that a model trains on N replicas as on one device, and print a table.

    Trains a few steps on one device and on N replicas, from the same weights and seeds and on the
    same batches, and compares all weights and optimizer variables after every step. They are equal
    whatever the model does, Dropout included. If they differ, the table names the first weight that
    did, and the step: please report a bug.

    The replicas are GPUs if there are enough, otherwise logical CPU devices. A CPU can be split
    only before TensorFlow's first operation: call `verify` first, or use the command.

    Args:
        build_model: Returns a new, compiled model at each call.
        data: Arrays `(x, y)` or `(x, y, sample_weight)`, in batches of 32; a batched dataset,
            or anything else that `fit` takes as `x`; or a function that returns either.
        replicas: The numbers of replicas to compare with one device. By default two GPUs and all
            of them, or 2 and 4 on a machine with fewer than two, if there are as many devices.
        steps: How many batches to train on; shorter data is repeated. Include the last batch of an
            epoch if it is smaller than the others.

    Returns:
        A `Verification`: `agrees`, one of `reports` for each number of replicas, and the table as
        its `text`.

    Raises:
        ValueError: If an argument makes no sense, or the model fails on one device already.
        RuntimeError: If TensorFlow has started with too few devices.

    Example:

    ```python
    def build_model():
        model = keras.Sequential([keras.Input((28, 28)), keras.layers.Flatten(), ...])
        model.compile("adam", "sparse_categorical_crossentropy")
        return model

    assert kmg.verify(build_model, (images, labels)).agrees
    ```
    """
    if not callable(build_model) or isinstance(build_model, keras.Model):
        raise value_error(
            "`build_model` is not a function.",
            "Expected a function without arguments that returns a new compiled model.",
            "Put the lines that build and compile the model into a function.",
            build_model=build_model,
        )
    if replicas is None:
        replicas = in_this_process.usual_replicas()
    counts = list(replicas) if isinstance(replicas, Sequence) else []
    if not counts or not all(type(count) is int and count > 1 for count in counts):
        raise value_error(
            "`replicas` is not a list of numbers of replicas.",
            "Expected integers of at least 2.",
            replicas=replicas,
        )
    require_positive_integer("steps", steps)
    if not in_this_process.devices_are_ready(max(counts)):
        raise runtime_error(
            "TensorFlow has started with fewer devices than replicas are compared.",
            "Expected `verify` before the first model, tensor or dataset.",
            "Restart Python (in a notebook: the kernel) and call it first, or without GPUs "
            f"`kmg.strategy(devices={max(counts)})`; or put both functions into a file, and run "
            "`keras-multigpu verify my_model:build_model --data my_model:load`.",
            replicas=replicas,
        )
    result = in_this_process.run(build_model, data, counts, steps)
    # Printing the table is what the function is for.
    print(result.text)  # noqa: T201
    return result
