"""What the first bytes of an image say, and whether its end is there.

Read before anything is decoded: an image that would take all memory is refused while it is still a
file, and a truncated one is detected even where the decoder would fill the rest with grey.
Neither OpenCV nor TensorFlow says so before it has decoded, and Pillow is not required.
"""

import contextlib
import re
import struct
from collections.abc import Callable, Iterator
from typing import NamedTuple

from keras_multigpu.data.pipeline.damage import DamagedExample

# About 89 million, a quarter of a gigabyte of RGB: what is decoded unless the user says otherwise.
# Pillow warns of larger ones. A file of a few kB can claim any size.
MAX_PIXELS = 2**28 // 3

# What can be decoded at all: TensorFlow and Pillow refuse larger ones, too.
MOST_PIXELS = 2**29 // 3

# What a file may have besides its pixels: metadata, further frames, a film after a photograph.
SPARE_BYTES = 2**28

# Eight take 16 bits of each of four colours, without any compression.
BYTES_A_PIXEL = 8

# Each scan of a JPEG costs the decoder a walk through the whole image, be it empty: 20,000 of them
# make a file of 9 MB that keeps it busy for minutes. Encoders write 10, and 24 at most.
MOST_SCANS = 100

# Metadata come in pieces of up to 64 kB each.
MOST_SEGMENTS = 10_000

# Up to here the first frame of a GIF begins, and so much more than two bytes a pixel it may take.
GIF_SPARE = 2**22

KINDS = "JPEG, PNG, GIF, BMP or WebP"

# The last chunk: no content, its name, and the checksum of that.
PNG_END = b"\x00\x00\x00\x00IEND\xaeB`\x82"
JPEG_END = b"\xff\xd9"
# The second one with arithmetic coding.
PROGRESSIVE = (0xC2, 0xCA)
START_OF_SCAN, END_OF_IMAGE = 0xDA, 0xD9
# What may follow 0xFF without a length: nothing, as 0xFF is a value of the image then; TEM,
# restarts, the start of an image, and 0xFF again.
ALONE = frozenset({0, 1, *range(0xD0, 0xD9), 0xFF})
SEGMENT = re.compile(rb"\xff[^\x00\x01\xd0-\xd8\xff]")
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
        end: Where what was read ends; of a whole GIF its first frame.
    """

    kind: str
    height: int
    width: int
    components: int = 3
    progressive: bool = False
    end: int = 0


def read_header(data: bytes, max_pixels: int = MOST_PIXELS) -> Header:
    """Read the header; raise `DamagedExample` if this is not a whole image of a decent size."""
    read, complete = kind_of(data)
    try:
        header = complete(data, read(data))
    except (IndexError, struct.error):
        raise cut_off(data) from None
    require_decent(header, max_pixels)
    return header


def look(start: bytes, size: int, max_pixels: int) -> None:
    """Raise `DamagedExample` if a file of `size` bytes that begins so need not be read whole."""
    read, _ = kind_of(start)
    room, what = SPARE_BYTES, "an image"
    # The size of an image may come later.
    with contextlib.suppress(IndexError, struct.error):
        header = read(start)
        require_decent(header, max_pixels)
        room += BYTES_A_PIXEL * header.height * header.width
        what = f"{header.width} x {header.height} pixels"
    if size > room:
        raise DamagedExample(f"it has {size:,} bytes, too many for {what}")


def require_decent(header: Header, max_pixels: int) -> None:
    if header.height < 1 or header.width < 1:
        raise DamagedExample(f"its header gives {header.width} x {header.height} pixels")
    if header.height * header.width > max_pixels:
        size = f"{header.width} x {header.height}"
        raise DamagedExample(f"it has {size} pixels, more than max_pixels={max_pixels:,}")


def cut_off(data: bytes) -> DamagedExample:
    return DamagedExample(f"it is truncated: its end is missing after {len(data):,} bytes")


Reading = tuple[Callable[[bytes], Header], Callable[[bytes, Header], Header]]
"""What reads the size of an image from its first bytes, and what looks for its end."""


def kind_of(data: bytes) -> Reading:
    if data.startswith(b"\xff\xd8\xff"):
        return jpeg, whole_jpeg
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return png, whole_png
    if data.startswith((b"GIF87a", b"GIF89a")):
        return gif, whole_gif
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return webp, whole_webp
    if data.startswith(b"BM"):
        return bmp, whole_bmp
    raise DamagedExample(
        f"it is not a {KINDS} image, it begins with {data[:12]!r}" if data else "it is empty"
    )


def jpeg(data: bytes) -> Header:
    for marker, place in segments(data, 2):
        if marker == START_OF_SCAN:
            break
        if marker in FRAME_HEADERS:
            height, width, components = struct.unpack_from(">HHB", data, place + 5)
            return Header("JPEG", height, width, components, marker in PROGRESSIVE, place)
    raise IndexError("There is no header of a frame.")


def whole_jpeg(data: bytes, header: Header) -> Header:
    scans = 0
    for marker, place in segments(data, header.end):
        if marker == END_OF_IMAGE:
            break
        scans += marker == START_OF_SCAN
        if scans > MOST_SCANS:
            raise DamagedExample(f"it is a JPEG of more than {MOST_SCANS} scans")
        if marker != START_OF_SCAN or scans > 1:
            continue
        # In a scan 0xFF 0xD9 occurs at its end only. A camera may have appended something.
        if not data.endswith(JPEG_END) and data.find(JPEG_END, place) < 0:
            raise cut_off(data)
        # All colours together and in full: decoders take no other scan.
        if not header.progressive and data[place + 4] == header.components:
            break
    if not scans and not data.endswith(JPEG_END):
        raise cut_off(data)
    return header


def segments(data: bytes, place: int) -> Iterator[tuple[int, int]]:
    """The markers of a JPEG's segments from a place on, and where each begins."""
    for _ in range(MOST_SEGMENTS):
        marker = data[place + 1] if data[place : place + 1] == b"\xff" else 0
        if marker in ALONE:
            # Decoders skip stray bytes between segments. Where there are none, this takes longer.
            found = SEGMENT.search(data, place)
            if found is None:
                return
            place = found.start()
            marker = data[place + 1]
        yield marker, place
        if len(data) < place + 4:
            return
        place += 2 + (data[place + 2] << 8 | data[place + 3])
    raise DamagedExample(f"it is a JPEG of more than {MOST_SEGMENTS:,} segments")


