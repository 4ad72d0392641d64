"""Decoding and resizing by OpenCV and TensorFlow, or by TensorFlow alone.

OpenCV, where it is installed, decodes JPEG, WebP and BMP and resizes in the usual ways; it is
faster, above all from many Python threads. TensorFlow does the rest. Pixels match those of
`keras.utils.image_dataset_from_directory` within one level, with two exceptions. JPEGs are decoded
with the accurate inverse transform, as OpenCV, Pillow and browsers do; TensorFlow's default is a
faster one that differs by up to ten levels. And images that Keras cannot decode, or gets wrong,
such as grey WebPs and BMPs with a palette, are decoded correctly.

Neither detects corrupt bytes within a JPEG, WebP or BMP that still decode. The JPEG library reports
some on standard error, in a line that can only be silenced for the whole process.
"""

from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from keras_multigpu.data.decoding.header import Header
from keras_multigpu.data.pipeline.damage import DamagedExample

# A flag of an extended WebP. What TensorFlow 2.21 makes of such a file is not a frame of it.
ANIMATED = 2

# How bright the colours are, by ITU-R BT.601.
LUMA = np.array([0.299, 0.587, 0.114], np.float32)

SMOOTHING = ("gaussian", "mitchellcubic")
"""Interpolations that change an image which has the right size already."""

# TensorFlow is as fast with these, and a damaged one does it no harm: OpenCV 5.0 can crash on an
# animated PNG with wrong checksums.
BY_TENSORFLOW = ("PNG", "GIF")

# Up to this many pixels OpenCV decodes the whole JPEG sooner than TensorFlow a part of it.
SMALL = 2**20

# How far down a part of a JPEG may reach for TensorFlow to have it, with all that is above it,
# sooner than OpenCV has the whole. From several threads; one thread alone gains up to 0.9.
PAYS = 0.6


class Box(NamedTuple):
    """A part of an image."""

    top: int
    left: int
    height: int
    width: int


def backend(channels: int, interpolation: str) -> "OpenCVBackend | TensorFlowBackend":
    tensorflow = TensorFlowBackend(channels, interpolation)
    try:
        import cv2
    except ImportError:
        return tensorflow
    # Older ones cannot decode to RGB.
    return OpenCVBackend(cv2, tensorflow) if hasattr(cv2, "IMREAD_COLOR_RGB") else tensorflow


class TensorFlowBackend:
    """TensorFlow's operations, run eagerly, for 1, 3 or 4 channels."""

    def __init__(self, channels: int, interpolation: str) -> None:
        self.channels = channels
        self.interpolation = interpolation

    def read(self, data: bytes, header: Header, box: Box | None = None) -> np.ndarray:
        try:
            # Where TensorFlow sees a GPU it would put the pixels there, and bring them back.
            with tf.device("CPU:0"):
                decoded = self._decoded(data, header, box)
        except tf.errors.InvalidArgumentError as error:
            # What it says about the image, without where in the program.
            text = str(error).partition("}} ")[2] or str(error)
            words = text.partition(" [Op:")[0].rstrip(". ")
            raise DamagedExample(f"TensorFlow cannot decode it: {words}") from None
        image = viewed(decoded)
        if header.kind == "BMP":
            image = from_palette(image, data, header)
        return with_channels(image, self.channels)

    read_part = read

    def _decoded(self, data: bytes, header: Header, box: Box | None) -> tf.Tensor:
        if header.kind == "JPEG":
            # TensorFlow has no alpha for JPEG, and no grey for CMYK.
            channels = 1 if self.channels == 1 and header.components != 4 else 3
            accurate = {"channels": channels, "dct_method": "INTEGER_ACCURATE"}
            if box is None:
                return tf.io.decode_jpeg(data, **accurate)
            return tf.io.decode_and_crop_jpeg(data, box, **accurate)
        if header.kind == "PNG":
            return tf.io.decode_png(data, channels=self.channels)
        if header.kind == "WebP" and data[12:16] == b"VP8X" and data[20] & ANIMATED:
            raise DamagedExample("it is an animated WebP, and those only OpenCV decodes")
        if header.kind == "GIF":
            # The first frame alone: no time and memory for the others.
            data = data[: header.end] + b";"
        return tf.io.decode_image(data, expand_animations=False)

    def resize(self, image: np.ndarray, height: int, width: int) -> np.ndarray:
        same = image.shape[:2] == (height, width)
        if same and self.interpolation not in SMOOTHING:
            return image
        with tf.device("CPU:0"):
            resized = viewed(
                smoothed(image, self.interpolation)
                if same
                else tf.image.resize(image, (height, width), method=self.interpolation)
            )
        if resized.dtype == np.uint8:
            return resized
        # Bicubic and Lanczos kernels go beyond black and white at an edge: -19 and 274, for
        # example.
        return np.clip(np.rint(resized), 0, 255).astype(np.uint8)


