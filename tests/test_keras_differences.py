"""The page on differences from Keras matches their list and the errors the code raises."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTS = runpy.run_path(str(ROOT / "tests" / "keras_suite" / "differences.py"))
HOOK = runpy.run_path(str(ROOT / "docs" / "keras_differences.py"))


def test_the_page_shows_every_difference_and_error():
    """It shows each difference with its reason and tests, and each error raised in training."""
    page = HOOK["filled"]((ROOT / "docs" / HOOK["PAGE"]).read_text(encoding="utf-8"))
    assert "<!--" not in page
    for difference in LISTS["DIFFERENCES"]:
        assert difference.what in page and difference.why in page
        assert all(test.split("::")[-1] in page for test in difference.tests)
    assert "The model overrides `make_…_function`." in page
    assert "| `trainers` | " in page


def test_every_difference_has_a_reason_and_a_keras_test():
    """It says what differs, why, and which tests of Keras show it, on one replica, two or both."""
    for difference in [*LISTS["DIFFERENCES"], *LISTS["KERAS_ALONE"]]:
        assert difference.what.endswith(".") and difference.why.endswith(".")
        assert difference.tests and set(difference.replicas) <= {0, 1, 2}
        assert all("_test.py::" in test for test in difference.tests)