def png(data: bytes) -> Header:
    width, height = struct.unpack_from(">II", data, 16)
    return Header("PNG", height, width)


def whole_png(data: bytes, header: Header) -> Header:
    # Something may have been appended after the end.
    if not data.endswith(PNG_END) and PNG_END not in data:
        raise cut_off(data)
    return header


def gif(data: bytes) -> Header:
    width, height, flags = struct.unpack_from("<HHB", data, 6)
    place = 13 + colors(flags)
    # Extensions (0x21), such as comments, may come before the first frame (0x2C).
    while data[place] != 0x2C:
        if data[place] != 0x21:
            raise DamagedExample("it is a GIF without a frame")
        place = after_blocks(data, place + 2, GIF_SPARE)
    left, top, columns, rows, flags = struct.unpack_from("<HHHHB", data, place + 1)
    place += 11 + colors(flags)
    return Header("GIF", max(height, top + rows), max(width, left + columns), end=place)


def whole_gif(data: bytes, header: Header) -> Header:
    most = GIF_SPARE + 2 * header.height * header.width
    return header._replace(end=after_blocks(data, header.end, most))


def colors(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def after_blocks(data: bytes, place: int, most: int) -> int:
    """Where blocks end that begin at a place; one of them may hold a single byte."""
    while place <= most:
        if not data[place]:
            return place + 1
        place += 1 + data[place]
    raise DamagedExample("it is a GIF of more bytes than its pixels need")


def webp(data: bytes) -> Header:
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


def whole_webp(data: bytes, header: Header) -> Header:
    if len(data) < 8 + struct.unpack_from("<I", data, 4)[0]:
        raise cut_off(data)
    return header


def bmp(data: bytes) -> Header:
    """The header of a BMP; rows can come in either order, with a negative height for one."""
    sides = "<HH" if struct.unpack_from("<I", data, 14)[0] == 12 else "<ii"
    width, height = struct.unpack_from(sides, data, 18)
    return Header("BMP", abs(height), width)


def whole_bmp(data: bytes, header: Header) -> Header:
    start, length = struct.unpack_from("<I", data, 10)[0], struct.unpack_from("<I", data, 14)[0]
    if length == 12:
        depth, compression = struct.unpack_from("<H", data, 24)[0], 0
    else:
        depth, compression = struct.unpack_from("<HI", data, 28)
    # 0 and 3 are not compressed; of compressed rows only the decoder knows how long they are.
    row = (header.width * depth + 31) // 32 * 4
    if compression in (0, 3) and len(data) < start + row * header.height:
        raise cut_off(data)
    return header
