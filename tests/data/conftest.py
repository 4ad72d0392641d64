"""What the tests of the data share."""

import sys

import pytest


@pytest.fixture(params=["opencv", "tensorflow"])
def any_backend(request, monkeypatch):
    """Each test that asks for this runs with OpenCV and as if it were not installed."""
    if request.param == "opencv":
        pytest.importorskip("cv2")
    else:
        monkeypatch.setitem(sys.modules, "cv2", None)
    return request.param
