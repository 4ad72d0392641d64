"""Masks: images whose pixels are the numbers of classes."""

import copy
import struct
import zlib
from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.data.decoding.decoder import ImageDecoder, ImageSize
from keras_multigpu.data.decoding.formats import read_header
from keras_multigpu.data.pipeline.damage import Damaged, DamagedExample
from keras_multigpu.data.pipeline.source import read_rows
from keras_multigpu.data.sources.file_table import FileTable, digest_of
from keras_multigpu.data.sources.targets import Targets

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GREY, _PALETTE, _GREY_ALPHA = 0, 3, 4
# Offsets of the bits per value and of the color type in a PNG.
_DEPTH, _COLORS = 24, 25


class MaskTargets(Targets):
    """Masks of images, as `uint8` arrays with one channel, resized without interpolation.

    In an image with a palette, the pixels are the indices into it. A random crop takes the same
    part of an image and of its mask. `resize="pad"` fills with class zero.
    """

    def __init__(
        self,
        masks: FileTable,
        images: FileTable,
        image_size: ImageSize,
        *,
        resize: str,
    ) -> None:
        self._masks = masks
        self._images = images
        self.grey, self.color = (
            ImageDecoder(
                image_size,
                color_mode=color_mode,
                interpolation="nearest",
                resize=resize,
            )
            for color_mode in ("grayscale", "rgb")
        )
        self.spec = tf.TensorSpec(self.grey.shape, tf.uint8)

    def read(self, out: np.ndarray, indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        tables = (self._masks, self._images) if self.grey.draws else (self._masks,)
        calls = zip(*(table.contents(indices) for table in tables), strict=True)

        def read(row: int) -> None:
            mask, *image = (call() for call in next(calls))
            if image:
                require_same_size(mask, *image)
            out[row] = self._decode(mask, seeds[row])

        damaged = read_rows(len(indices), read)
        return [(row, f"its mask {self._masks.path(indices[row])}: {why}") for row, why in damaged]

    def without_draws(self) -> Targets:
        return self._with(self.grey.without_draws(), self.color.without_draws())

    def in_epoch(self, epoch: int) -> Targets:
        return self._with(self.grey.in_epoch(epoch), self.color.in_epoch(epoch))

    def _with(self, grey: ImageDecoder, color: ImageDecoder) -> Targets:
        same = copy.copy(self)
        same.grey, same.color = grey, color
        same.spec = tf.TensorSpec(grey.shape, tf.uint8)
        return same

    def _decode(self, data: bytes, seed: np.ndarray) -> np.ndarray:
        read_header(data)  # Raises for truncated files.
        if data.startswith(_SIGNATURE):
            depth, colors = data[_DEPTH], data[_COLORS]
            if depth == 16:
                raise DamagedExample("it has 16 bits a pixel, and a class number must be below 256")
            if colors == _PALETTE:
                # Decoders scale values of few bits to 0..255.
                return self.grey.decode(as_grey(data), seed) // (255 // (2**depth - 1))
            if colors in (_GREY, _GREY_ALPHA):
                return self.grey.decode(data, seed)
        pixels = self.color.decode(data, seed)
        if (pixels != pixels[..., :1]).any():
            raise DamagedExample("it has colours, and a mask has one class number for each pixel")
        return pixels[..., :1]

    def identity(self, exact: bool = False) -> dict[str, Any]:
        return {"files": digest_of(self._masks, exact), "masks": self.grey.settings}


def require_same_size(mask: bytes, image: bytes) -> None:
    mask_header = read_header(mask)
    try:
        image_header = read_header(image)
    except DamagedExample:
        return  # The image's own error is reported instead.
    sizes = [(header.width, header.height) for header in (mask_header, image_header)]
    if sizes[0] != sizes[1]:
        raise DamagedExample(
            f"it has {sizes[0][0]} x {sizes[0][1]} pixels and its image {sizes[1][0]} x "
            f'{sizes[1][1]}; resize="random_crop" needs the same'
        )


def as_grey(data: bytes) -> bytes:
    """A PNG with a palette as a grey PNG, whose levels are the indices into the palette."""
    parts = [_SIGNATURE]
    place = len(_SIGNATURE)
    while place + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, place)
        content = data[place + 8 : place + 8 + length]
        place += 12 + length
        if kind == b"IHDR":
            # Byte 9 is the color type. The chunk with the palette is left out below.
            grey = content[:9] + bytes([_GREY]) + content[10:]
            check = zlib.crc32(kind + grey)
            parts.append(struct.pack(">I4s", length, kind) + grey + struct.pack(">I", check))
        elif kind in (b"IDAT", b"IEND"):
            parts.append(data[place - 12 - length : place])
    return b"".join(parts)
