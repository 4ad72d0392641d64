"""Writes the values of replicas for TensorBoard: a run for each replica, so that curves overlay."""

import importlib.util
from pathlib import Path
from typing import Any

import tensorflow as tf

from keras_multigpu.callbacks.timing.replica_window import Window
from keras_multigpu.checks import problem
from keras_multigpu.writing import require_writable_folder


class ReplicaEvents:
    """Event files below a folder."""

    def __init__(self, log_dir: str | Path) -> None:
        self.log_dir = Path(log_dir)
        self._writers: dict[str, Any] = {}
        require_tensorboard()
        require_writable_folder(self.log_dir)

    def add(self, window: Window, step: int) -> None:
        """Write the values of a window.

        Args:
            step: How many steps were done in all epochs.
        """
        for index, row in enumerate(window.rows):
            numbers = {name: row[name] for name in window.values}
            self._write(f"replica_{window.place.first + index}", numbers, step)
        # Under the same tags: one chart shows all replicas and how far they are apart.
        extremes = window.extremes
        for kind in ("min", "max", "spread"):
            numbers = {name: found[kind] for name, found in extremes.items()}
            self._write(f"worker_{window.place.worker}_{kind}", numbers, step)

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers = {}

    def _write(self, run: str, numbers: dict[str, Any], step: int) -> None:
        if run not in self._writers:
            self._writers[run] = tf.summary.create_file_writer(str(self.log_dir / run))
        with self._writers[run].as_default(step):
            for name, number in numbers.items():
                if number is not None:
                    tf.summary.scalar(f"replicas/{name}", number)
        self._writers[run].flush()


def require_tensorboard() -> None:
    """Raise an `ImportError` where the package is missing that knows the format."""
    if importlib.util.find_spec("tensorboard") is None:
        raise ImportError(
            problem(
                "The package tensorboard is not installed.",
                "Expected it for `log_dir`; the rest of keras_multigpu does without.",
                "Run `pip install tensorboard`.",
                package="tensorboard",
            )
        )
