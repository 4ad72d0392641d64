"""Image files: the pixels of Keras's loader, by OpenCV and by TensorFlow; crops; damage."""

import io
import os
import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
from helpers.picture_files import animation, encoded, picture, sixteen_bits, with_size

from keras_multigpu.data import from_directory, from_files
from keras_multigpu.data.decoding.decoder import INTERPOLATIONS, centered_box, random_box

JPEG = encoded(picture(), "JPEG", quality=90)
PNG = encoded(picture())
GIF = encoded(picture(), "GIF")
SIZE = (75, 100)
"""That of `picture()`."""


def batches_of(folder, contents, **settings):
    """Batches of files, in one batch an epoch."""
    paths = [folder / f"{number:03}.image" for number in range(len(contents))]
    for path, content in zip(paths, contents, strict=True):
        path.write_bytes(content)
    settings = {"image_size": SIZE, "global_batch_size": len(paths), **settings}
    return from_files(paths, shuffle=False, **settings)


def decode(folder, *contents, **settings):
    """The images of files, as integers that can be subtracted."""
    (images,) = batches_of(folder, contents, **settings).epoch(0)
    assert images.dtype == np.uint8
    return images.numpy().astype(int)


def causes(folder, contents, **settings):
    """The cause of the damage of each file, or its image."""
    batches = batches_of(folder, contents, on_error="skip", **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        images = [image for batch in batches.epoch(0) for image in batch.numpy()]
    intact, named = iter(images), dict(batches.quarantine)
    found = [named.get(path) for path in batches.file_paths]
    return [next(intact) if cause is None else cause for cause in found]


def assert_as_by_keras(folder, distance, **settings):
    settings = {"labels": None, "shuffle": False, "verbose": False, **settings}
    given = {name: way for name, way in settings.items() if name != "resize"}
    if settings.get("resize") in ("pad", "crop"):
        given[f"{settings['resize']}_to_aspect_ratio"] = True
    dataset = keras.utils.image_dataset_from_directory(folder, batch_size=None, **given)
    theirs = [np.clip(np.rint(image), 0, 255).astype(int) for image in dataset]
    (ours,) = from_directory(folder, global_batch_size=len(theirs), **settings).epoch(0)
    assert np.abs(ours.numpy() - np.stack(theirs)).max() <= distance


WAYS = [
    *((interpolation, "stretch", "tensorflow") for interpolation in INTERPOLATIONS),
    ("bilinear", "pad", "opencv"),
    # Of resizing, OpenCV does two kinds; the others, such as "nearest", are left to TensorFlow.
    ("area", "stretch", "opencv"),
    ("nearest", "stretch", "opencv"),
    ("bilinear", "crop", "opencv"),
    ("bicubic", "crop", "tensorflow"),
]


@pytest.mark.parametrize(("interpolation", "way", "any_backend"), WAYS, indirect=["any_backend"])
def test_images_are_resized_as_by_keras(interpolation, way, any_backend, tmp_path):
    """Larger, smaller, narrower and equal images: every pixel is within one level."""
    sizes = [SIZE, (33, 41), (20, 150), (120, 31), (40, 56), (1, 1)]
    for number, size in enumerate(sizes):
        (tmp_path / f"{number}.png").write_bytes(encoded(picture(*size)))
    settings = {"interpolation": interpolation, "resize": way}
    assert_as_by_keras(tmp_path, 1, image_size=(40, 56), **settings)


@pytest.mark.parametrize("color_mode", ["rgb", "rgba", "grayscale"])
def test_images_are_decoded_as_by_keras(color_mode, any_backend, tmp_path):
    rgba = picture(channels=4)
    files = {
        "a.png": PNG,
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
        files |= {"j.gif": GIF, "k.gif": animation("GIF"), "l.png": animation("PNG")}
    if color_mode != "grayscale":
        files["m.bmp"] = encoded(picture(), "BMP")
        files["n.bmp"] = encoded(picture(), "BMP", mode="L")
        files["o.bmp"] = encoded(rgba, "BMP")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    assert_as_by_keras(tmp_path, 0, image_size=SIZE, color_mode=color_mode)


JPEGS = {
    "plain": {},
    "progressive": {"progressive": True},
    "grey": {"mode": "L"},
    "CMYK": {"mode": "CMYK"},
    "all colours": {"subsampling": 0},
}


@pytest.mark.parametrize("color_mode", ["rgb", "grayscale"])
def test_jpegs_are_decoded_as_by_tensorflows_accurate_transform(color_mode, any_backend, tmp_path):
    """Exactly; CMYK within one level, or two in grey, which TensorFlow cannot decode directly."""
    files = [encoded(picture(), "JPEG", quality=90, **options) for options in JPEGS.values()]
    found = decode(tmp_path, *files, color_mode=color_mode)
    for name, data, image in zip(JPEGS, files, found, strict=True):
        cmyk, grey = name == "CMYK", color_mode == "grayscale"
        channels = 1 if grey and not cmyk else 3
        expected = tf.io.decode_jpeg(data, channels, dct_method="INTEGER_ACCURATE")
        if cmyk and grey:
            expected = tf.image.rgb_to_grayscale(expected)
        assert np.abs(image - expected.numpy()).max() <= cmyk * (1 + grey), name


def test_jpegs_are_close_to_the_fast_transform_of_keras(any_backend, tmp_path):
    """Keras uses the fast transform, which differs by a few levels."""
    (tmp_path / "a.jpg").write_bytes(JPEG)
    assert_as_by_keras(tmp_path, 10, image_size=(40, 56))


@pytest.mark.parametrize("color_mode", ["rgb", "rgba", "grayscale"])
def test_every_kind_of_file_is_decoded_in_every_color_mode(color_mode, any_backend, tmp_path):
    """Even where Keras fails: close to Pillow, with an opaque alpha channel."""
    from PIL import Image

    kinds = {"GIF": {}, "BMP": {}, "WEBP": {"lossless": True}}
    kinds["JPEG"] = {"quality": 100, "subsampling": 0}
    files = [encoded(picture(), kind, **options) for kind, options in kinds.items()]
    files.append(encoded(picture(), "BMP", mode="P"))
    mode = {"rgb": "RGB", "rgba": "RGBA", "grayscale": "L"}[color_mode]
    for data, image in zip(files, decode(tmp_path, *files, color_mode=color_mode), strict=True):
        expected = np.array(Image.open(io.BytesIO(data)).convert("RGB").convert(mode), int)
        assert np.abs(image - expected.reshape(image.shape)).mean() < 0.6
        if color_mode == "rgba":
            assert (image[..., 3] == 255).all()


def test_a_transparent_webp_keeps_its_alpha(any_backend, tmp_path):
    rgba = picture(channels=4)
    data = encoded(rgba, "WEBP", lossless=True, exact=True)
    np.testing.assert_array_equal(decode(tmp_path, data, color_mode="rgba")[0], rgba)
    np.testing.assert_array_equal(decode(tmp_path, data)[0], rgba[..., :3])


def test_the_orientation_of_the_camera_and_what_follows_an_image_are_ignored(any_backend, tmp_path):
    from PIL import Image

    exif = Image.Exif()
    exif[0x0112] = 6  # Rotated by 90 degrees.
    turned = encoded(picture(), "JPEG", exif=exif, quality=90)
    for whole, *others in ((JPEG, turned, thumbnailed()), (PNG,)):
        trailed = [whole + more for more in (b"\0", b"\0" * 1000, b"a trailer\xff", b"\n")]
        first, *more = decode(tmp_path, whole, *others, *trailed)
        np.testing.assert_array_equal(more, [first] * len(more))


# Crops.


def test_a_random_crop_is_a_part_of_the_whole_image(any_backend, tmp_path):
    """Of another place and size for each epoch and example; evaluation takes the center."""
    rows, columns = np.mgrid[:64, :64]
    image = np.stack([rows * 4, columns * 4, rows * 0], axis=-1).astype(np.uint8)
    settings = {"image_size": (16, 12), "resize": "random_crop", "interpolation": "nearest"}
    batches = batches_of(tmp_path, [encoded(image)] * 4, **settings)
    (first,), (again,), (second,) = (batches.epoch(number) for number in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert len({part.numpy().tobytes() for part in (*first, *second)}) == 8
    for part in first.numpy().astype(int):
        down, across, _ = np.moveaxis(part, 2, 0)
        for values in (down, across.T):
            np.testing.assert_array_equal(values, values[:, :1] + 0 * values)
            assert (np.diff(values[:, 0]) >= 0).all()
    center = batches_of(tmp_path, [encoded(image)] * 4, **{**settings, "resize": "crop"})
    np.testing.assert_array_equal(
        *(next(iter(one.epoch(0))) for one in (batches.evaluation(), center))
    )


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


def test_boxes_in_the_middle_are_the_largest_of_their_shape():
    """A center crop, and an image in which no random box of an allowed aspect ratio fits."""
    # 300 x 400 to a square: 50 columns are cut off on each side.
    assert centered_box(300, 400, 224, 224) == (0, 50, 300, 300)
    assert centered_box(400, 300, 224, 224) == (50, 0, 300, 300)
    assert centered_box(300, 400, 3, 4) == (0, 0, 300, 400)
    seed = np.array([1, 2])
    assert random_box(1000, 10, seed) == (493, 0, 13, 10)
    assert random_box(10, 1000, seed) == (0, 493, 10, 13)
    assert random_box(1, 1, seed) == (0, 0, 1, 1)


# Damage.


def thumbnailed():
    """A JPEG with a complete JPEG in its header, as cameras write it."""
    thumbnail = encoded(picture(20, 30), "JPEG")
    return JPEG[:2] + b"\xff\xe1" + (2 + len(thumbnail)).to_bytes(2, "big") + thumbnail + JPEG[2:]


WHOLE = {
    "JPEG": JPEG,
    "progressive JPEG": encoded(picture(), "JPEG", quality=90, progressive=True),
    "CMYK JPEG": encoded(picture(), "JPEG", mode="CMYK"),
    "JPEG with a thumbnail": thumbnailed(),
    "PNG": PNG,
    "palette PNG": encoded(picture(), mode="P"),
    "16-bit PNG": sixteen_bits(picture()),
    "BMP": encoded(picture(), "BMP"),
    "palette BMP": encoded(picture(), "BMP", mode="P"),
    "WebP": encoded(picture(), "WEBP"),
    "lossless WebP": encoded(picture(), "WEBP", lossless=True),
    "transparent WebP": encoded(picture(channels=4), "WEBP"),
}
GIFS = {"GIF": GIF, "animated GIF": animation("GIF")}


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_truncated_files_are_detected(content, any_backend, tmp_path):
    """Cut at 60 places and near its end, a file always gives a cause, never a half-grey image."""
    cuts = np.random.default_rng(0).integers(12, len(content), 60).tolist()
    cuts += [len(content) - missing for missing in (1, 2, 3, 11, 12, 13)]
    whole, *found = causes(tmp_path, [content, *(content[:length] for length in cuts)])
    assert whole.shape == (*SIZE, 3)
    assert found == [f"it is truncated: its end is missing after {n:,} bytes" for n in cuts]


@pytest.mark.parametrize("kind", GIFS)
def test_only_the_first_frame_of_a_gif_must_be_complete(kind, any_backend, tmp_path):
    """Anything after it may be missing, and nothing within it."""
    content = GIFS[kind]
    size = len(content)
    cuts = np.sort([*np.random.default_rng(0).integers(13, size, 40), size - 2, size - 1, size])
    *found, whole = causes(tmp_path, [content[:length] for length in cuts])
    damaged = [isinstance(one, str) for one in found]
    assert sorted(damaged, reverse=True) == damaged
    # The last byte ends the file; the second frame is about as long as the first.
    assert (damaged[-2:] == [True, False]) if kind == "GIF" else 10 < sum(damaged) < 30
    for one in found[sum(damaged) :]:
        np.testing.assert_array_equal(one, whole)
    assert all(one.startswith("it is truncated") for one in found[: sum(damaged)])


@pytest.mark.parametrize("kind", [*WHOLE, *GIFS, "animated PNG"])
def test_random_damage_never_crashes_the_decoder(kind, any_backend, tmp_path):
    """The result is an image or damage, never another error."""
    content = {**WHOLE, **GIFS, "animated PNG": animation("PNG")}[kind]
    random, files = np.random.default_rng(0), []
    for _ in range(40):
        changed = np.frombuffer(content, np.uint8).copy()
        places = random.integers(0, random.choice([60, len(content)]), 3)
        changed[places] = random.integers(0, 256, 3)
        files.append(changed.tobytes())
    for settings in ({}, {"color_mode": "rgba", "resize": "random_crop"}):
        causes(tmp_path, files, image_size=(8, 9), **settings)


def resized(content, place, *sides):
    """A file whose header claims another size."""
    claimed = b"".join(sides)
    return content[:place] + claimed + content[place + len(claimed) :]


def jpeg_of_size(height, width):
    return resized(JPEG, JPEG.index(b"\xff\xc0") + 5, np.array([height, width], ">u2").tobytes())


def with_scans(count):
    """A progressive JPEG with so many scans, each of which passes over the whole image."""
    content = WHOLE["progressive JPEG"]
    last = content[content.rindex(b"\xff\xda") : -2]
    return content[:-2] + last * (count - content.count(b"\xff\xda")) + content[-2:]


TRUNCATED = "it is truncated: its end is missing after {:,} bytes"
BOMB = "it has {} pixels, more than 178,956,970"
BMP = WHOLE["BMP"]
HALF = 1000
DAMAGED = [
    (b"", "it is empty"),
    (b"no image", "it is not a JPEG, PNG, GIF, BMP or WebP image, it begins with b'no image'"),
    (with_size(PNG, 0, 5), "its header gives 5 x 0 pixels"),
    (jpeg_of_size(0, 5), "its header gives 5 x 0 pixels"),
    (b"GIF89a\1\0\1\0\0\0\0;", "it is a GIF without a frame"),
    (b"BM", TRUNCATED.format(2)),
    (b"\xff\xd8\xff", TRUNCATED.format(3)),
    (b"\xff\xd8\xff\xd9", TRUNCATED.format(4)),
    # As an interrupted copy leaves it if the size was set before the content.
    (PNG[:HALF] + bytes(len(PNG) - HALF), TRUNCATED.format(len(PNG))),
    (JPEG[:HALF] + bytes(len(JPEG) - HALF), TRUNCATED.format(len(JPEG))),
    # Decompression bombs. A BMP cannot be one: its rows would have to be there.
    (jpeg_of_size(14000, 14000), BOMB.format("14000 x 14000")),
    # One column more than TensorFlow decodes.
    (jpeg_of_size(65000, 2754), BOMB.format("2754 x 65000")),
    (with_size(PNG, 100_000, 2_000_000), BOMB.format("2000000 x 100000")),
    (
        resized(GIF, GIF.index(b"\x2c\0\0\0\0") + 5, np.array([14000, 14000], "<u2").tobytes()),
        BOMB.format("14000 x 14000"),
    ),
    (
        resized(WHOLE["transparent WebP"], 24, (13999).to_bytes(3, "little") * 2),
        BOMB.format("14000 x 14000"),
    ),
    (resized(BMP, 18, np.array([60000, 60000], "<i4").tobytes()), TRUNCATED.format(len(BMP))),
    (with_scans(101), "it has 101 scans, more than 100"),
]


def test_other_damage_is_named(any_backend, tmp_path):
    contents, expected = zip(*DAMAGED, strict=True)
    *found, corrupt, intact = causes(
        tmp_path, [*contents, PNG[:HALF] + bytes(20) + PNG[HALF + 20 :], with_scans(100)]
    )
    assert found == list(expected)
    assert "cannot decode" in corrupt and not isinstance(intact, str)


def test_an_animated_webp_is_named_where_opencv_is_missing(any_backend, tmp_path):
    (found,) = causes(tmp_path, [animation("WEBP", lossless=True)])
    if any_backend == "tensorflow":
        assert found == "it is an animated WebP, and those only OpenCV decodes"
    else:
        np.testing.assert_array_equal(found, picture())


def test_a_file_of_more_than_two_gigabytes_is_refused(tmp_path):
    batches = batches_of(tmp_path, [JPEG], on_error="skip")
    os.truncate(batches.file_paths[0], 2**31 - 2**12 + 1)  # The zeros take no room on the disk.
    with pytest.warns(UserWarning, match="it has 2,147,479,553 bytes, too many for an image"):
        list(batches.epoch(0))
