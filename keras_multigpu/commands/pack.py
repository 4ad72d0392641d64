"""`keras-multigpu pack`: a folder of images in a few large files that are read in any order."""

import argparse
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from keras_multigpu.checks import printable
from keras_multigpu.commands.usage import (
    at_least,
    images_of,
    path_in,
    progress_bar,
    usage_error,
    without_library_messages,
)
from keras_multigpu.writing import one_at_a_time, size_text

# A shard is large for the disk, and small enough to lose: a kill costs those being written.
SHARD_BYTES = 256 * 2**20

# How many shards a process writes at a time.
AT_ONCE = 4


class Shard(NamedTuple):
    """One file, and the rows of the folder's listing that it holds."""

    path: Path
    rows: range


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "pack",
        help="pack a folder of images into a few large files",
        description="Copy all images of a folder, byte by byte, into files that from_directory and "
        "from_records read in any order. Run it again after an interruption, or at the same time "
        "on several machines: what is complete stays, and each file is written once.",
    )
    add = parser.add_argument
    add("folder", metavar="DIR", help="the folder of images, or its address")
    add("output", metavar="OUT", help="what to write, such as photos.array_record")
    shards = "how many files to write; by default one for each 256 MiB"
    add("--shards", metavar="N", type=at_least(int, 1), help=shards)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    with without_library_messages():
        # Only now, because TensorFlow takes seconds to import.
        from keras_multigpu.data.sources.image_folder import class_folders
        from keras_multigpu.data.sources.packed_folder import ENDING, import_array_record

    output = os.path.normpath(os.path.expanduser(arguments.output))
    if not output.endswith(ENDING):
        raise usage_error(
            "The output has another ending.",
            f"Expected a file that ends in {ENDING}.",
            output=output,
        )
    import_array_record()
    folder, files = images_of(arguments.folder)
    paths = [path_in(folder, files.path(row)) for row in range(len(files))]
    states = files.states(range(len(files)), exact=False)
    sizes = [0 if state == "missing" else int(state) for state in states]
    table = {"classes": class_folders(folder), "total": len(paths)}
    digest = hashlib.sha256(json.dumps([paths, sizes, table]).encode()).hexdigest()[:32]
    shards = plan(Path(output), sizes, arguments.shards)
    left = missing(shards, output, digest)
    if len(left) < len(shards):
        print(f"{len(shards) - len(left)} of {len(shards)} files are complete.", flush=True)
    pack_all(left, files, paths, sizes, {**table, "listing": digest})
    names = shards[0].path.name if len(shards) == 1 else f"{output}-*-of-{len(shards):05}"
    print(f"{len(paths):,} images, {size_text(sum(sizes))}, are in {printable(names)}.")
    return 0


def plan(output: Path, sizes: Sequence[int], count: int | None) -> list[Shard]:
    """Shards of about equal size, the same for every process that packs the folder."""
    import numpy as np

    total = sum(sizes)
    count = count or max(-(-total // SHARD_BYTES), 1)
    inner = np.searchsorted(np.cumsum(sizes), total * np.arange(1, count) / count)
    bounds = [0, *inner.tolist(), len(sizes)]
    names = [f"{output.name}-{number:05}-of-{count:05}" for number in range(count)]
    names = names if count > 1 else [output.name]
    rows = zip(names, bounds[:-1], bounds[1:], strict=True)
    return [Shard(output.with_name(name), range(low, high)) for name, low, high in rows]


def missing(shards: list[Shard], output: str, listing: str) -> list[Shard]:
    """The shards that are not there yet; a `UsageError` if files of other images are."""
    from keras_multigpu.data.sources.packed_folder import read_table, shards_of

    own = {str(shard.path) for shard in shards}
    there = shards_of(output)
    for path in there:
        if path not in own or read_table(path)["listing"] != listing:
            raise usage_error(
                f"{os.path.basename(path)} is there already, with other images, or as one of "
                "another number of files.",
                "Expected nothing, or what packing the same images has written.",
                "Delete it, or choose another output.",
                path=path,
            )
    return [shard for shard in shards if str(shard.path) not in there]


def pack_all(
    shards: list[Shard],
    files: Any,
    paths: list[str],
    sizes: list[int],
    table: dict[str, Any],
) -> None:
    import numpy as np

    from keras_multigpu.data.pipeline.damage import DamagedExample
    from keras_multigpu.data.sources.packed_folder import write_shard

    bar = progress_bar(sum(len(shard.rows) for shard in shards))

    def contents(rows: range) -> Iterator[bytes]:
        for row, call in zip(rows, files.contents(np.array(rows)), strict=True):
            try:
                content = call()
                cause = "its size has changed" if len(content) != sizes[row] else None
            except DamagedExample as damage:
                cause = damage.cause
            if cause is not None:
                raise usage_error(
                    f"{files.path(row)} cannot be packed: {cause}.",
                    "Expected files that can be read and stay as they are.",
                    file=files.path(row),
                )
            yield content
            bar(1)

    def pack(shard: Shard, wait: bool) -> bool:
        """Write a shard; whether it is there now, by this process or another."""
        partial = shard.path.with_name(f".{shard.path.name}.partial")
        waiting_for = f"is writing {shard.path}" if wait else None
        with one_at_a_time(partial, waiting_for) as is_held:
            if not is_held:
                return False
            if shard.path.exists():  # Another process was faster.
                partial.unlink(missing_ok=True)
                return True
            rows = shard.rows
            own = {"paths": paths[rows.start : rows.stop], "sizes": sizes[rows.start : rows.stop]}
            # After a kill or an error the next process to lock it writes it anew.
            write_shard(partial, contents(rows), {**table, **own})
            os.replace(partial, shard.path)
        return True

    with ThreadPoolExecutor(AT_ONCE) as threads:
        done = list(threads.map(lambda shard: pack(shard, wait=False), shards))
    for shard, is_done in zip(shards, done, strict=True):
        if not is_done:  # Its process may have been killed meanwhile.
            pack(shard, wait=True)
