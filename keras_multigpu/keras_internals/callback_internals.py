"""The door to what Keras's callbacks count under private names.

A callback that is made anew begins to count anew. To continue it in the middle of an
epoch its counters are needed, and Keras offers them nowhere else.
"""

from typing import Any

import keras

COUNTERS: dict[type, tuple[str, ...]] = {
    keras.callbacks.ModelCheckpoint: (
        "_batches_seen_since_last_saving",
        "_last_batch_seen",
        "_current_epoch",
    ),
    keras.callbacks.SwapEMAWeights: ("_ema_weights_in_model",),
    keras.callbacks.TensorBoard: ("_global_train_batch", "_global_test_batch"),
}
"""For each class of Keras the private attributes that it carries from batch to batch."""


def counters_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    return {name: vars(callback)[name] for name in names_of(callback) if name in vars(callback)}


def set_counters(callback: keras.callbacks.Callback, values: dict[str, Any]) -> None:
    """Set those counters that a callback has; other names are not set."""
    for name in names_of(callback):
        if name in values:
            setattr(callback, name, values[name])


def names_of(callback: keras.callbacks.Callback) -> list[str]:
    return [name for owner in COUNTERS if isinstance(callback, owner) for name in COUNTERS[owner]]


def knows_direction(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback that monitors a value has decided if more or less is better."""
    return getattr(callback, "monitor_op", None) is not None


def find_direction(callback: keras.callbacks.Callback) -> None:
    """Let it decide now."""
    # Keras does so at the end of an epoch. `ModelCheckpoint(save_freq=100)` compares with the best
    # value before that.
    if not knows_direction(callback) and hasattr(callback, "_set_monitor_op"):
        callback._set_monitor_op()
