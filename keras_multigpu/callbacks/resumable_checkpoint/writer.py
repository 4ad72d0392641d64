"""Writes checkpoints while training goes on."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from keras_multigpu.callbacks.resumable_checkpoint.folder import CheckpointFolder
from keras_multigpu.callbacks.resumable_checkpoint.format import Encoded


class BackgroundWriter:
    """One thread that writes one checkpoint at a time."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._threads = ThreadPoolExecutor(1, "keras_multigpu checkpoint")
        self._under_way: Future[Path] | None = None

    def write(self, content: Encoded) -> None:
        """Begin to write; waits for the checkpoint before, so that at most one is in memory."""
        self.wait()
        self._under_way = self._threads.submit(self._folder.write, content)

    def raise_error(self) -> None:
        if self._under_way is not None and self._under_way.done():
            self.wait()

    def wait(self) -> None:
        """Wait until what was begun is written; raises what went wrong."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> Exception | None:
        """Wait, and end the thread; what went wrong, if anything did."""
        try:
            self.wait()
        except Exception as error:  # Whatever it is, the thread ends.
            return error
        finally:
            self._threads.shutdown()
        return None