class OpenCVBackend:
    """OpenCV; TensorFlow for the few things in which OpenCV differs from it."""

    def __init__(self, cv2: Any, tensorflow: TensorFlowBackend) -> None:
        self._cv2 = cv2
        self._tensorflow = tensorflow
        self._channels = tensorflow.channels
        # The others are not TensorFlow's: their kernels, or which of two equally near pixels wins.
        self._methods = {"bilinear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA}
        # As TensorFlow and Keras, which do not turn photographs that say how they were taken.
        self._flags = cv2.IMREAD_IGNORE_ORIENTATION | (
            cv2.IMREAD_GRAYSCALE if self._channels == 1 else cv2.IMREAD_COLOR_RGB
        )

    def read(self, data: bytes, header: Header) -> np.ndarray:
        flags = self._flags
        if header.kind in BY_TENSORFLOW or (self._channels == 4 and header.kind == "BMP"):
            return self._tensorflow.read(data, header)
        if self._channels == 4 and header.kind == "WebP":
            flags = self._cv2.IMREAD_UNCHANGED
        try:
            image = self._cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        except self._cv2.error as error:
            raise DamagedExample(f"OpenCV cannot decode it: {error.err}") from None
        if image is None:
            raise DamagedExample(f"OpenCV cannot decode this {header.kind}, its data is corrupt")
        if image.ndim == 2:
            image = image[..., None]
        if flags == self._cv2.IMREAD_UNCHANGED:
            image = image[..., [2, 1, 0, 3][: image.shape[2]]]
        return with_channels(image, self._channels)

    def read_part(self, data: bytes, header: Header, box: Box) -> np.ndarray:
        """A part of a JPEG, by decoding that part alone where this takes less time."""
        small = header.width * header.height <= SMALL
        if small or header.progressive or box.top + box.height > PAYS * header.height:
            return cut(self.read(data, header), box)
        return self._tensorflow.read(data, header, box)

    def resize(self, image: np.ndarray, height: int, width: int) -> np.ndarray:
        method = self._methods.get(self._tensorflow.interpolation)
        rows, columns, _ = image.shape
        grows = height > rows or width > columns
        if method is None or (method == self._cv2.INTER_AREA and grows):
            return self._tensorflow.resize(image, height, width)
        if (rows, columns) == (height, width):
            return image
        # TensorFlow's resizing and its quantized one were tried, and are no faster.
        resized = self._cv2.resize(image, (width, height), interpolation=method)
        return resized if resized.ndim == 3 else resized[..., None]


def cut(image: np.ndarray, box: Box) -> np.ndarray:
    return image[box.top : box.top + box.height, box.left : box.left + box.width]


def viewed(tensor: tf.Tensor) -> np.ndarray:
    # `numpy()` copies, and this tensor is not used elsewhere.
    return np.asarray(memoryview(tensor))


def smoothed(image: np.ndarray, kernel: str) -> tf.Tensor:
    """An image resized to its own size, which `tf.image.resize` leaves out and Keras does not."""
    return tf.raw_ops.ScaleAndTranslate(
        images=image[None],
        size=image.shape[:2],
        scale=(1.0, 1.0),
        translation=(0.0, 0.0),
        kernel_type=kernel,
        antialias=False,
    )[0]


def with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    if image.shape[2] == channels:
        return image
    if channels == 1:
        return np.rint(image[..., :3] @ LUMA)[..., None].astype(np.uint8)
    colors = image[..., :3] if image.shape[2] > 1 else np.repeat(image, 3, axis=2)
    if channels == 3:
        return np.ascontiguousarray(colors)
    return np.concatenate([colors, np.full_like(colors[..., :1], 255)], axis=2)


def from_palette(image: np.ndarray, data: bytes, header: Header) -> np.ndarray:
    """A BMP's colours; of one with a palette, TensorFlow gives their numbers in it."""
    if image.shape[:2] != (header.height, header.width):
        raise DamagedExample("TensorFlow cannot decode it: it is an old kind of BMP")
    if image.shape[2] > 1:
        return image
    start = 14 + int.from_bytes(data[14:18], "little")
    end = min(int.from_bytes(data[10:14], "little"), start + 1024)
    entries = np.frombuffer(data[start : end - (end - start) % 4], np.uint8).reshape(-1, 4)
    palette = np.zeros((256, 3), np.uint8)
    palette[: len(entries)] = entries[:, 2::-1]
    return palette[image[..., 0]]
