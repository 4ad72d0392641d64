"""Fixtures for all tests of data."""

import sys

import pytest


@pytest.fixture(params=["opencv", "tensorflow"])
def any_backend(request, monkeypatch):
    """Runs a test with OpenCV, and as if OpenCV were not installed."""
    if request.param == "opencv":
        pytest.importorskip("cv2")
    else:
        monkeypatch.setitem(sys.modules, "cv2", None)
    return request.param
