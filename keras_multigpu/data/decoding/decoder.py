"""`ImageDecoder`: the content of an image file as an array of fixed size."""

import copy
import functools
import math
import os
import random
import stat
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_multigpu.checks import require_choice, require_positive_integer, value_error
from keras_multigpu.data.addresses import fetched, is_address
from keras_multigpu.data.decoding.backends import Box, backend, cut
from keras_multigpu.data.decoding.header import MAX_PIXELS, MOST_PIXELS, look, read_header
from keras_multigpu.data.pipeline.damage import DamagedExample

CHANNELS = {"grayscale": 1, "rgb": 3, "rgba": 4}
INTERPOLATIONS = "bilinear nearest bicubic area lanczos3 lanczos5 gaussian mitchellcubic".split()

RESIZES = ("stretch", "crop", "pad", "random_crop")
"""How an image is brought to its size."""

# Linux reads no more in one call, and no image of `MOST_PIXELS` takes more.
MAX_BYTES = 2**31 - 2**12

# The parts of `"random_crop"` are those of the training of Inception (Szegedy et al., "Going deeper
# with convolutions", 2014) and of most since. torchvision's `RandomResizedCrop` draws as often.
AREAS = (0.08, 1.0)
ASPECTS = (math.log(3 / 4), math.log(4 / 3))
TRIES = 10

START = 2**16
"""So many bytes of a file are looked at before it is read."""

# A pipe that is named like an image must not be waited for.
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)


