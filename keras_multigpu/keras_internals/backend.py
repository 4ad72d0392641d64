"""Refuses every Keras backend but TensorFlow."""

import os
from typing import NoReturn

FIX = (
    "Set KERAS_BACKEND=tensorflow before Python starts, or "
    "`os.environ['KERAS_BACKEND'] = 'tensorflow'` before the first `import keras`. "
    "If it is not set, `~/.keras/keras.json` decides."
)


def require_tensorflow() -> None:
    """Raise a `RuntimeError` if Keras runs on another backend."""
    said = os.environ.get("KERAS_BACKEND")
    try:
        import keras
    except ModuleNotFoundError as error:
        # The backend is not installed.
        if error.name in (None, "keras", "tensorflow") or said == "tensorflow":
            raise
        refuse(f"Keras looks for {error.name!r}, which is not installed", said, error)
    if keras.config.backend() != "tensorflow":
        refuse(f"Keras runs on {keras.config.backend()!r}", said)


def refuse(what: str, said: str | None, cause: Exception | None = None) -> NoReturn:
    expected = "Expected TensorFlow, the backend that keras_multigpu trains on."
    raise RuntimeError(f"{what}. {expected} {FIX} Received: KERAS_BACKEND={said!r}") from cause
