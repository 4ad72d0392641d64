"""Only one thread at a time may change a model; a second one gets an error, not wrong numbers."""

import contextlib
import threading
from collections.abc import Iterator

import keras

from keras_multigpu.checks import runtime_error


@contextlib.contextmanager
def alone(model: keras.Model, method: str) -> Iterator[None]:
    """Raise a `RuntimeError` where another thread trains or evaluates the model meanwhile.

    In one thread a callback may evaluate the model that is trained.
    """
    mine = threading.current_thread(), method
    # Not an attribute for Keras to track or save.
    holder, running = model.__dict__.setdefault("_changed_by", mine)
    if holder is not mine[0]:
        raise runtime_error(
            f"`{method}` was called while another thread is in `{running}` of the same model.",
            "Expected one thread at a time: both would change its metrics, and mix them up.",
            "Wait for the other thread, or give each one a model: `copy.deepcopy(model)`. "
            "`kmg.train_separately` trains several at once.",
            thread=mine[0].name,
            other=holder.name,
        )
    try:
        yield
    finally:
        if model.__dict__.get("_changed_by") is mine:
            del model.__dict__["_changed_by"]
