"""CRC-32C, the checksum of TFRecord files, by google-crc32c.

TensorFlow does not expose its own, and its reader of single records reads 16 MiB for each.
"""

from keras_multigpu.checks import error_of


def masked_crc(content: bytes) -> int:
    """The checksum of some bytes in the form that TFRecord files store."""
    from google_crc32c import value

    crc: int = value(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def require_crc() -> None:
    try:
        import google_crc32c  # noqa: F401
    except ImportError as error:
        raise error_of(
            ImportError,
            "The package google-crc32c is not installed.",
            "Expected it to verify the records of TFRecord files.",
            "Run `pip install google-crc32c`, or read them with `tf.data` and `from_dataset`.",
            package="google-crc32c",
        ) from error
