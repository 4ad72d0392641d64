"""OpenCV, which does some things faster on the host, where it is installed."""

from typing import Any


def opencv() -> Any:
    """The module, or None without it."""
    try:
        import cv2
    except ImportError:
        return None
    return cv2
