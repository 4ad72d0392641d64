"""CRC-32C, the checksum of TFRecord files: by google-crc32c where it is installed, or by NumPy.

TensorFlow offers it to nobody: its reader of single records reads 16 MiB for each.
"""

import functools
from collections.abc import Callable

import numpy as np

POLYNOMIAL = 0x82F63B78

ONES = 0xFFFFFFFF

BLOCK = 2048
"""How many bytes are looked up together: a table for each takes 2 MB, which caches hold."""

AT_ONCE = 4 * BLOCK


def masked_crc(content: bytes) -> int:
    """The checksum of some bytes, as TFRecord files have it."""
    if (native := in_c()) is not None:
        return int(masked(np.array([native(content)]))[0])
    if len(content) < 4:
        return int(masked_crcs(np.frombuffer(content, np.uint8)[None])[0])
    tables, places = looked_up()
    # The sum begins with ones in the first four bytes; zeros before that change nothing.
    padding = -len(content) % BLOCK
    padded = np.zeros(padding + len(content), np.uint8)
    padded[padding:] = np.frombuffer(content, np.uint8)
    padded[padding : padding + 4] ^= 255
    state = 0
    for low in range(0, len(padded), AT_ONCE):
        found = tables.take(padded[low : low + AT_ONCE].reshape(-1, BLOCK) + places)
        for block in np.bitwise_xor.reduce(found, axis=1).tolist():
            # The sum of what precedes goes on as four bytes that are added to the first ones.
            moved = tables[
                [0, 256, 512, 768] + np.frombuffer(state.to_bytes(4, "little"), np.uint8)
            ]
            state = block ^ int(np.bitwise_xor.reduce(moved))
    return int(masked(np.array([state ^ ONES]))[0])


def masked_crcs(rows: np.ndarray) -> np.ndarray:
    """Those of short texts of one length, `uint8[n, length]`."""
    state = np.full(len(rows), ONES, np.uint32)
    for column in rows.T:
        state = of_byte()[(state ^ column) & 255] ^ (state >> 8)
    return masked(state ^ np.uint32(ONES))


def masked(crcs: np.ndarray) -> np.ndarray:
    crcs = crcs.astype(np.uint64)
    return ((crcs >> np.uint64(15) | crcs << np.uint64(17)) + np.uint64(0xA282EAD8)) & np.uint64(
        ONES
    )


@functools.cache
def in_c() -> Callable[[bytes], int] | None:
    try:
        from google_crc32c import value
    except ImportError:
        return None
    return value


@functools.cache
def of_byte() -> np.ndarray:
    """What each value of a sum's last byte adds to it."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(POLYNOMIAL), table >> 1)
    return table


@functools.cache
def looked_up() -> tuple[np.ndarray, np.ndarray]:
    """What each byte of a block adds to its sum, one table after another; where these begin."""
    tables = np.empty((BLOCK, 256), np.uint32)
    tables[-1] = of_byte()
    for place in range(BLOCK - 2, -1, -1):
        following = tables[place + 1]
        tables[place] = of_byte()[following & 255] ^ (following >> 8)
    return tables.ravel(), np.arange(0, BLOCK * 256, 256, dtype=np.int32)
