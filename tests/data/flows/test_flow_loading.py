"""Flows load images as Keras does, or, in one step, almost so."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.data.flows.loading import FlowLoading, nearest_pixels

pytest.importorskip("cv2")
photographs = pytest.importorskip("skimage.data")
Generator = tf.keras.preprocessing.image.ImageDataGenerator  # noqa: TID251


@pytest.fixture(scope="module")
def photo_files(tmp_path_factory):
    """One photograph in several formats and colour modes."""
    from PIL import Image

    folder = tmp_path_factory.mktemp("photos")
    image = Image.fromarray(photographs.coffee()).resize((301, 203))
    paths = []
    for mode, suffix in [
        ("RGB", "jpg"),
        ("L", "jpg"),
        ("CMYK", "jpg"),
        ("RGB", "png"),
        ("RGBA", "png"),
        ("P", "png"),
        ("L", "png"),
        ("1", "png"),
        ("LA", "png"),
        ("RGB", "bmp"),
        ("RGB", "tif"),
        ("RGB", "ppm"),
    ]:
        paths.append(str(folder / f"{mode}.{suffix}"))
        image.convert(mode).save(paths[-1])
    rotated = str(folder / "rotated.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.save(rotated, exif=exif, progressive=True)
    return [*paths, rotated]


@pytest.mark.parametrize("color_mode", ["rgb", "rgba", "grayscale"])
@pytest.mark.parametrize("keep_aspect_ratio", [False, True])
@pytest.mark.parametrize(
    ("size", "interpolation"),
    [
        ((64, 80), "nearest"),
        ((203, 301), "nearest"),
        ((333, 250), "nearest"),
        ((64, 80), "bilinear"),
        ((250, 90), "bicubic"),
        ((64, 80), "lanczos"),
        ((64, 80), "box"),
        ((64, 80), "hamming"),
    ],
)
def test_loading_is_keras_loading(photo_files, color_mode, keep_aspect_ratio, size, interpolation):
    """Bit by bit, for every format, colour mode and method of resizing."""
    loading = FlowLoading(size, color_mode, interpolation, keep_aspect_ratio)
    for path in photo_files:
        wanted = keras.utils.img_to_array(
            keras.utils.load_img(
                path,
                color_mode=color_mode,
                target_size=size,
                interpolation=interpolation,
                keep_aspect_ratio=keep_aspect_ratio,
            )
        )
        np.testing.assert_array_equal(loading.load(path), wanted, err_msg=path)


def test_nearest_pixels_are_pillows():
    """For many pairs of sizes, with and without an offset."""
    from PIL import Image

    random = np.random.default_rng(1)
    for length, size in random.integers(2, 700, (200, 2)):
        low = int(random.integers(0, length - 1)) * int(random.integers(0, 2))
        axis = Image.fromarray(np.arange(length, dtype=np.int32)[None])
        box = (low, 0, int(length), 1)
        wanted = np.asarray(axis.resize((int(size), 1), Image.Resampling.NEAREST, box=box))[0]
        pixels, _ = nearest_pixels(low, int(length), int(size))
        np.testing.assert_array_equal(pixels, wanted)


def test_pixels_that_opencv_chooses_otherwise(tmp_path):
    """Where a position is as near to two pixels, the table decides."""
    from PIL import Image

    image = np.random.default_rng(2).integers(0, 255, (50, 467, 3), dtype=np.uint8)
    path = str(tmp_path / "image.bmp")
    Image.fromarray(image).save(path)
    loading = FlowLoading((100, 40), "rgb", "nearest", True)
    wanted = keras.utils.load_img(path, target_size=(100, 40), keep_aspect_ratio=True)
    np.testing.assert_array_equal(loading.load(path), np.asarray(wanted))
