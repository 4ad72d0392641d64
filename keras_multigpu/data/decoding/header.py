"""What the first bytes of an image say, and whether its end is there.

Read before anything is decoded: an image that would take all memory is refused while it is still a
file, and one that was cut off is found out even where the decoder would fill the rest with grey.
Neither OpenCV nor TensorFlow says so before it has decoded, and Pillow is not required.
"""

import struct
from collections.abc import Callable
from typing import NamedTuple

from keras_multigpu.data.road.damage import DamagedExample

# About 89 million, a quarter of a gigabyte of RGB: what is decoded unless the user says otherwise.
# Pillow warns of larger ones. A file of a few kB can claim any size.
MAX_PIXELS = 2**28 // 3

# What can be decoded at all: TensorFlow and Pillow refuse larger ones, too.
MOST_PIXELS = 2**29 // 3

KINDS = "JPEG, PNG, GIF, BMP or WebP"

# The last chunk: no content, its name, and the checksum of that.
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
JPEG_END = b"\xff\xd9"
PROGRESSIVE = 0xC2
START_OF_SCAN = 0xDA
# Markers that stand alone: TEM, restarts, the start of an image.
WITHOUT_LENGTH = (0x01, *range(0xD0, 0xD9))
# The other three mean tables, or nothing yet, and have no size in them.
FRAME_HEADERS = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}


class Header(NamedTuple):
    """The size of an image and how it is written.

    Attributes:
        kind: `"JPEG"`, `"PNG"`, `"GIF"`, `"BMP"` or `"WebP"`.
        height: Its rows; of an animation, those of the whole screen.
        width: Its columns.
        components: How many colours a JPEG has: 4 are CMYK.
        progressive: Whether a JPEG comes in several scans, each finer than the one before.
        end: Where the first frame of a GIF ends.
    """

    kind: str
    height: int
    width: int
    components: int = 3
    progressive: bool = False
    end: int = 0


def read_header(data: bytes, max_pixels: int = MOST_PIXELS) -> Header:
    """Read the header; raise `DamagedExample` if this is not a whole image of a decent size."""
    reader = reader_of(data)
    if reader is None:
        raise DamagedExample(
            f"it is not a {KINDS} image, it begins with {data[:12]!r}" if data else "it is empty"
        )
    try:
        header = reader(data)
    except (IndexError, struct.error):
        raise cut_off(data) from None
    if header.height < 1 or header.width < 1:
        raise DamagedExample(f"its header gives {header.width} x {header.height} pixels")
    if header.height * header.width > max_pixels:
        size = f"{header.width} x {header.height}"
        raise DamagedExample(f"it has {size} pixels, more than max_pixels={max_pixels:,}")
    return header


def cut_off(data: bytes) -> DamagedExample:
    return DamagedExample(f"it is truncated: its end is missing after {len(data):,} bytes")


def reader_of(data: bytes) -> Callable[[bytes], Header] | None:
    if data.startswith(b"\xff\xd8\xff"):
        return jpeg
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return png
    if data.startswith((b"GIF87a", b"GIF89a")):
        return gif
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return webp
    return bmp if data.startswith(b"BM") else None


def jpeg(data: bytes) -> Header:
    place = 2
    header = None
    complete = data.endswith(JPEG_END)
    while True:
        # Decoders skip stray bytes between segments.
        if data[place] != 0xFF:
            place = data.find(b"\xff", place)
            if place < 0:
                raise cut_off(data)
        marker = data[place + 1]
        if marker in FRAME_HEADERS:
            height, width, components = struct.unpack_from(">HHB", data, place + 5)
            header = Header("JPEG", height, width, components, marker == PROGRESSIVE)
            if complete:
                return header
        elif marker == START_OF_SCAN:
            # In the scan that follows, 0xFF and 0xD9 stand together at the end only. A camera
            # may have added something behind it.
            if header is None or data.find(JPEG_END, place) < 0:
                raise cut_off(data)
            return header
        if marker == 0xFF:
            place += 1
        elif marker in WITHOUT_LENGTH:
            place += 2
        else:
            place += 2 + struct.unpack_from(">H", data, place + 2)[0]


def png(data: bytes) -> Header:
    width, height = struct.unpack_from(">II", data, 16)
    # Somebody may have added something behind the end.
    if not data.endswith(PNG_END) and PNG_END not in data:
        raise cut_off(data)
    return Header("PNG", height, width)


def gif(data: bytes) -> Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + colors(flags)
    # Extensions (0x21), such as comments, may stand before the first frame (0x2C).
    while data[place] != 0x2C:
        if data[place] != 0x21:
            raise DamagedExample("it is a GIF without a frame")
        place = after_blocks(data, place + 2)
    left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, place + 1)
    end = after_blocks(data, place + 11 + colors(flags))
    return Header("GIF", max(height, top + rows), max(width, left + columns), end=end)


def colors(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def after_blocks(data: bytes, place: int) -> int:
    while data[place]:
        place += 1 + data[place]
    return place + 1


def webp(data: bytes) -> Header:
    if len(data) < 8 + struct.unpack_from("<I", data, 4)[0]:
        raise cut_off(data)
    chunk = data[12:16]
    if chunk == b"VP8X":
        # This and the lossless form write sizes less one, in 24 and in 14 bits.
        width = 1 + int.from_bytes(data[24:27], "little")
        height = 1 + int.from_bytes(data[27:30], "little")
    elif chunk == b"VP8L":
        bits = struct.unpack_from("<I", data, 21)[0]
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
    return Header("WebP", height, width)


def bmp(data: bytes) -> Header:
    """The header of a BMP; rows can stand in either order, with a negative height for one."""
    start, length = struct.unpack_from("<I4x", data, 10)[0], struct.unpack_from("<I", data, 14)[0]
    if length == 12:
        width, height, _, depth = struct.unpack_from("<HHHH", data, 18)
        compression = 0
    else:
        width, height, _, depth, compression = struct.unpack_from("<iiHHI", data, 18)
    height = abs(height)
    # 0 and 3 are not compressed; of compressed rows only the decoder knows how long they are.
    if compression in (0, 3) and len(data) < start + (width * depth + 31) // 32 * 4 * height:
        raise cut_off(data)
    return Header("BMP", height, width)
