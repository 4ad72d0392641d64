"""Incomplete and oversized images are detected, by the decoder at the latest."""

import contextlib
import os

import numpy as np
import pytest
import tensorflow as tf
from helpers.picture_files import animation, encoded, picture, sixteen_bits, with_size

from keras_multigpu.data.decoding.decoder import MAX_BYTES, ImageDecoder, read_file
from keras_multigpu.data.decoding.formats import MAX_PIXELS, read_header
from keras_multigpu.data.pipeline.damage import DamagedExample

SEED = np.array([1, 2], np.int32)

JPEG = encoded(picture(), "JPEG", quality=90)
PNG = encoded(picture())


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


@pytest.mark.parametrize("content", WHOLE.values(), ids=WHOLE)
def test_truncated_files_are_detected(content, any_backend):
    """Cut at 60 places and near its end, a file always gives a cause, never a half-grey image."""
    decoder = ImageDecoder((75, 100))
    assert decoder.decode(content, SEED).shape == (75, 100, 3)
    cuts = np.random.default_rng(0).integers(12, len(content), 60).tolist()
    for length in [*cuts, *(len(content) - missing for missing in (1, 2, 3, 11, 12, 13))]:
        with pytest.raises(DamagedExample) as error:
            decoder.decode(content[:length], SEED)
        assert error.value.cause == (f"it is truncated: its end is missing after {length:,} bytes")


@pytest.mark.parametrize("kind", ["GIF", "animated GIF"])
def test_only_the_first_frame_of_a_gif_must_be_complete(kind, any_backend):
    """Anything after it may be missing, and nothing within it."""
    content = encoded(picture(), "GIF") if kind == "GIF" else animation("GIF")
    decoder = ImageDecoder((75, 100))
    whole = decoder.decode(content, SEED)
    end = read_header(content).frame_end
    assert (end == len(content) - 1) == (kind == "GIF")
    for length in [end, *np.random.default_rng(0).integers(end, len(content) + 1, 5).tolist()]:
        np.testing.assert_array_equal(decoder.decode(content[:length], SEED), whole)
    for length in [end - 1, *np.random.default_rng(0).integers(13, end, 30).tolist()]:
        with pytest.raises(DamagedExample, match="it is truncated: its end is missing"):
            decoder.decode(content[:length], SEED)


@pytest.mark.parametrize("content", [JPEG, PNG, thumbnailed()], ids=["JPEG", "PNG", "thumbnail"])
def test_trailing_data_does_no_harm(content, any_backend):
    decoder = ImageDecoder((75, 100))
    whole = decoder.decode(content, SEED)
    for more in (b"\0", b"\0" * 1000, b"a trailer\xff", b"\n"):
        np.testing.assert_array_equal(decoder.decode(content + more, SEED), whole)


def test_a_tail_of_zeros_is_detected(any_backend):
    """As an interrupted copy leaves it if the size was set before the content."""
    for content in (JPEG, PNG):
        half = len(content) // 2
        with pytest.raises(DamagedExample, match="truncated"):
            ImageDecoder((75, 100)).decode(content[:half] + bytes(len(content) - half), SEED)


def test_a_corrupt_png_is_detected(any_backend):
    start = len(PNG) // 2
    corrupt = PNG[:start] + bytes(20) + PNG[start + 20 :]
    with pytest.raises(DamagedExample, match="cannot decode"):
        ImageDecoder((75, 100)).decode(corrupt, SEED)


@pytest.mark.parametrize("kind", [*WHOLE, "GIF", "animated GIF", "animated PNG"])
def test_random_damage_never_crashes_the_decoder(kind, any_backend):
    """The result is an image or a `DamagedExample`, never another error."""
    animated = {
        "GIF": encoded(picture(), "GIF"),
        "animated GIF": animation("GIF"),
        "animated PNG": animation("PNG"),
    }
    content = {**WHOLE, **animated}[kind]
    random = np.random.default_rng(0)
    decoders = [ImageDecoder((8, 9)), ImageDecoder((8, 9), color_mode="rgba", resize="random_crop")]
    for _ in range(40):
        changed = np.frombuffer(content, np.uint8).copy()
        places = random.integers(0, random.choice([60, len(content)]), 3)
        changed[places] = random.integers(0, 256, 3)
        for decoder in decoders:
            with contextlib.suppress(DamagedExample):
                assert decoder.decode(changed.tobytes(), SEED).shape == decoder.shape


