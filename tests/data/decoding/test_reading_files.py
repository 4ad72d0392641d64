"""How files are read: their first bytes decide whether the rest is, and all lies in one piece."""

import os
import tracemalloc

import numpy as np
import pytest
from helpers.picture_files import encoded, picture, with_size

from keras_multigpu.data.decoding.decoder import MAX_BYTES, START, ImageDecoder, read_file
from keras_multigpu.data.decoding.header import MAX_PIXELS, SPARE_BYTES
from keras_multigpu.data.pipeline.damage import DamagedExample

SEED = np.array([1, 2], np.int32)
JPEG = encoded(picture(), "JPEG")
PNG = encoded(picture())


def peak_of(call):
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def with_hole(path, content, size):
    """A file of some content and zeros behind it, which take no room on the disk."""
    path.write_bytes(content)
    os.truncate(path, size)
    return str(path)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (b"", r"it is not a JPEG, PNG, GIF, BMP or WebP image, it begins with b'\x00\x00"),
        (b"\xff\xd8\xff", "it has 2,147,479,552 bytes, too many for an image"),
        (JPEG, "it has 2,147,479,552 bytes, too many for 100 x 75 pixels"),
        (with_size(PNG, 60000, 60000), "it has 60000 x 60000 pixels, more than max_pixels="),
        (with_size(PNG, 9000, 9000), "it has 2,147,479,552 bytes, too many for 9000 x 9000 pixels"),
        (b"GIF89a\1\0\1\0\0\0\0;", "it is a GIF without a frame"),
    ],
    ids=["no image", "no header", "JPEG", "too large", "large", "no frame"],
)
def test_a_huge_file_is_refused_by_its_first_bytes(content, cause, tmp_path):
    """It has two gigabytes, and takes less than a megabyte of memory."""
    path = with_hole(tmp_path / "a.jpg", content, MAX_BYTES)

    def read():
        with pytest.raises(DamagedExample) as error:
            ImageDecoder((8, 8)).decode_file(path, SEED)
        assert error.value.cause.startswith(cause)

    assert peak_of(read) < 2**20


def test_a_file_is_read_into_one_piece(tmp_path):
    path = with_hole(tmp_path / "a.jpg", JPEG, 20 * 2**20)
    assert read_file(path, MAX_PIXELS) == JPEG + bytes(20 * 2**20 - len(JPEG))
    assert peak_of(lambda: read_file(path, MAX_PIXELS)) < 20 * 2**20 + 4 * START


def test_metadata_may_stand_before_the_size(tmp_path):
    piece = b"\xff\xe2\xff\xff" + bytes(2**16 - 3)
    (tmp_path / "a.jpg").write_bytes(JPEG[:2] + 3 * piece + JPEG[2:])
    decoder = ImageDecoder((8, 8))
    expected = decoder.decode(JPEG, SEED)
    np.testing.assert_array_equal(decoder.decode_file(str(tmp_path / "a.jpg"), SEED), expected)


def test_a_file_of_more_than_two_gigabytes_is_refused_whatever_it_holds(tmp_path):
    path = with_hole(tmp_path / "a.tif", b"II*\0", MAX_BYTES + 1)
    with pytest.raises(DamagedExample, match="it has 2,147,479,553 bytes, too many for an image"):
        read_file(path)


def test_every_pixel_may_take_eight_bytes(tmp_path):
    """One byte more is refused; the file is not read for that."""
    room = SPARE_BYTES + 8 * 9000 * 9000
    path = with_hole(tmp_path / "a.png", with_size(PNG, 9000, 9000), room + 1)
    with pytest.raises(DamagedExample, match=f"it has {room + 1:,} bytes, too many for 9000 x"):
        read_file(path, MAX_PIXELS)
