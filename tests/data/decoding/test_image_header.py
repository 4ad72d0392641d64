"""What is not a whole image of a decent size is found out, at the latest by the decoder."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf
from helpers.picture_files import animation, encoded, picture, sixteen_bits, with_size

from keras_multigpu.data.decoding.decoder import ImageDecoder
from keras_multigpu.data.decoding.header import MOST_PIXELS, read_header
from keras_multigpu.data.pipeline.damage import DamagedExample

SEED = np.array([1, 2], np.int32)

JPEG = encoded(picture(), "JPEG", quality=90)
PNG = encoded(picture())


def thumbnailed():
    """A JPEG with a whole JPEG in its header, as cameras write them."""
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
def test_a_truncated_file_is_found_out(content, any_backend):
    """Cut at 60 places and near its end: never an image that is partly grey, always a cause."""
    decoder = ImageDecoder((75, 100))
    assert decoder.decode(content, SEED).shape == (75, 100, 3)
    cuts = np.random.default_rng(0).integers(12, len(content), 60).tolist()
    for length in [*cuts, *(len(content) - missing for missing in (1, 2, 3, 11, 12, 13))]:
        with pytest.raises(DamagedExample) as error:
            decoder.decode(content[:length], SEED)
        assert error.value.cause == (f"it is truncated: its end is missing after {length:,} bytes")


@pytest.mark.parametrize("kind", ["GIF", "animated GIF"])
def test_of_a_truncated_gif_the_first_frame_counts(kind, any_backend):
    """Whatever is missing behind it does no harm; whatever is missing of it does."""
    content = encoded(picture(), "GIF") if kind == "GIF" else animation("GIF")
    decoder = ImageDecoder((75, 100))
    whole = decoder.decode(content, SEED)
    end = read_header(content).end
    assert (end == len(content) - 1) == (kind == "GIF")
    for length in [end, *np.random.default_rng(0).integers(end, len(content) + 1, 5).tolist()]:
        np.testing.assert_array_equal(decoder.decode(content[:length], SEED), whole)
    for length in [end - 1, *np.random.default_rng(0).integers(13, end, 30).tolist()]:
        with pytest.raises(DamagedExample, match="it is truncated: its end is missing"):
            decoder.decode(content[:length], SEED)


@pytest.mark.parametrize("content", [JPEG, PNG, thumbnailed()], ids=["JPEG", "PNG", "thumbnail"])
def test_something_behind_the_end_does_no_harm(content, any_backend):
    decoder = ImageDecoder((75, 100))
    whole = decoder.decode(content, SEED)
    for more in (b"\0", b"\0" * 1000, b"a trailer\xff", b"\n"):
        np.testing.assert_array_equal(decoder.decode(content + more, SEED), whole)


def test_a_tail_of_zeros_is_found_out(any_backend):
    """What an interrupted copy leaves behind, when the size was set before the content."""
    for content in (JPEG, PNG):
        half = len(content) // 2
        with pytest.raises(DamagedExample, match="truncated"):
            ImageDecoder((75, 100)).decode(content[:half] + bytes(len(content) - half), SEED)


@pytest.mark.parametrize("place", [0.3, 0.5, 0.8])
def test_a_corrupt_png_is_found_out(place, any_backend):
    start = int(len(PNG) * place)
    corrupt = PNG[:start] + bytes(20) + PNG[start + 20 :]
    with pytest.raises(DamagedExample, match="cannot decode"):
        ImageDecoder((75, 100)).decode(corrupt, SEED)


@pytest.mark.parametrize("kind", [*WHOLE, "GIF", "animated GIF", "animated PNG"])
def test_whatever_happens_to_the_bytes(kind, any_backend):
    """An image or a cause, and never another error, or a crash."""
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
        (jpeg_of_size(13000, 13000), "13000 x 13000"),
        (with_size(PNG, 100_000, 2_000_000), "2000000 x 100000"),
        (gif_of_size(13000, 13000), "13000 x 13000"),
        (webp_of_size(13000, 13000), "13000 x 13000"),
    ],
    ids=["JPEG", "PNG", "GIF", "WebP"],
)
def test_a_decompression_bomb_is_refused_by_its_header(content, pixels, any_backend):
    with pytest.raises(DamagedExample) as error:
        ImageDecoder((75, 100)).decode(content, SEED)
    assert error.value.cause == f"it has {pixels} pixels, more than max_pixels=89,478,485"


@pytest.mark.parametrize("settings", [{}, {"resize": "random_crop"}])
def test_the_limit_is_an_argument(settings, any_backend):
    content = encoded(picture(75, 100), "JPEG")
    for max_pixels in (7500, 7499):
        decoder = ImageDecoder((8, 8), max_pixels=max_pixels, **settings)
        for each in (decoder, decoder.still()):
            if max_pixels == 7500:
                each.decode(content, SEED)
                continue
            with pytest.raises(DamagedExample, match="100 x 75 pixels, more than max_pixels=7,499"):
                each.decode(content, SEED)


def of_scans(more, mode=None, **options):
    """A JPEG that ends in further scans, which hold nothing."""
    content = encoded(picture(), "JPEG", mode=mode, **options)
    start = content.rindex(b"\xff\xda")
    scan = content[start : start + 2 + int.from_bytes(content[start + 2 : start + 4], "big")]
    return content[:-2] + more * scan + content[-2:]


def in_three_scans():
    """A JPEG that is not progressive, and has each colour by itself."""
    content = encoded(picture(8, 8), "JPEG", subsampling=0, quality=90)
    start = content.index(b"\xff\xda")
    scans = [
        b"\xff\xda\x00\x08\x01" + bytes([n, tables, 0, 63, 0, 0x55])
        for n, tables in ((1, 0), (2, 0x11), (3, 0x11))
    ]
    return content[:start] + b"".join(scans), scans[2]


def test_a_jpeg_of_many_scans_is_refused(any_backend):
    """Each costs a walk through the whole image, and needs no more than ten bytes."""
    decoder = ImageDecoder((8, 8))
    scans = encoded(picture(), "JPEG", progressive=True).count(b"\xff\xda")
    assert scans == 10
    decoder.decode(of_scans(90, progressive=True), SEED)
    whole, scan = in_three_scans()
    for content in (
        of_scans(91, progressive=True),
        of_scans(20_000, progressive=True),
        whole + 98 * scan + b"\xff\xd9",
        # The comment seems to end the image, and does not.
        of_scans(91, progressive=True).replace(b"\xff\xc4", b"\xff\xfe\0\4\xff\xd9\xff\xc4"),
    ):
        with pytest.raises(DamagedExample, match=r"is a JPEG of more than 100 scans\."):
            decoder.decode(content, SEED)


def test_a_jpeg_of_many_segments_is_refused(any_backend):
    """What fills it up between them is passed over at once."""
    start, rest = JPEG[:2], JPEG[2:]
    ImageDecoder((8, 8)).decode(start + 9000 * b"\xff\xfe\0\2" + b"\xff" * 10**7 + rest, SEED)
    with pytest.raises(DamagedExample, match=r"is a JPEG of more than 10,000 segments\."):
        ImageDecoder((8, 8)).decode(start + 10**6 * b"\xff\xfe\0\2" + rest, SEED)


@pytest.mark.parametrize("piece", [b"\x21\xfe\x00", b"\x21\xfe" + 1000 * b"\1a" + b"\0"])
def test_a_gif_of_many_pieces_is_refused(piece):
    """Each takes a step in Python: before the first frame, and in it."""
    content = encoded(picture(8, 8), "GIF", optimize=False)
    start = content.index(b"\x2c\0\0\0\0")
    some, many = (count // len(piece) * piece for count in (2**20, 2**23))
    assert read_header(content[:start] + some + content[start:]).width == 8
    frame = read_header(content).end - 1
    for broken in (content[:start] + many + content[start:], content[:frame] + 2**22 * b"\1a"):
        with pytest.raises(DamagedExample, match="is a GIF of more bytes than its pixels need"):
            read_header(broken)


def test_scans_behind_the_end_do_not_count(any_backend):
    content = encoded(picture(), "JPEG", progressive=True) + 200 * b"\xff\xda\0\2"
    ImageDecoder((8, 8)).decode(content, SEED)


@pytest.mark.parametrize("max_pixels", [0, -1, 1.5, None, 2**29 // 3 + 1])
def test_no_limit_is_refused_by_name(max_pixels):
    with pytest.raises(ValueError, match=r"Received: max_pixels="):
        ImageDecoder((8, 8), max_pixels=max_pixels)


def test_a_bmp_cannot_be_a_bomb():
    with pytest.raises(DamagedExample, match="truncated"):
        read_header(bmp_of_size(60000, 60000))


def test_the_limit_is_that_of_tensorflow():
    """One column more than the limit is refused here; TensorFlow names it, too."""
    width = MOST_PIXELS // 65000
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
def test_what_is_no_image(content, cause):
    with pytest.raises(DamagedExample) as error:
        ImageDecoder((8, 8)).decode(content, SEED)
    assert error.value.cause == cause
    assert str(error.value).startswith(f"An example cannot be read: {cause}. Expected an intact")
