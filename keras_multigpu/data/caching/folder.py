"""Decoded examples in a folder, shared by all processes of a host.

`where/key/` holds one `.npy` file for each leaf of the examples, in the order of the source,
and `sums.npy`, which has a checksum of each example that is there and zero for the others. They
are neither loaded nor mapped: processes share the system's pages. A process compares the checksum
of an example when it first reads it, and again after the files have changed. The key is a hash of
the source and its settings.

One process fills a cache and holds the lock `where/key.lock`, while others wait; the operating
system frees it when the process ends, however it ends. An example counts as being there only
after its bytes have reached the disk, so whoever comes next goes on where another was killed.
"""

import contextlib
import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.data.caching import files as cache_files
from keras_multigpu.data.caching import filling as cache_filling
from keras_multigpu.data.caching.memory import damaged_among
from keras_multigpu.data.caching.open_files import SUM, OpenFiles
from keras_multigpu.data.caching.rows import Rows, write_empty
from keras_multigpu.data.pipeline.damage import Damaged
from keras_multigpu.data.pipeline.source import Source, present
from keras_multigpu.writing import size_text

# Part of the key; to be raised when the files change their form.
VERSION = 2

FLUSH_SECONDS = 1.0
"""How much work may be lost when the process is killed."""

_log = logging.getLogger("keras_multigpu")


