"""The private counters of Keras's callbacks, which a resumed training has to restore."""

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
"""The private attributes that a class carries from batch to batch."""


def counters_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    return {name: vars(callback)[name] for name in names_of(callback) if name in vars(callback)}


def set_counters(callback: keras.callbacks.Callback, values: dict[str, Any]) -> None:
    """Set the counters of a callback, and ignore other names."""
    for name in names_of(callback):
        if name in values:
            setattr(callback, name, values[name])


def names_of(callback: keras.callbacks.Callback) -> list[str]:
    return [name for owner in COUNTERS if isinstance(callback, owner) for name in COUNTERS[owner]]


def knows_direction(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback that monitors a value knows if larger or smaller is better."""
    return getattr(callback, "monitor_op", None) is not None


def find_direction(callback: keras.callbacks.Callback) -> None:
    """Let a callback find out now whether larger or smaller is better."""
    # Keras waits for the end of an epoch, but `ModelCheckpoint(save_freq=100)` compares before it.
    if not knows_direction(callback) and hasattr(callback, "_set_monitor_op"):
        callback._set_monitor_op()
