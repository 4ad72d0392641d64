"""`ImageDecoder`: the pixels of Keras's own loader, by OpenCV and by TensorFlow."""

import io
import sys
from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.picture_files import animation, encoded, picture, sixteen_bits

from keras_multigpu.data.decoding.decoder import (
    INTERPOLATIONS,
    ImageDecoder,
    centered_box,
    random_box,
)
from keras_multigpu.data.pipeline.damage import DamagedExample

SEED = np.array([1, 2], np.int32)


def by_keras(folder, **settings):
    dataset = keras.utils.image_dataset_from_directory(
        folder, labels=None, shuffle=False, batch_size=None, verbose=False, **settings
    )
    return [np.clip(np.rint(image), 0, 255).astype(int) for image in dataset]


def differences(ours, theirs):
    assert [image.shape for image in ours] == [image.shape for image in theirs]
    return [np.abs(one - other).max() for one, other in zip(ours, theirs, strict=True)]


WAYS = [
    *((interpolation, None, "tensorflow") for interpolation in INTERPOLATIONS),
    ("bilinear", "pad", "opencv"),
    # Of resizing, OpenCV does two kinds; the others, such as "nearest", are left to TensorFlow.
    ("area", None, "opencv"),
    ("nearest", None, "opencv"),
    ("bilinear", "crop", "opencv"),
    ("bicubic", "crop", "tensorflow"),
]


@pytest.mark.parametrize(("interpolation", "way", "any_backend"), WAYS, indirect=["any_backend"])
def test_images_are_resized_as_by_keras(interpolation, way, any_backend, tmp_path):
    """Larger, smaller, narrower and equal images: every pixel is within one level."""
    sizes = [(75, 100), (33, 41), (20, 150), (120, 31), (40, 56), (1, 1)]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(*size)))
    decoder = ImageDecoder((40, 56), interpolation=interpolation, resize=way or "stretch")
    ours = [decoder.decode((tmp_path / f"{i}.png").read_bytes(), SEED) for i in range(len(sizes))]
    assert all(image.dtype == np.uint8 and image.shape == (40, 56, 3) for image in ours)
    settings = {f"{way}_to_aspect_ratio": True} if way else {}
    theirs = by_keras(tmp_path, image_size=(40, 56), interpolation=interpolation, **settings)
    assert max(differences(ours, theirs)) <= 1


@pytest.mark.parametrize("color_mode", ["rgb", "rgba", "grayscale"])
def test_images_are_decoded_as_by_keras(color_mode, any_backend, tmp_path):
    rgba = picture(channels=4)
    files = {
        "a.png": encoded(picture()),
        "b.png": encoded(rgba),
        "c.png": encoded(picture(), mode="L"),
        "d.png": encoded(rgba, mode="LA"),
        "e.png": encoded(picture(), mode="P"),
        "f.png": encoded(picture(), mode="P", transparency=5),
        "g.png": encoded(picture(), mode="1"),
        "h.png": sixteen_bits(picture()),
        "i.png": sixteen_bits(picture(channels=1)),
    }
    if color_mode == "rgb":
        files["j.gif"] = encoded(picture(), "GIF")
        files["k.gif"] = animation("GIF")
        files["l.png"] = animation("PNG")
    if color_mode != "grayscale":
        files["m.bmp"] = encoded(picture(), "BMP")
        files["n.bmp"] = encoded(picture(), "BMP", mode="L")
        files["o.bmp"] = encoded(rgba, "BMP")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    decoder = ImageDecoder((75, 100), color_mode=color_mode)
    ours = [decoder.decode(files[name], SEED) for name in sorted(files)]
    theirs = by_keras(tmp_path, image_size=(75, 100), color_mode=color_mode)
    assert differences(ours, theirs) == [0] * len(files)


JPEGS = {
    "plain": {},
    "progressive": {"progressive": True},
    "grey": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
    "all colours": {"subsampling": 0},
}


@pytest.mark.parametrize("color_mode", ["rgb", "grayscale"])
@pytest.mark.parametrize("options", JPEGS.values(), ids=JPEGS)
def test_jpegs_are_decoded_as_by_tensorflows_accurate_transform(options, color_mode, any_backend):
    """Exactly; CMYK within one level, or two in grey, which TensorFlow cannot decode directly."""
    data = encoded(picture(), "JPEG", quality=90, **options)
    image = ImageDecoder((75, 100), color_mode=color_mode).decode(data, SEED).astype(int)
    cmyk = options.get("mode") == "CMYK"
    channels = 3 if color_mode == "rgb" or cmyk else 1
    expected = tf.io.decode_jpeg(data, channels, dct_method="INTEGER_ACCURATE")
    if cmyk and color_mode == "grayscale":
        expected = tf.image.rgb_to_grayscale(expected)
    assert np.abs(image - expected.numpy()).max() <= (cmyk and channels - len(color_mode) % 2)


def test_jpegs_are_close_to_the_fast_transform_of_keras(any_backend, tmp_path):
    """Keras uses the fast transform, which differs by a few levels."""
    (tmp_path / "a.jpg").write_bytes(encoded(picture(), "JPEG", quality=90))
    ours = ImageDecoder((40, 56)).decode((tmp_path / "a.jpg").read_bytes(), SEED)
    theirs = by_keras(tmp_path, image_size=(40, 56))[0]
    assert np.abs(ours - theirs).mean() < 1.5
    assert np.abs(ours - theirs).max() <= 10


