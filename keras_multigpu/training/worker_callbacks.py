"""Which callbacks each of several workers runs: one writes, all steer.

Logs and weights are the same on all workers, so callbacks that steer by them (`EarlyStopping`,
`ReduceLROnPlateau`) decide alike everywhere. Files are written by the chief alone.
"""

from typing import Any

import keras

from keras_multigpu.checks import problem
from keras_multigpu.training.replica_group import ReplicaGroup

ONLY_WRITE = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""What the chief alone runs."""


def of_this_worker(callbacks: Any, group: ReplicaGroup) -> Any:
    """The callbacks that this process runs.

    Raises:
        ValueError: If one of them cannot work on several workers.
    """
    if not group.is_spread or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    flat = [callback for callback in keras.tree.flatten(callbacks or []) if callback is not None]
    for callback in flat:
        refuse_where_spread(callback)
    return flat if group.is_chief else [each for each in flat if not isinstance(each, ONLY_WRITE)]


def refuse_where_spread(callback: keras.callbacks.Callback) -> None:
    """Raise a `ValueError` for a callback that only knows the replicas of one process."""
    backup = isinstance(callback, keras.callbacks.BackupAndRestore)
    ours = type(callback).__module__.startswith("keras_multigpu.")
    if backup or (ours and not getattr(callback, "on_several_workers", False)):
        raise ValueError(
            problem(
                f"{type(callback).__name__} does not work on several workers yet.",
                "Expected callbacks that steer by the logs, which are the same on all workers, or "
                "that only write, which the chief does for all.",
                "Leave it out, or train in one process.",
                callback=type(callback).__name__,
            )
        )
