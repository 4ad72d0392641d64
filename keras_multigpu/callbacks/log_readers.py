"""Callbacks that read the logs have to stand behind those that add to them."""

from collections.abc import Collection
from collections.abc import Sequence

import keras

from keras_multigpu.checks import value_error


def require_before_readers(
    callback: keras.callbacks.Callback,
    callbacks: Sequence[keras.callbacks.Callback],
    logged: Collection[str],
) -> None:
    """Raise a `ValueError` where a callback reads the logs before another has added to them."""
    name = type(callback).__name__
    for other in callbacks[: callbacks.index(callback)]:
        writes_all = isinstance(other, (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard))
        if writes_all or getattr(other, "monitor", None) in logged:
            raise value_error(
                f"{type(other).__name__} stands before {name} and would miss "
                f"{' and '.join(f'`{one}`' for one in logged)}.",
                f"Expected {name} before all callbacks that read the logs.",
                "Move it to the front of `callbacks`.",
                callbacks=[type(each).__name__ for each in callbacks],
            )
