"""Reads many examples once, in parallel, and shows how far it is."""

import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import keras

from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.loader import CORES

PIECE_BYTES = 4 * 2**20
PIECE_EXAMPLES = 256
# What takes no longer than this is not worth a word.
QUIET_SECONDS = 1.0

_log = logging.getLogger("keras_multigpu")


class Piece(NamedTuple):
    """Examples `low` to `high` of all, as read; `(row, cause)` of damaged ones, from `low` on."""

    low: int
    high: int
    damaged: Damaged


def in_pieces(
    read: Callable[[int, int], Damaged], count: int, example_bytes: int
) -> Generator[Piece, None, None]:
    """Call `read(low, high)` from several threads for consecutive ranges, up to `count`.

    A few ranges are read ahead of the one that is yielded. To `close` the iterator is to wait until
    the threads have ended.
    """
    # Pieces that are too large leave cores idle at the end, so there are four for each.
    size = min(PIECE_BYTES // max(example_bytes, 1), PIECE_EXAMPLES, -(-count // (4 * CORES)))
    size = max(size, 1)
    waiting: deque[tuple[int, int, Future[Damaged]]] = deque()
    # Not the threads that share the work on a batch: a source may use those while it reads.
    pool = ThreadPoolExecutor(CORES, thread_name_prefix="keras_multigpu_cache")
    try:
        for low in range(0, count, size):
            high = min(low + size, count)
            waiting.append((low, high, pool.submit(read, low, high)))
            if len(waiting) > 2 * CORES:
                yield finished(*waiting.popleft())
        while waiting:
            yield finished(*waiting.popleft())
    finally:
        pool.shutdown(cancel_futures=True)


def finished(low: int, high: int, result: Future[Damaged]) -> Piece:
    return Piece(low, high, result.result())


def shown(pieces: Iterator[Piece], count: int, what: str) -> Iterator[Piece]:
    """The pieces; a bar grows on a terminal, elsewhere the log gets a line at begin and end."""
    start = time.monotonic()
    bar = keras.utils.Progbar(count, unit_name="example") if sys.stdout.isatty() else None
    said = False
    for piece in pieces:
        yield piece
        if not said and time.monotonic() - start > QUIET_SECONDS:
            said = True
            _log.info("%s", what)
        if said and bar is not None:
            bar.update(piece.high)
    if said:
        _log.info("Cached %s examples in %.0f s.", f"{count:,}", time.monotonic() - start)


def size_of_one(leaves: Sequence[Any]) -> int:
    return sum(leaf.dtype.size * leaf.shape.num_elements() for leaf in leaves)
