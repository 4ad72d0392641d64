"""CRC-32C, the checksum of TFRecord files: by google-crc32c if it is installed, otherwise by NumPy.

TensorFlow does not expose its own, and its reader of single records reads 16 MiB for each.
"""

import functools
from collections.abc import Callable

import numpy as np

POLYNOMIAL = 0x82F63B78

ONES = 0xFFFFFFFF

# How many bytes are looked up together. Their tables take 2 MB, which fits into processor caches.
BLOCK = 2048


def masked_crc(content: bytes) -> int:
    """The checksum of some bytes in the form that TFRecord files store."""
    if (native := native_crc()) is not None:
        return int(masked(np.array([native(content)]))[0])
    state = ONES
    for low in range(0, len(content), BLOCK):
        block = np.frombuffer(content[low : low + BLOCK], np.uint8).copy()
        count = min(4, len(block))
        block[:count] ^= np.frombuffer(state.to_bytes(4, "little"), np.uint8)[:count]
        found = tables()[BLOCK - len(block) + np.arange(len(block)), block]
        state = state >> 8 * count ^ int(np.bitwise_xor.reduce(found))
    return int(masked(np.array([state ^ ONES]))[0])


def masked_crcs(rows: np.ndarray) -> np.ndarray:
    """The checksum of each row of a short `uint8[n, length]`."""
    state = np.full(len(rows), ONES, np.uint32)
    for column in rows.T:
        state = tables()[-1][(state ^ column) & 255] ^ (state >> 8)
    return masked(state ^ np.uint32(ONES))


def masked(crcs: np.ndarray) -> np.ndarray:
    crcs = crcs.astype(np.uint64)
    return ((crcs >> np.uint64(15) | crcs << np.uint64(17)) + np.uint64(0xA282EAD8)) & np.uint64(
        ONES
    )


@functools.cache
def native_crc() -> Callable[[bytes], int] | None:
    try:
        from google_crc32c import value
    except ImportError:
        return None
    return value


@functools.cache
def tables() -> np.ndarray:
    """What each byte adds to the sum, by its place in a block: `uint32[BLOCK, 256]`."""
    last = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        last = np.where(last & 1, last >> 1 ^ np.uint32(POLYNOMIAL), last >> 1)
    made = np.empty((BLOCK, 256), np.uint32)
    made[-1] = last
    for place in range(BLOCK - 2, -1, -1):
        made[place] = last[made[place + 1] & 255] ^ (made[place + 1] >> 8)
    return made
