"""Changes images as `ImageDataGenerator.apply_transform` does, with OpenCV."""

from collections.abc import Mapping

import numpy as np

FILL_MODES = ("nearest", "constant", "reflect", "wrap")
"""The documented values of `fill_mode`."""

# More than interpolation in float32 can be off, and less than anybody sees.
_ROUNDING = 1e-3


def warp(
    image: np.ndarray, matrix: np.ndarray, out: np.ndarray, fill_mode: str, cval: float
) -> None:
    """Fill `out` with an image seen through an affine map, interpolated linearly.

    What lies outside is filled as SciPy does: its `"constant"` does not blend at the border,
    and its `"wrap"` repeats after one pixel less than the image has.
    `matrix` says where `(x, y, 1)` of the result comes from.
    """
    import cv2

    height, width = out.shape[:2]
    target = out[..., 0] if out.shape[2] == 1 else out
    if fill_mode == "wrap":
        x, y = coordinates(matrix, height, width)
        x, y = wrapped(x, width), wrapped(y, height)
        maps = x.astype(np.float32), y.astype(np.float32)
        border = cv2.BORDER_REPLICATE
        result = cv2.remap(image, *maps, cv2.INTER_LINEAR, dst=target, borderMode=border)
    else:
        border = cv2.BORDER_REFLECT if fill_mode == "reflect" else cv2.BORDER_REPLICATE
        result = cv2.warpAffine(
            image,
            matrix,
            (width, height),
            dst=target,
            flags=cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP,
            borderMode=border,
        )
    # OpenCV writes into `dst` only where type and layout suit it.
    if not np.may_share_memory(result, target):
        target[...] = result
    if fill_mode == "constant":
        x, y = coordinates(matrix, height, width)
        out[(x < 0) | (x > width - 1) | (y < 0) | (y > height - 1)] = cval


def coordinates(matrix: np.ndarray, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each pixel of the result comes from: x and y, `float64[height, width]` each."""
    columns, rows = np.arange(width), np.arange(height)[:, None]
    (a, b, c), (d, e, f) = matrix
    return a * columns + (b * rows + c), d * columns + (e * rows + f)


def wrapped(positions: np.ndarray, size: int) -> np.ndarray:
    """Positions outside of an axis, brought inside as SciPy's `"wrap"` does."""
    last = size - 1
    inside = (positions >= 0) & (positions <= last)
    return np.where(inside, positions, np.mod(positions, max(last, 1)))


def change_colors(image: np.ndarray, parameters: Mapping[str, float]) -> None:
    """Shift the channels and the brightness of a float image, in place, as far as it was drawn."""
    intensity = parameters.get("channel_shift_intensity")
    if intensity is not None:
        low, high = image.min(), image.max()
        image += np.float32(intensity)
        np.clip(image, low, high, out=image)
    brightness = parameters.get("brightness")
    if brightness is not None:
        change_brightness(image, brightness)


def change_brightness(image: np.ndarray, factor: float) -> None:
    """Multiply a float image as Pillow would after a cut to 8 bits, in place; alpha stays.

    If it leaves the range of 0 to 255 it is scaled to this range and back, as Keras does.
    """
    low, high = float(image.min()), float(image.max())
    if low < -_ROUNDING or high > 255 + _ROUNDING:
        span = high - low
        levels = ((image - low) * (255 / span if span else 1) + _ROUNDING).astype(np.uint8)
        image[...] = brightened(levels, factor) * np.float32(span / 255) + np.float32(low)
        return
    image[...] = brightened((image + np.float32(_ROUNDING)).clip(0, 255).astype(np.uint8), factor)


def brightened(levels: np.ndarray, factor: float) -> np.ndarray:
    """An 8-bit image, each of whose values is multiplied, cut to the range and to an integer."""
    # Of 256 values and not of each pixel: there are no others.
    table = np.arange(256, dtype=np.float32) * np.float32(factor)
    table = np.trunc(table.clip(0, 255)).astype(np.float32)
    result = table[levels]
    if levels.shape[2] == 4:
        result[..., 3] = levels[..., 3]
    return result


def flipped(image: np.ndarray, horizontal: bool, vertical: bool) -> np.ndarray:
    """An image, mirrored; as a copy, since NumPy is slow on views that run backwards."""
    import cv2

    if not (horizontal or vertical):
        return image
    axes = (-1 if vertical else 1) if horizontal else 0
    return cv2.flip(image, axes).reshape(image.shape)
