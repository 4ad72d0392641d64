"""The kinds of image files: one table of how each is named, recognized and decoded."""

import re
import struct
from collections.abc import Callable
from typing import NamedTuple

import tensorflow as tf

from keras_multigpu.data.decoding import header as headers
from keras_multigpu.data.decoding.header import Header, Truncated
from keras_multigpu.data.pipeline.damage import DamagedExample

# Half a gigabyte of RGB. A file of a few kB can claim any size; TensorFlow and Pillow refuse larger
# images, too.
MAX_PIXELS = 2**29 // 3

# A flag of an extended WebP. TensorFlow 2.21 decodes such a file to something that is not a frame.
ANIMATED = 2


class Format(NamedTuple):
    """A kind of image file.

    Attributes:
        name: As in messages.
        endings: Those of its files, in lower case.
        magic: A regular expression of what its content begins with.
        read_header: Reads the header, and raises an error if the end of the file is missing.
        decode: Decodes the content by TensorFlow, to `channels` if it can.
        by_opencv: Whether OpenCV decodes it where it is installed.
    """

    name: str
    endings: tuple[str, ...]
    magic: bytes
    read_header: Callable[[bytes], Header]
    decode: Callable[[bytes, Header, int], tf.Tensor]
    by_opencv: bool


def decode_any(data: bytes, header: Header, channels: int) -> tf.Tensor:
    return tf.io.decode_image(data, expand_animations=False)


def decode_jpeg(data: bytes, header: Header, channels: int) -> tf.Tensor:
    # TensorFlow decodes no JPEG to RGBA, and no CMYK to grey.
    channels = 1 if channels == 1 and header.components != 4 else 3
    return tf.io.decode_jpeg(data, channels, dct_method="INTEGER_ACCURATE")


def decode_png(data: bytes, header: Header, channels: int) -> tf.Tensor:
    return tf.io.decode_png(data, channels=channels)


def decode_gif(data: bytes, header: Header, channels: int) -> tf.Tensor:
    # Only the first frame, to save the time and memory of the others.
    return decode_any(data[: header.frame_end] + b";", header, channels)


def decode_webp(data: bytes, header: Header, channels: int) -> tf.Tensor:
    if data[12:16] == b"VP8X" and data[20] & ANIMATED:
        raise DamagedExample("it is an animated WebP, and those only OpenCV decodes")
    return decode_any(data, header, channels)


# TensorFlow is as fast for PNG and GIF and survives damaged files: OpenCV 5.0 can crash on an
# animated PNG with wrong checksums. Keras ignores `.webp`.
FORMATS = (
    Format("JPEG", (".jpeg", ".jpg"), rb"\xff\xd8\xff", headers.read_jpeg, decode_jpeg, True),
    Format("PNG", (".png",), rb"\x89PNG\r\n\x1a\n", headers.read_png, decode_png, False),
    Format("GIF", (".gif",), rb"GIF8[79]a", headers.read_gif, decode_gif, False),
    Format("BMP", (".bmp",), rb"BM", headers.read_bmp, decode_any, True),
    Format("WebP", (".webp",), rb"RIFF.{4}WEBP", headers.read_webp, decode_webp, True),
)

FORMAT_OF = {one.name: one for one in FORMATS}

EXTENSIONS = tuple(sorted(ending for one in FORMATS for ending in one.endings))
"""Endings of images, in upper or lower case."""


def read_header(data: bytes) -> Header:
    """Read the header; raise `DamagedExample` for an incomplete or too large image."""
    found = next((one for one in FORMATS if re.match(one.magic, data, re.DOTALL)), None)
    if found is None:
        *names, last = (one.name for one in FORMATS)
        listed = f"{', '.join(names)} or {last}"
        begins = f"it is not a {listed} image, it begins with {data[:12]!r}"
        raise DamagedExample(begins if data else "it is empty")
    try:
        header = found.read_header(data)
    except (Truncated, IndexError, struct.error):
        raise DamagedExample(
            f"it is truncated: its end is missing after {len(data):,} bytes"
        ) from None
    size = f"{header.width} x {header.height} pixels"
    if header.height < 1 or header.width < 1:
        raise DamagedExample(f"its header gives {size}")
    if header.height * header.width > MAX_PIXELS:
        raise DamagedExample(f"it has {size}, more than {MAX_PIXELS:,}")
    return header