def jpeg_of_size(height, width):
    place = JPEG.index(b"\xff\xc0") + 5
    return JPEG[:place] + np.array([height, width], ">u2").tobytes() + JPEG[place + 4 :]


def gif_of_size(height, width):
    content = encoded(picture(), "GIF")
    place = content.index(b"\x2c\0\0\0\0") + 5
    return content[:place] + np.array([width, height], "<u2").tobytes() + content[place + 4 :]


def bmp_of_size(height, width):
    content = encoded(picture(), "BMP")
    return content[:18] + np.array([width, height], "<i4").tobytes() + content[26:]


def webp_of_size(height, width):
    content = encoded(picture(channels=4), "WEBP")
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return content[:24] + sides + content[30:]


@pytest.mark.parametrize(
    ("content", "pixels"),
    [
        (jpeg_of_size(14000, 14000), "14000 x 14000"),
        (with_size(PNG, 100_000, 2_000_000), "2000000 x 100000"),
        (gif_of_size(14000, 14000), "14000 x 14000"),
        (webp_of_size(14000, 14000), "14000 x 14000"),
    ],
    ids=["JPEG", "PNG", "GIF", "WebP"],
)
def test_a_decompression_bomb_is_refused_by_its_header(content, pixels, any_backend):
    with pytest.raises(DamagedExample) as error:
        ImageDecoder((75, 100)).decode(content, SEED)
    assert error.value.cause == f"it has {pixels} pixels, more than 178,956,970"


def test_a_progressive_jpeg_with_endless_scans_is_refused_by_its_header(any_backend):
    """Each passes over the whole image, and a thread that decodes cannot be stopped."""
    content = WHOLE["progressive JPEG"]
    last = content[content.rindex(b"\xff\xda") : -2]
    for count, scans in ((90, 100), (91, 101)):
        repeated = content[:-2] + last * count + content[-2:]
        assert repeated.count(b"\xff\xda") == scans
        if scans > 100:
            with pytest.raises(DamagedExample, match="it has 101 scans, more than 100"):
                ImageDecoder((75, 100)).decode(repeated, SEED)
        else:
            read_header(repeated)


def test_a_bmp_cannot_be_a_bomb():
    with pytest.raises(DamagedExample, match="truncated"):
        read_header(bmp_of_size(60000, 60000))


def test_the_limit_is_that_of_tensorflow():
    """Both refuse one more column."""
    width = MAX_PIXELS // 65000
    assert read_header(jpeg_of_size(65000, width)).width == width
    with pytest.raises(DamagedExample, match="more than"):
        read_header(jpeg_of_size(65000, width + 1))
    with pytest.raises(tf.errors.InvalidArgumentError):
        tf.io.decode_jpeg(jpeg_of_size(65000, width + 1), 3)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", "it is empty"),
        (b"no image", "it is not a JPEG, PNG, GIF, BMP or WebP image, it begins with b'no image'"),
        (with_size(PNG, 0, 5), "its header gives 5 x 0 pixels"),
        (jpeg_of_size(0, 5), "its header gives 5 x 0 pixels"),
        (b"GIF89a\1\0\1\0\0\0\0;", "it is a GIF without a frame"),
        (b"BM", "it is truncated: its end is missing after 2 bytes"),
        (b"\xff\xd8\xff", "it is truncated: its end is missing after 3 bytes"),
        (b"\xff\xd8\xff\xd9", "it is truncated: its end is missing after 4 bytes"),
    ],
)
def test_other_damage_is_named(content, cause):
    with pytest.raises(DamagedExample) as error:
        ImageDecoder((8, 8)).decode(content, SEED)
    assert error.value.cause == cause
    assert str(error.value).startswith(f"An example cannot be read: {cause}. Expected an intact")


def test_a_file_of_more_than_two_gigabytes_is_refused(tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(JPEG)
    os.truncate(path, MAX_BYTES + 1)  # The zeros take no room on the disk.
    with pytest.raises(DamagedExample, match="it has 2,147,479,553 bytes, too many for an image"):
        read_file(str(path))
