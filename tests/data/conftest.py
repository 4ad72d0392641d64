"""Fixtures for all tests of data."""

import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def cache_of_user(tmp_path_factory):
    """Indices of records are kept there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(params=["opencv", "tensorflow"])
def any_backend(request, monkeypatch):
    """Runs a test with OpenCV, and as if OpenCV were not installed."""
    if request.param == "opencv":
        pytest.importorskip("cv2")
    else:
        monkeypatch.setitem(sys.modules, "cv2", None)
    return request.param