@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", {"quality": 100, "subsampling": 0}), ("GIF", {}), ("BMP", {}), ("BMP", {"mode": "P"}),
     ("WEBP", {"lossless": True})],
)  # fmt: skip
@pytest.mark.parametrize("color_mode", ["rgb", "rgba", "grayscale"])
def test_every_kind_of_file_is_decoded_in_every_color_mode(kind, options, color_mode, any_backend):
    """Even where Keras fails: close to Pillow, with an opaque alpha channel."""
    from PIL import Image

    data = encoded(picture(), kind, **options)
    image = ImageDecoder((75, 100), color_mode=color_mode).decode(data, SEED)
    mode = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}[color_mode]
    expected = np.array(Image.open(io.BytesIO(data)).convert("RGB").convert(mode), int)
    expected = expected.reshape(image.shape)
    assert np.abs(image - expected).mean() < 0.6
    if color_mode == "rgba":
        assert (image[..., 3] == 255).all()


def test_a_transparent_webp_keeps_its_alpha(any_backend):
    rgba = picture(channels=4)
    data = encoded(rgba, "WEBP", lossless=True, exact=True)
    image = ImageDecoder((75, 100), color_mode="rgba").decode(data, SEED)
    np.testing.assert_array_equal(image, rgba)
    image = ImageDecoder((75, 100)).decode(data, SEED)
    np.testing.assert_array_equal(image, rgba[..., :3])


def test_an_animated_webp_is_named_where_opencv_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "cv2", None)
    with pytest.raises(DamagedExample, match="an animated WebP, and those only OpenCV decodes"):
        ImageDecoder((75, 100)).decode(animation("WEBP", lossless=True), SEED)


def test_the_orientation_of_the_camera_is_ignored(any_backend):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # Rotated by 90 degrees.
    turned = encoded(picture(), "JPEG", exif=exif)
    decoder = ImageDecoder((75, 100))
    straight = decoder.decode(encoded(picture(), "JPEG"), SEED)
    np.testing.assert_array_equal(decoder.decode(turned, SEED), straight)


def test_a_random_crop_is_a_part_of_the_whole_image(any_backend):
    data = encoded(picture(), "JPEG")
    whole = ImageDecoder((75, 100)).decode(data, SEED)
    for number in range(20):
        seed = np.array([number, 5], np.int32)
        top, left, height, width = random_box(75, 100, seed)
        part = ImageDecoder((height, width), resize="random_crop").decode(data, seed)
        np.testing.assert_array_equal(part, whole[top : top + height, left : left + width])


def test_random_crops_have_the_areas_and_aspects_of_inception():
    """Areas spread over 0.08 to 1, log aspects over 3/4 to 4/3, places over the whole image."""
    boxes = np.array([random_box(300, 400, np.array([i, 9])) for i in range(4000)])
    top, left, height, width = boxes.T
    assert (top >= 0).all() and (top + height <= 300).all()
    assert (left >= 0).all() and (left + width <= 400).all()
    area, aspect = height * width / 120_000, width / height
    assert 0.078 < area.min() < 0.09 and 0.9 < area.max() <= 1
    assert 0.74 < aspect.min() < 0.76 and 1.31 < aspect.max() < 1.35
    # All areas below 0.4 fit into the image, so they are uniform.
    assert abs(area[area < 0.4].mean() - 0.24) < 0.01
    small = area < 0.15
    assert abs((top[small] / (300 - height[small])).mean() - 0.5) < 0.03
    assert abs((left[small] / (400 - width[small])).mean() - 0.5) < 0.03
    # Both numbers of a seed count, and the last row and column are reached.
    boxes = np.array([random_box(4, 5, np.array([7, i])) for i in range(200)])
    top, left, height, width = boxes.T
    assert ((top + height == 4) & (height < 4)).any() and ((left + width == 5) & (width < 5)).any()


@pytest.mark.parametrize(
    ("height", "width", "expected"),
    [(1000, 10, (493, 0, 13, 10)), (10, 1000, (0, 493, 10, 13)), (1, 1, (0, 0, 1, 1))],
)
def test_a_very_narrow_image_gives_its_center(height, width, expected):
    """An aspect ratio of 3/4 or 4/3 after ten draws that did not fit."""
    assert random_box(height, width, SEED) == expected


def test_a_random_crop_depends_on_the_seed_alone(any_backend):
    data = encoded(picture(), "JPEG")
    decoder = ImageDecoder((32, 32), resize="random_crop")
    first = decoder.decode(data, np.array([3, 4], np.int32))
    np.testing.assert_array_equal(first, decoder.decode(data, np.array([3, 4], np.int32)))
    assert (first != decoder.decode(data, np.array([4, 3], np.int32))).any()
    assert decoder.draws and not ImageDecoder((32, 32)).draws


def test_a_center_crop_is_the_largest_box_in_the_middle():
    """300 x 400 to a square: 50 columns are cut off on each side."""
    assert centered_box(300, 400, 224, 224) == (0, 50, 300, 300)
    assert centered_box(400, 300, 224, 224) == (50, 0, 300, 300)
    assert centered_box(300, 400, 3, 4) == (0, 0, 300, 400)


def test_threads_decode_the_same_pixels(any_backend):
    data = encoded(picture(), "JPEG")
    decoder = ImageDecoder((40, 56))
    expected = decoder.decode(data, SEED)
    with ThreadPoolExecutor(8) as threads:
        images = threads.map(lambda _: decoder.decode(data, SEED), range(64))
        assert all((image == expected).all() for image in images)
