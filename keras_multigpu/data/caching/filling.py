"""Reads many examples once, in parallel, and shows the progress."""

import logging
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import keras
import numpy as np

from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.loader import CORES
from keras_multigpu.data.pipeline.source import Source
from keras_multigpu.writing import size_text

PIECE_BYTES = 4 * 2**20
PIECE_EXAMPLES = 256
# Nothing is shown for less than this.
QUIET_SECONDS = 1.0

logger = logging.getLogger("keras_multigpu")


def fill(source: Source, rows: np.ndarray, place: str, read: Callable[[int, int], None]) -> None:
    """Call `read(low, high)` from several threads until all of `rows` are read.

    A terminal shows a progress bar; the log gets a line at the beginning and at the end. What was
    read before an error or Ctrl-C is kept.
    """
    source.prepare()
    count, size = len(rows), size_of_one(source.spec)
    what = f"Caching {count:,} examples of {source.name} {place} ({size_text(count * size)})."
    # Large pieces would leave cores idle at the end, so there are at least four for each.
    step = max(1, min(PIECE_BYTES // max(size, 1), PIECE_EXAMPLES, -(-count // (4 * CORES))))
    start, done, shown = time.monotonic(), 0, False
    bar = keras.utils.Progbar(count, unit_name="example") if sys.stdout.isatty() else None
    # Not the pool that shares the work on a batch: a source may use that while it reads.
    pool = ThreadPoolExecutor(CORES, thread_name_prefix="keras_multigpu_cache")
    try:
        pieces = {
            pool.submit(read, low, min(low + step, count)): min(step, count - low)
            for low in range(0, count, step)
        }
        for piece in as_completed(pieces):
            piece.result()
            done += pieces[piece]
            if not shown and time.monotonic() - start > QUIET_SECONDS:
                shown = True
                logger.info("%s", what)
            if shown and bar is not None:
                bar.update(done)
    finally:
        pool.shutdown(cancel_futures=True)
    if shown:
        logger.info("Cached %s examples in %.0f s.", f"{count:,}", time.monotonic() - start)


def size_of_one(spec: Any) -> int:
    leaves = [leaf for leaf in keras.tree.flatten(spec) if leaf is not None]
    return sum(leaf.dtype.size * leaf.shape.num_elements() for leaf in leaves)


def empty(leaves: Sequence[Any], count: int) -> list[np.ndarray]:
    return [np.empty((count, *leaf.shape), leaf.dtype.as_numpy_dtype) for leaf in leaves]


def find_damaged(indices: np.ndarray, damaged: dict[int, str]) -> Damaged:
    """`(row, cause)` of each damaged example."""
    return [(row, damaged[index]) for row, index in enumerate(indices.tolist()) if index in damaged]
