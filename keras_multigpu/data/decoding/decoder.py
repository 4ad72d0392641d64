"""`ImageDecoder`: the content of an image file as an array of fixed size."""

import copy
import math
import os
import random
import stat
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from keras_multigpu.checks import require_choice, value_error
from keras_multigpu.data.addresses import Unreachable, fetch, is_address
from keras_multigpu.data.decoding.backends import backend
from keras_multigpu.data.decoding.formats import read_header
from keras_multigpu.data.pipeline.damage import DamagedExample, is_of_machine, unread

CHANNELS = {"grayscale": 1, "rgb": 3, "rgba": 4}
INTERPOLATIONS = ("bilinear", "nearest", "bicubic", "area", "lanczos3", "lanczos5")

RESIZES = ("stretch", "crop", "pad", "random_crop")
"""The ways to give an image its size."""

# Linux reads at most this in one call, and no image of `MAX_PIXELS` has more bytes.
MAX_BYTES = 2**31 - 2**12

# Areas and log aspect ratios of `"random_crop"`: those of Inception (Szegedy et al., "Going deeper
# with convolutions", 2014) and of most trainings since. torchvision tries as often.
AREAS = (0.08, 1.0)
ASPECTS = (math.log(3 / 4), math.log(4 / 3))
TRIES = 10

# Opening a pipe must not block.
_OPEN = os.O_RDONLY | os.O_NONBLOCK


ImageSize = int | tuple[int, int] | Mapping[int, int | tuple[int, int]] | None
"""Height and width, or one integer for both; or such a size for each first epoch of it."""


class Box(NamedTuple):
    """A part of an image."""

    top: int
    left: int
    height: int
    width: int


class ImageDecoder:
    """Decodes images to `uint8` arrays of one size; safe to use from several threads.

    Images are decoded and resized as by `keras.utils.image_dataset_from_directory`, and rounded.
    The content decides the format, not the file's name. An animation gives its first frame and
    16-bit images their upper 8 bits; the camera's orientation is ignored.
    The arguments are those of `from_directory`.
    """

    def __init__(
        self,
        image_size: ImageSize,
        *,
        color_mode: str = "rgb",
        interpolation: str = "bilinear",
        resize: str = "stretch",
    ) -> None:
        # The size from each of these epochs on; the last one is that of evaluation.
        self.sizes = sizes_by_epoch(image_size)
        height, width = self.sizes[max(self.sizes)]
        require_choice("color_mode", color_mode, CHANNELS)
        require_choice("interpolation", interpolation, INTERPOLATIONS)
        require_choice("resize", resize, RESIZES)
        self.shape = (height, width, CHANNELS[color_mode])
        self.draws = resize == "random_crop"
        self.resize = resize
        self._interpolation = interpolation
        self._backend = backend(CHANNELS[color_mode], interpolation)

    def in_epoch(self, epoch: int) -> "ImageDecoder":
        """The same with the size of an epoch."""
        same = copy.copy(self)
        size = self.sizes[max(first for first in self.sizes if first <= epoch)]
        same.sizes, same.shape = {0: size}, (*size, self.shape[2])
        return same

    def without_draws(self) -> "ImageDecoder":
        """The same without random draws: the center of an image instead of a random part."""
        same = self.in_epoch(max(self.sizes))
        if self.draws:
            same.draws, same.resize = False, "crop"
        return same

    @property
    def settings(self) -> dict[str, Any]:
        """Everything but the file that decides the pixels."""
        shape = list(self.shape)
        known = {"shape": shape, "interpolation": self._interpolation, "resize": self.resize}
        return {**known, "sizes": sorted(self.sizes.items())} if len(self.sizes) > 1 else known

    def decode(self, data: bytes, seed: np.ndarray) -> np.ndarray:
        image = self._backend.read(data, read_header(data))
        height, width, _ = self.shape
        rows, columns, _ = image.shape
        if self.draws:
            image = cut(image, random_box(rows, columns, seed))
        elif self.resize == "crop":
            image = cut(image, centered_box(rows, columns, height, width))
        elif self.resize == "pad":
            return self._pad(image)
        return self._backend.resize(image, height, width)

    def _pad(self, image: np.ndarray) -> np.ndarray:
        """The whole image in the center with black around it, in TensorFlow's arithmetic."""
        height, width, _ = self.shape
        # float32, as in TensorFlow: float64 would round some sizes differently.
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


