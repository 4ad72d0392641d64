"""Loads images as `ImageDataGenerator` flows do: JPEGs with OpenCV, everything else with Pillow."""

import functools
import io
from typing import NamedTuple

import keras
import numpy as np

from keras_multigpu.data.decoding.decoder import read_file
from keras_multigpu.data.decoding.header import read_header
from keras_multigpu.data.pipeline.damage import DamagedExample

_JPEG = b"\xff\xd8\xff"


class FlowLoading(NamedTuple):
    """How a flow loads its images, in the words of `keras.utils.load_img`."""

    size: tuple[int, int]
    color_mode: str
    interpolation: str
    keep_aspect_ratio: bool

    def load(self, path: str) -> np.ndarray:
        """The same pixels as `keras.utils.load_img` gives, resized; `[height, width, channels]`."""
        data = read_file(path)
        image = decoded_jpeg(data, self.color_mode)
        if image is None:
            return self._loaded_by_keras(data)
        if image.shape[:2] == self.size:
            return image
        box = self._box(*image.shape[:2])
        if self.interpolation != "nearest":
            return resized_by_pillow(image, self.size, self.interpolation, box)
        return resized_to_nearest(image, self.size, box)

    def _loaded_by_keras(self, data: bytes) -> np.ndarray:
        try:
            image = keras.utils.load_img(
                io.BytesIO(data),
                color_mode=self.color_mode,
                target_size=self.size,
                interpolation=self.interpolation,
                keep_aspect_ratio=self.keep_aspect_ratio,
            )
        except Exception as error:
            # Pillow raises whatever its format plugins come across.
            raise DamagedExample(f"Pillow says: {error}" if data else "it is empty") from error
        return keras.utils.img_to_array(image, data_format="channels_last", dtype="float32")

    def _box(self, height: int, width: int) -> tuple[int, int, int, int]:
        """`(left, top, right, bottom)`: the part of an image that is used."""
        if not self.keep_aspect_ratio:
            return 0, 0, width, height
        rows = min(height, width * self.size[0] // self.size[1])
        columns = min(width, height * self.size[1] // self.size[0])
        top, left = (height - rows) // 2, (width - columns) // 2
        return left, top, left + columns, top + rows


def decoded_jpeg(data: bytes, color_mode: str) -> np.ndarray | None:
    """A JPEG's pixels, equal to Pillow's; None for other files and colours."""
    import cv2

    if not data.startswith(_JPEG):
        return None
    header = read_header(data)
    # Of four, CMYK, OpenCV makes other colours than Pillow: two levels off in a random picture.
    if color_mode == "rgba" or header.components not in (1, 3):
        return None
    single = header.components == 1 and color_mode == "grayscale"
    flags = cv2.IMREAD_IGNORE_ORIENTATION | (
        cv2.IMREAD_GRAYSCALE if single else cv2.IMREAD_COLOR_RGB
    )
    encoded = np.frombuffer(data, np.uint8)
    image = cv2.imdecode(encoded, flags)
    if image is None:
        return None
    if single:
        return image[..., None]
    if color_mode == "grayscale":
        from PIL import Image

        return np.asarray(Image.fromarray(image).convert("L"))[..., None]
    return image


def resized_by_pillow(
    image: np.ndarray, size: tuple[int, int], interpolation: str, box: tuple[int, int, int, int]
) -> np.ndarray:
    """A part of an image, `(left, top, right, bottom)`, resized with Pillow."""
    from PIL import Image

    method = Image.Resampling[interpolation.upper()]
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    resized = np.asarray(picture.resize((size[1], size[0]), method, box=box))
    return resized.reshape(*size, image.shape[2])


def resized_to_nearest(
    image: np.ndarray, size: tuple[int, int], box: tuple[int, int, int, int]
) -> np.ndarray:
    """A part of an image, resized to the nearest pixels; the same ones as Pillow's."""
    import cv2

    left, top, right, bottom = box
    rows, rows_agree = nearest_pixels(top, bottom, size[0])
    columns, columns_agree = nearest_pixels(left, right, size[1])
    if not (rows_agree and columns_agree):
        return image.take(rows, axis=0).take(columns, axis=1)
    part = image[top:bottom, left:right]
    resized = cv2.resize(part, (size[1], size[0]), interpolation=cv2.INTER_NEAREST_EXACT)
    return resized.reshape(*size, image.shape[2])


@functools.lru_cache(maxsize=4096)
def nearest_pixels(low: int, high: int, size: int) -> tuple[np.ndarray, bool]:
    """Which pixels along an axis Pillow takes, and whether OpenCV takes the same."""
    import cv2

    # Where a position is as near to two pixels, it depends on rounding. Pillow adds step upon step
    # in float64; OpenCV, twice as fast as indexing, counts in fixed point.
    step = (high - low) / size
    steps = np.full(size, step)
    steps[0] = low + step * 0.5
    pixels = np.cumsum(steps).astype(np.int64)
    axis = np.arange(low, high, dtype=np.float32)[None]
    theirs = cv2.resize(axis, (size, 1), interpolation=cv2.INTER_NEAREST_EXACT)[0]
    return pixels, np.array_equal(pixels, theirs)
