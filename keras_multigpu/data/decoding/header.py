"""Reads the header of each kind of image file, and checks that the file is complete.

This happens before decoding: an image that would fill the memory is refused while it is still a
file, and a truncated file is detected even where a decoder would fill the missing part with grey.
OpenCV and TensorFlow report neither before they decode, and Pillow is not required.
"""

import re
import struct
from collections.abc import Iterator
from typing import NamedTuple

from keras_multigpu.data.pipeline.damage import DamagedExample

# The most scans of a progressive JPEG; encoders make about ten. One of a few bytes passes over the
# whole image, which takes 0.2 s for the largest, and no thread that decodes can be stopped.
MOST_SCANS = 100

# The last chunk of a PNG: no content, its name and the checksum of the name.
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
JPEG_END = b"\xff\xd9"
START_OF_SCAN = 0xDA
# Markers without a length: stuffing, TEM, restarts, the start of an image and fill bytes.
WITHOUT_LENGTH = frozenset({0, 1, *range(0xD0, 0xD9), 0xFF})
SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
# Markers of frame headers, which hold the size. The three exceptions in this range are tables and a
# reserved marker.
FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
PROGRESSIVE = frozenset({0xC2, 0xC6, 0xCA, 0xCE})


class Header(NamedTuple):
    """The size and format of an image.

    Attributes:
        kind: `"JPEG"`, `"PNG"`, `"GIF"`, `"BMP"` or `"WebP"`.
        height: Rows; for an animation, rows of the whole canvas.
        width: Columns.
        components: Color components of a JPEG; 4 means CMYK.
        frame_end: For a GIF, the offset where its first frame ends.
    """

    kind: str
    height: int
    width: int
    components: int = 3
    frame_end: int = 0


class Truncated(Exception):
    """The end of the image is missing."""


def read_jpeg(data: bytes) -> Header:
    header, progressive = None, False
    for marker, start in segments(data):
        if marker in FRAME_HEADERS:
            progressive = marker in PROGRESSIVE
            height, width, components = struct.unpack_from(">HHB", data, start + 5)
            header = Header("JPEG", height, width, components)
        elif marker == START_OF_SCAN:
            # Within a scan, 0xFF 0xD9 occurs only at the end. Cameras append data after it.
            if header is None or data.rfind(JPEG_END, start) < 0:
                break
            # Within a scan, this marker does not occur.
            scans = data.count(b"\xff\xda", start) if progressive else 1
            if scans > MOST_SCANS:
                raise DamagedExample(f"it has {scans:,} scans, more than {MOST_SCANS}")
            return header
    raise Truncated


def segments(data: bytes) -> Iterator[tuple[int, int]]:
    """The marker and offset of each segment of a JPEG, up to its first scan."""
    start = 2
    while True:
        marker = data[start + 1] if data[start] == 0xFF else 0
        if marker in WITHOUT_LENGTH:
            # Decoders skip stray bytes between segments. The search is slower than reading lengths.
            found = SEGMENT.search(data, start)
            if found is None:
                return
            start = found.start()
            marker = data[start + 1]
        yield marker, start
        start += 2 + int.from_bytes(data[start + 2 : start + 4], "big")


def read_png(data: bytes) -> Header:
    width, height = struct.unpack_from(">II", data, 16)
    if data.rfind(PNG_END) < 0:
        raise Truncated
    return Header("PNG", height, width)


def read_gif(data: bytes) -> Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + size_of_palette(flags)
    # Extensions (0x21), such as comments, may precede the first frame (0x2C).
    while data[place] != 0x2C:
        if data[place] != 0x21:
            raise DamagedExample("it is a GIF without a frame")
        place = end_of_blocks(data, place + 2)
    left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, place + 1)
    end = end_of_blocks(data, place + 11 + size_of_palette(flags))
    return Header("GIF", max(height, top + rows), max(width, left + columns), frame_end=end)


def size_of_palette(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def end_of_blocks(data: bytes, place: int) -> int:
    """The offset after a series of GIF blocks; each begins with its length, the last is empty."""
    while data[place]:
        place += 1 + data[place]
    return place + 1


def read_webp(data: bytes) -> Header:
    chunk = data[12:16]
    if chunk == b"VP8X":
        # This form and the lossless one store sizes minus one, in 24 and in 14 bits.
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif chunk == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    if len(data) < 8 + struct.unpack_from("<I", data, 4)[0]:
        raise Truncated
    return Header("WebP", height, width)


def read_bmp(data: bytes) -> Header:
    start, length = struct.unpack_from("<I", data, 10)[0], struct.unpack_from("<I", data, 14)[0]
    if length == 12:
        width, height, _, depth = struct.unpack_from("<HHHH", data, 18)
        compression = 0
    else:
        width, height, _, depth, compression = struct.unpack_from("<iiHHI", data, 18)
    height = abs(height)  # Negative if rows run from top to bottom.
    # 0 and 3 are not compressed. Only the decoder knows the length of compressed rows.
    row = (width * depth + 31) // 32 * 4
    if compression in (0, 3) and len(data) < start + row * height:
        raise Truncated
    return Header("BMP", height, width)