class ImageDecoder:
    """Decodes images to `uint8` arrays of one size; safe to use from several threads.

    Images are decoded and resized as `keras.utils.image_dataset_from_directory` does, and rounded.
    What kind of image it is, its content decides, not its name. Of an animation the first frame is
    taken, of 16 bits the upper 8; how a camera was turned is ignored.
    The arguments are those of `from_directory`.
    """

    def __init__(
        self,
        image_size: int | tuple[int, int] | None,
        *,
        color_mode: str = "rgb",
        interpolation: str = "bilinear",
        resize: str = "stretch",
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        height, width = require_size(image_size)
        require_choice("color_mode", color_mode, CHANNELS)
        require_choice("interpolation", interpolation, INTERPOLATIONS)
        require_choice("resize", resize, RESIZES)
        require_positive_integer("max_pixels", max_pixels)
        if max_pixels > MOST_PIXELS:
            raise value_error(
                "`max_pixels` allows images that cannot be decoded.",
                f"Expected at most {MOST_PIXELS:,}, half a gigabyte for one image.",
                "Downscale larger images first.",
                max_pixels=max_pixels,
            )
        self.shape = (height, width, CHANNELS[color_mode])
        self.draws = resize == "random_crop"
        self.max_pixels = max_pixels
        self.resize = resize
        self._interpolation = interpolation
        self._backend = backend(CHANNELS[color_mode], interpolation)

    def still(self) -> "ImageDecoder":
        """The same without random draws: the middle of an image instead of a random part."""
        still = copy.copy(self)
        if self.draws:
            still.draws, still.resize = False, "crop"
        return still

    @property
    def settings(self) -> dict[str, Any]:
        """What decides the pixels, besides the file."""
        shape = list(self.shape)
        return {"shape": shape, "interpolation": self._interpolation, "resize": self.resize}

    def decode_file(
        self, path: str, seed: np.ndarray, read: Callable[[], bytes] | None = None
    ) -> np.ndarray:
        """The pixels of a file; where its content is on the way already, `read` waits for it."""
        return self.decode(read_file(path, self.max_pixels) if read is None else read(), seed)

    def decode(self, data: bytes, seed: np.ndarray) -> np.ndarray:
        header = read_header(data, self.max_pixels)
        height, width, _ = self.shape
        # TensorFlow reads a part of no other kind alone, so these are cut when they are whole.
        if self.draws and header.kind == "JPEG":
            box = random_box(header.height, header.width, seed)
            return self._backend.resize(self._backend.read_part(data, header, box), height, width)
        image = self._backend.read(data, header)
        rows, columns, _ = image.shape
        if self.draws:
            image = cut(image, random_box(rows, columns, seed))
        elif self.resize == "crop":
            image = cut(image, centred_box(rows, columns, height, width))
        elif self.resize == "pad":
            return self._padded(image)
        return self._backend.resize(image, height, width)

    def _padded(self, image: np.ndarray) -> np.ndarray:
        """The whole image in the middle, and black around it; the arithmetic is TensorFlow's."""
        height, width, _ = self.shape
        # In float32, as TensorFlow computes: in float64 some sizes would be rounded otherwise.
        rows, columns = np.float32(image.shape[0]), np.float32(image.shape[1])
        ratio = max(columns / np.float32(width), rows / np.float32(height))
        inner_height, inner_width = max(int(rows / ratio), 1), max(int(columns / ratio), 1)
        top = max(int((height - rows / ratio) / 2), 0)
        left = max(int((width - columns / ratio) / 2), 0)
        padded = np.zeros(self.shape, np.uint8)
        padded[top : top + inner_height, left : left + inner_width] = self._backend.resize(
            image, inner_height, inner_width
        )
        return padded


def read_file(path: str, max_pixels: int | None = None) -> bytes:
    """The content of a regular file; `DamagedExample` for anything else.

    With `max_pixels`, a file whose first bytes show too many pixels, or no image, is not read.
    """
    if is_address(path):
        try:
            return fetched(path, functools.partial(require_readable, max_pixels=max_pixels))
        except (FileNotFoundError, IsADirectoryError) as error:
            raise DamagedExample(cause_of(error)) from None
    try:
        file = os.open(path, _OPEN)
        try:
            return content(file, max_pixels)
        finally:
            os.close(file)
    except DamagedExample:
        raise
    # The latter is what a zero byte in a path ends in, and what cannot be encoded.
    except (OSError, ValueError) as error:
        raise DamagedExample(cause_of(error)) from None


def content(file: int, max_pixels: int | None) -> bytes:
    status = os.fstat(file)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError
    if not stat.S_ISREG(status.st_mode):
        raise DamagedExample("it is not a regular file")
    size = status.st_size
    if size > START:
        require_readable(os.read(file, START), size, max_pixels)
        os.lseek(file, 0, os.SEEK_SET)
    # All in one piece of memory, which to join two would take twice.
    data = os.read(file, size)
    # Some systems read less than they are asked for.
    while len(data) < size and (more := os.read(file, size - len(data))):
        data += more
    return data


def require_readable(beginning: bytes, size: int, max_pixels: int | None) -> None:
    if size > MAX_BYTES:
        raise DamagedExample(f"it has {size:,} bytes, too many for an image")
    if max_pixels is not None:
        look(beginning[:START], size, max_pixels)


def cause_of(error: OSError | ValueError) -> str:
    if isinstance(error, FileNotFoundError):
        return "it does not exist, or not any more"
    if isinstance(error, IsADirectoryError):
        return "it is a directory"
    if isinstance(error, PermissionError):
        return "permission to read it is denied"
    if isinstance(error, ValueError):
        return f"no file can have this path: {error}"
    return error.strerror or str(error)


def random_box(height: int, width: int, seed: np.ndarray) -> Box:
    # Python's own generator starts two to three times as fast as NumPy's: 4 to 7 us against 13 to
    # 16.
    draw = random.Random(int(seed[0]) << 32 | int(seed[1])).random
    for _ in range(TRIES):
        area = height * width * (AREAS[0] + (AREAS[1] - AREAS[0]) * draw())
        aspect = math.exp(ASPECTS[0] + (ASPECTS[1] - ASPECTS[0]) * draw())
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            top, left = int(draw() * (height - rows + 1)), int(draw() * (width - columns + 1))
            return Box(top, left, rows, columns)
    # Too narrow an image: the largest part in its middle that has an allowed aspect ratio.
    aspect = min(max(width / height, 3 / 4), 4 / 3)
    rows, columns = min(height, round(width / aspect)), min(width, round(height * aspect))
    rows, columns = max(rows, 1), max(columns, 1)
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def centred_box(height: int, width: int, target_height: int, target_width: int) -> Box:
    """The largest part in the middle with another aspect ratio, by Keras's arithmetic."""
    rows = int(np.float32(width * target_height) / np.float32(target_width))
    columns = int(np.float32(height * target_width) / np.float32(target_height))
    rows, columns = max(min(height, rows), 1), max(min(width, columns), 1)
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def require_size(image_size: Any) -> tuple[int, int]:
    """The size as two integers; one counts for both. A `ValueError` for anything else."""
    if isinstance(image_size, int | np.integer):
        image_size = (image_size, image_size)
    try:
        height, width = (int(side) for side in image_size if side == int(side))
    except (TypeError, ValueError):
        height = width = 0
    if height < 1 or width < 1:
        raise value_error(
            "`image_size` is not a height and a width.",
            "Expected `(height, width)`, or one integer for both: all images of a batch have "
            "the same shape.",
            "Pass for example image_size=(224, 224).",
            image_size=image_size,
        )
    return height, width