class FolderCache:
    """Decoded examples in a folder, where other sources may have theirs; the source is not held."""

    def __init__(self, source: Source, where: Path) -> None:
        self._leaves = present(source.spec)
        if any(leaf.dtype == tf.string for leaf in self._leaves):
            raise value_error(
                f"The examples of {source.name} hold texts.",
                "Expected numbers: a cache folder has the same room for each example.",
                'Pass cache="memory", or turn the texts into numbers before.',
                cache=str(where),
            )
        self._name = source.name
        self._count = int(source.num_examples)
        self._where = where
        self._folder: Path | None = None
        self._files: OpenFiles | None = None
        self._wanted = np.zeros(self._count, bool)
        self._damaged: dict[int, str] = {}
        self._lock = threading.Lock()
        self._mending = threading.Lock()

    def prepare(self, source: Source, rows: np.ndarray) -> None:
        with self._lock:
            self._wanted[rows] = True
            if self._folder is None:
                self._folder = self._where / key(source)
            if self._files is None and self._folder.exists():
                self._open(self._folder)
            missing = self._missing(rows)
            if not missing.size:
                return
            if self._files is None:
                self._require_disk(missing)
            with cache_files.locked(self._folder):
                self._fill(source, self._folder)

    def read(self, source: Source, out: Sequence[np.ndarray], indices: np.ndarray) -> Damaged:
        """Copy prepared examples, changed ones read anew; `(row, cause)` of each damaged one."""
        wrong = self._copy(out, indices)
        if wrong.size:
            with self._mending:
                # Another thread may have done it meanwhile.
                wrong = self._copy(out, indices)
                if wrong.size:
                    self._mend(source, wrong)
                    wrong = self._copy(out, indices)
        if wrong.size:
            raise self._untrusted(wrong)
        return damaged_among(indices, self._damaged)

    def _copy(self, out: Sequence[np.ndarray], indices: np.ndarray) -> np.ndarray:
        """Copy examples; those that are not what was written, where nobody has looked yet."""
        files = self._files
        assert files is not None
        checked = files.checked()
        try:
            for target, leaf in zip(out, files.leaves, strict=True):
                leaf.read(target, indices)
        except ValueError:
            return indices
        rows = np.flatnonzero(~checked[indices])
        if not rows.size:
            return rows
        fits = cache_files.sums_of([leaf[rows] for leaf in out]) == files.sums[indices[rows]]
        checked[indices[rows[fits]]] = True
        wrong = indices[rows[~fits]]
        return wrong[~np.isin(wrong, list(self._damaged))]

    def _mend(self, source: Source, rows: np.ndarray) -> None:
        """Forget examples whose bytes have changed since they were written, and read them anew."""
        assert self._files is not None
        assert self._folder is not None
        what = f"{len(rows)} examples" if len(rows) > 1 else "1 example"
        _log.warning("%s in the cache %s changed on the disk; read anew.", what, self._folder)
        rows = np.unique(rows)
        self._files.sums[rows] = 0
        try:
            with (
                cache_files.locked(self._folder),
                cache_files.Writer([self._folder / "sums.npy"]) as writer,
            ):
                writer.write(0, self._files.sums_file, rows, self._files.sums[rows])
        except OSError as error:
            raise self._untrusted(rows) from error
        self.prepare(source, rows)

    def _untrusted(self, rows: np.ndarray) -> ValueError:
        return value_error(
            "The cache holds other bytes than were written, and they cannot be replaced.",
            "Expected examples whose checksums fit.",
            "Check the disk, and remove the cache's folder: it is made anew.",
            cache=str(self._folder),
            examples=rows[:5].tolist(),
        )

    def _missing(self, rows: np.ndarray) -> np.ndarray:
        """Those of the examples that are not here, in order; other processes may add some."""
        rows = np.unique(rows)
        if self._files is not None:
            rows = rows[self._files.sums[rows] == 0]
        return rows[~np.isin(rows, list(self._damaged))] if self._damaged else rows

    def _open(self, folder: Path) -> str | None:
        """Open the files, if they are all there and whole; otherwise what is wrong."""
        try:
            leaves = [
                Rows(path, (self._count, *leaf.shape), dtype)
                for path, leaf, dtype in self._leaf_files(folder)
            ]
            files = OpenFiles(leaves, Rows(folder / "sums.npy", (self._count,), SUM), self._count)
            known = cache_files.read_about(folder, self._count)
        except (OSError, ValueError) as error:
            return str(error)
        self._files = files
        if not os.access(folder, os.W_OK):
            # Where they can be written they get another chance: they may have been repaired.
            self._damaged = {row: cause for row, cause in known.items() if not files.sums[row]}
        return None

    def _fill(self, source: Source, folder: Path) -> None:
        """Read the missing examples; this process holds the lock."""
        # Others may have written, or made it anew, while this process waited for the lock.
        wrong = self._open(folder) if folder.exists() else ""
        if wrong:
            _log.warning("The cache %s is not whole and is made anew: %s", folder, wrong)
        if wrong is not None:
            self._create(folder)
        missing = self._missing(np.flatnonzero(self._wanted))
        if not missing.size:
            return
        self._require_disk(missing)
        source.prepare()
        paths = [path for path, _, _ in self._leaf_files(folder)]
        with cache_files.Writer([*paths, folder / "sums.npy"]) as writer:
            self._read_all(source, missing, writer)

    def _read_all(self, source: Source, rows: np.ndarray, writer: cache_files.Writer) -> None:
        size = cache_filling.size_of_one(self._leaves)
        seeds = np.zeros((len(rows), 2), np.int32)
        sums = np.zeros(len(rows), SUM)
        files = self._files
        assert files is not None

        def read(low: int, high: int) -> Damaged:
            leaves = [
                np.empty((high - low, *leaf.shape), leaf.dtype.as_numpy_dtype)
                for leaf in self._leaves
            ]
            damaged = source.read(leaves, rows[low:high], seeds[low:high])
            sums[low:high] = cache_files.sums_of(leaves)
            for number, (leaf, file) in enumerate(zip(leaves, files.leaves, strict=True)):
                writer.write(number, file, rows[low:high], leaf)
            return damaged

        what = (
            f"Caching {len(rows):,} examples of {self._name} in {self._folder} "
            f"({size_text(len(rows) * size)})."
        )
        done = flushed = 0
        last = time.monotonic()
        with contextlib.closing(cache_filling.in_pieces(read, len(rows), size)) as pieces:
            try:
                for low, high, damaged in cache_filling.shown(pieces, len(rows), what):
                    self._damaged.update((int(rows[low + row]), cause) for row, cause in damaged)
                    done = high
                    if time.monotonic() - last > FLUSH_SECONDS:
                        self._flush(rows[flushed:done], sums[flushed:done], writer)
                        flushed, last = done, time.monotonic()
            # What was read until a Ctrl-C stays, too.
            finally:
                self._flush(rows[flushed:done], sums[flushed:done], writer)

    def _flush(self, rows: np.ndarray, sums: np.ndarray, writer: cache_files.Writer) -> None:
        """Put what has been read on the disk, then say so."""
        assert self._files is not None
        assert self._folder is not None
        writer.flush()
        if any(row in self._damaged for row in rows.tolist()):
            known = {**self._known_damage(self._folder), **self._damaged}
            cache_files.write_about(self._folder, self._name, known)
        whole = ~np.isin(rows, list(self._damaged))
        # After the bytes themselves: a process that is killed in between leaves zeros here, and the
        # next one reads those examples again.
        writer.write(len(self._leaves), self._files.sums_file, rows[whole], sums[whole])
        self._files.sums[rows[whole]] = sums[whole]

    def _known_damage(self, folder: Path) -> dict[int, str]:
        """What the folder says of damaged examples; they are only tried again if it is lost."""
        try:
            return cache_files.read_about(folder, self._count)
        except (OSError, ValueError):
            return {}

    def _create(self, folder: Path) -> None:
        def fill(partial: Path) -> None:
            for path, leaf, dtype in self._leaf_files(partial):
                write_empty(path, (self._count, *leaf.shape), dtype)
            write_empty(partial / "sums.npy", (self._count,), SUM)
            cache_files.write_about(partial, self._name, {})

        cache_files.create(folder, fill)
        self._open(folder)

    def _leaf_files(self, folder: Path) -> list[tuple[Path, tf.TensorSpec, np.dtype]]:
        return [
            (folder / f"leaf_{number}.npy", leaf, np.dtype(leaf.dtype.as_numpy_dtype))
            for number, leaf in enumerate(self._leaves)
        ]

    def _require_disk(self, rows: np.ndarray) -> None:
        needed = len(rows) * cache_filling.size_of_one(self._leaves)
        cache_files.require_disk(self._where, needed, self._name)


def key(source: Source) -> str:
    # Exactly: of a file that was replaced since, or lies elsewhere under its name, the cache must
    # not show what the other one held.
    leaves = [f"{leaf.dtype.name}{leaf.shape}" for leaf in present(source.spec)]
    text = json.dumps([VERSION, source.num_examples, leaves, source.identity(exact=True)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
