"""Pictures and the files that tests read them from."""

import io

import numpy as np


def picture(height=75, width=100, channels=3):
    """A smooth picture with an edge, so that resizing and compression have something to do."""
    rows, columns = np.mgrid[:height, :width]
    waves = [
        127.5 + 127.5 * np.sin(rows / (5 + number) + columns / (9 - number))
        for number in range(channels)
    ]
    image = np.stack(waves, axis=-1)
    image[height // 3 : height // 2, width // 4 : width // 2] = 255 - 60 * np.arange(channels)
    return np.clip(image, 0, 255).astype(np.uint8)


def encoded(image, kind="PNG", mode=None, **options):
    """An array or a Pillow image as the content of a file.

    Args:
        image: `uint8[height, width, channels]` or a Pillow image.
        kind: Pillow's name of the format.
        mode: The Pillow mode to convert to.
        **options: Those of `PIL.Image.save`.
    """
    from PIL import Image

    if isinstance(image, np.ndarray):
        image = Image.fromarray(image)
    file = io.BytesIO()
    (image.convert(mode) if mode else image).save(file, kind, **options)
    return file.getvalue()


def animation(kind, **options):
    """The content of an animated file whose first frame is `picture()`."""
    from PIL import Image

    frames = [Image.fromarray(frame) for frame in (picture(), 255 - picture())]
    if kind == "GIF":
        frames = [frame.convert("P") for frame in frames]
    return encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)


def sixteen_bits(image):
    """The content of a PNG whose upper 8 bits are `image`, RGB or grey."""
    import struct
    import zlib

    height, width, channels = image.shape
    rows = (image.astype(">u2") << 8 | 0xA5).astype(">u2").reshape(height, -1)
    raw = b"".join(b"\0" + row.tobytes() for row in rows)
    color_type = {1: 0, 3: 2}[channels]
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, 16, color_type, 0, 0, 0)),
        (b"IDAT", zlib.compress(raw)),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def with_size(data, height, width):
    """A PNG whose header claims another size, with a right checksum."""
    import struct
    import zlib

    header = b"IHDR" + struct.pack(">II", width, height) + data[24:29]
    return data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:]
