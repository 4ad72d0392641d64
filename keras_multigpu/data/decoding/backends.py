"""Decoding and resizing by OpenCV and TensorFlow, or by TensorFlow alone.

Where OpenCV is installed, it decodes JPEG, WebP and BMP and does the common kinds of resizing; it
is faster, above all from many Python threads. TensorFlow does the rest. Pixels match those of
`keras.utils.image_dataset_from_directory` within one level, with two exceptions:

- JPEGs are decoded with the accurate inverse transform, as in OpenCV, Pillow and browsers.
  TensorFlow's default is a faster one that differs by up to ten levels.
- Images that Keras cannot decode or decodes wrongly, such as grey WebPs and BMPs with a palette,
  are decoded correctly.

Corrupt bytes within a JPEG, WebP or BMP that still decodes go unnoticed. The JPEG library reports
some of them on standard error; only the whole process can silence that.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from keras_multigpu.data.decoding.formats import FORMAT_OF
from keras_multigpu.data.decoding.header import Header
from keras_multigpu.data.pipeline.damage import DamagedExample

# The weights of red, green and blue in the luminance (ITU-R BT.601).
GRAY_OF_RGB = np.array([0.299, 0.587, 0.114], np.float32)


def backend(channels: int, interpolation: str) -> "OpenCVBackend | TensorFlowBackend":
    tensorflow = TensorFlowBackend(channels, interpolation)
    try:
        import cv2
    except ImportError:
        return tensorflow
    # Older versions cannot decode to RGB.
    return OpenCVBackend(cv2, tensorflow) if hasattr(cv2, "IMREAD_COLOR_RGB") else tensorflow


class TensorFlowBackend:
    """TensorFlow's operations, run eagerly, for 1, 3 or 4 channels."""

    def __init__(self, channels: int, interpolation: str) -> None:
        self.channels = channels
        self.interpolation = interpolation

    def read(self, data: bytes, header: Header) -> np.ndarray:
        try:
            # Without this, TensorFlow would copy the pixels to a GPU and back.
            with tf.device("CPU:0"):
                image = as_numpy(FORMAT_OF[header.kind].decode(data, header, self.channels))
        except tf.errors.InvalidArgumentError as error:
            # The part of the message about the image, without the place in the program.
            text = str(error).partition("}} ")[2] or str(error)
            words = text.partition(" [Op:")[0].rstrip(". ")
            raise DamagedExample(f"TensorFlow cannot decode it: {words}") from None
        if header.kind == "BMP":
            image = apply_palette(image, data, header)
        return with_channels(image, self.channels)

    def resize(self, image: np.ndarray, height: int, width: int) -> np.ndarray:
        if image.shape[:2] == (height, width):
            return image
        with tf.device("CPU:0"):
            resized = as_numpy(tf.image.resize(image, (height, width), method=self.interpolation))
        if resized.dtype == np.uint8:
            return resized
        # Bicubic and Lanczos kernels overshoot at edges, to -19 and 274 for example.
        return np.clip(np.rint(resized), 0, 255).astype(np.uint8)


class OpenCVBackend:
    """OpenCV, and TensorFlow where OpenCV's results would differ."""

    def __init__(self, cv2: Any, tensorflow: TensorFlowBackend) -> None:
        self._cv2 = cv2
        self._tensorflow = tensorflow
        self._channels = tensorflow.channels
        # Other methods differ from TensorFlow's in their kernels, or in how they break ties.
        self._methods = {"bilinear": cv2.INTER_LINEAR, "area": cv2.INTER_AREA}
        # Like TensorFlow and Keras, ignore the orientation that a camera has stored.
        self._flags = cv2.IMREAD_IGNORE_ORIENTATION | (
            cv2.IMREAD_GRAYSCALE if self._channels == 1 else cv2.IMREAD_COLOR_RGB
        )

    def read(self, data: bytes, header: Header) -> np.ndarray:
        flags = self._flags
        if not FORMAT_OF[header.kind].by_opencv or (self._channels == 4 and header.kind == "BMP"):
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

    def resize(self, image: np.ndarray, height: int, width: int) -> np.ndarray:
        method = self._methods.get(self._tensorflow.interpolation)
        rows, columns, _ = image.shape
        grows = height > rows or width > columns
        if method is None or (method == self._cv2.INTER_AREA and grows):
            return self._tensorflow.resize(image, height, width)
        if (rows, columns) == (height, width):
            return image
        resized = self._cv2.resize(image, (width, height), interpolation=method)
        return resized if resized.ndim == 3 else resized[..., None]


def as_numpy(tensor: tf.Tensor) -> np.ndarray:
    # `numpy()` copies, and this tensor is not used elsewhere.
    return np.asarray(memoryview(tensor))


def with_channels(image: np.ndarray, channels: int) -> np.ndarray:
    if image.shape[2] == channels:
        return image
    if channels == 1:
        return np.rint(image[..., :3] @ GRAY_OF_RGB)[..., None].astype(np.uint8)
    colors = image[..., :3] if image.shape[2] > 1 else np.repeat(image, 3, axis=2)
    if channels == 3:
        return np.ascontiguousarray(colors)
    return np.concatenate([colors, np.full_like(colors[..., :1], 255)], axis=2)


def apply_palette(image: np.ndarray, data: bytes, header: Header) -> np.ndarray:
    """The colors of a BMP. For one with a palette, TensorFlow returns the indices into it."""
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
