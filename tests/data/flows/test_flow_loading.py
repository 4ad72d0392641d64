"""Flows load images as Keras does, or, in one step, almost so."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.data.flows.loading import FlowLoading
from keras_multigpu.data.flows.loading import nearest_pixels
from keras_multigpu.data.from_flow import from_flow

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


# One step instead of two, which loads a large image first.


@pytest.mark.parametrize("fill_mode", ["nearest", "constant", "reflect", "wrap"])
@pytest.mark.parametrize("keep_aspect_ratio", [False, True])
def test_one_step_is_near_two_steps(tmp_path, fill_mode, keep_aspect_ratio):
    """A photograph much larger than the result: the same picture."""
    from PIL import Image

    (tmp_path / "class").mkdir()
    Image.fromarray(photographs.astronaut()).save(tmp_path / "class" / "a.jpg", quality=95)
    generator = Generator(fill_mode=fill_mode, cval=7, rotation_range=30, zoom_range=0.2)
    flow = generator.flow_from_directory(
        tmp_path,
        target_size=(128, 100),
        class_mode=None,
        interpolation="box",
        keep_aspect_ratio=keep_aspect_ratio,
    )
    twice, once = (
        next(iter(from_flow(flow, resample=resample).epoch(0))).numpy()
        for resample in ("twice", "once")
    )
    assert np.abs(twice - once).mean() < 6
    # What lies outside is where it was.
    assert ((twice == 7).all(-1) == (once == 7).all(-1)).mean() > 0.999


def test_large_jpegs_are_reduced_while_they_are_decoded(tmp_path):
    from PIL import Image

    path = str(tmp_path / "photo.jpg")
    Image.fromarray(photographs.astronaut()).resize((1000, 700)).save(path)
    sizes = {
        (100, 100): (175, 250),
        (88, 100): (175, 250),
        (80, 80): (88, 125),
        (400, 300): (700, 1000),
    }
    for wanted, loaded in sizes.items():
        for color_mode, channels in (("rgb", 3), ("grayscale", 1)):
            loading = FlowLoading(wanted, color_mode, "nearest", False)
            assert loading.load_large(path).shape == (*loaded, channels)


def test_images_too_long_for_opencv_are_resized_first(tmp_path):
    from PIL import Image

    path = str(tmp_path / "long.png")
    Image.new("L", (40_000, 2), 9).save(path)
    loading = FlowLoading((2, 8), "rgb", "nearest", False)
    assert (loading.load_large(path) == np.full((2, 8, 3), 9)).all()


def test_one_step_without_a_warp_keeps_the_size(tmp_path):
    from PIL import Image

    (tmp_path / "class").mkdir()
    Image.fromarray(photographs.astronaut()).save(tmp_path / "class" / "a.png")
    flow = Generator(rescale=1 / 255).flow_from_directory(
        tmp_path, target_size=(100, 90), class_mode=None, color_mode="grayscale"
    )
    once = next(iter(from_flow(flow, resample="once").epoch(0))).numpy()
    twice = next(iter(from_flow(flow).epoch(0))).numpy()
    assert once.shape == twice.shape == (1, 100, 90, 1)
    assert abs(once.mean() - twice.mean()) < 0.01