def cut(image: np.ndarray, box: Box) -> np.ndarray:
    return image[box.top : box.top + box.height, box.left : box.left + box.width]


def read_file(path: str) -> bytes:
    """The content of a regular file; `DamagedExample` for anything else.

    `Unreachable` if it could not be read and may be intact.
    """
    try:
        if is_address(path):
            return fetch(path)
        file = os.open(path, _OPEN)
        try:
            return content(file)
        finally:
            os.close(file)
    except FileNotFoundError:
        cause = "it does not exist, or not any more"
    except IsADirectoryError:
        cause = "it is a directory"
    except PermissionError:
        cause = "permission to read it is denied"
    except Unreachable:
        raise
    except OSError as error:
        if is_of_machine(error):
            raise unread(path, error) from error
        cause = error.strerror or str(error)
    except DamagedExample:
        raise
    except ValueError as error:  # A path with a zero byte, or one that cannot be encoded.
        cause = f"no file can have this path: {error}"
    raise DamagedExample(cause)


def content(file: int) -> bytes:
    status = os.fstat(file)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError
    if not stat.S_ISREG(status.st_mode):
        raise DamagedExample("it is not a regular file")
    size = status.st_size
    if size > MAX_BYTES:
        raise DamagedExample(f"it has {size:,} bytes, too many for an image")
    data = os.read(file, size)
    # Some systems read less than they are asked for.
    while len(data) < size and (more := os.read(file, size - len(data))):
        data += more
    return data


def random_box(height: int, width: int, seed: np.ndarray) -> Box:
    # Python's generator starts faster than NumPy's: in 4 to 7 us instead of 13 to 16.
    draw = random.Random(int(seed[0]) << 32 | int(seed[1])).random
    for _ in range(TRIES):
        area = height * width * (AREAS[0] + (AREAS[1] - AREAS[0]) * draw())
        aspect = math.exp(ASPECTS[0] + (ASPECTS[1] - ASPECTS[0]) * draw())
        rows, columns = round(math.sqrt(area / aspect)), round(math.sqrt(area * aspect))
        if 0 < rows <= height and 0 < columns <= width:
            top, left = int(draw() * (height - rows + 1)), int(draw() * (width - columns + 1))
            return Box(top, left, rows, columns)
    # The image is too narrow: take the largest central part with an allowed aspect ratio.
    aspect = min(max(width / height, 3 / 4), 4 / 3)
    rows, columns = min(height, round(width / aspect)), min(width, round(height * aspect))
    rows, columns = max(rows, 1), max(columns, 1)
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def centered_box(height: int, width: int, target_height: int, target_width: int) -> Box:
    """The largest central part with the target's aspect ratio, in Keras's arithmetic."""
    rows = int(np.float32(width * target_height) / np.float32(target_width))
    columns = int(np.float32(height * target_width) / np.float32(target_height))
    rows, columns = max(min(height, rows), 1), max(min(width, columns), 1)
    return Box((height - rows) // 2, (width - columns) // 2, rows, columns)


def sizes_by_epoch(image_size: Any) -> dict[int, tuple[int, int]]:
    if not isinstance(image_size, Mapping):
        return {0: require_size(image_size)}
    if 0 not in image_size or any(not isinstance(key, int) or key < 0 for key in image_size):
        raise value_error(
            "`image_size` does not say which size each epoch has.",
            "Expected the first epoch of each size, counted from 0.",
            "Pass for example image_size={0: 128, 10: 224}.",
            image_size=image_size,
        )
    return {epoch: require_size(size) for epoch, size in sorted(image_size.items())}


def require_size(image_size: Any) -> tuple[int, int]:
    """The size as two integers; a single integer counts for both."""
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
