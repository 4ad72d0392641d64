"""The page on what of Keras works matches the lists of differences and the code's refusals."""

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[1]
LISTS = runpy.run_path(str(ROOT / "tests" / "keras_suite" / "differences.py"))
HOOK = runpy.run_path(str(ROOT / "docs" / "keras_differences.py"))


def test_the_page_says_what_the_lists_say():
    """Each difference with its reason and tests, and each error of training."""
    page = HOOK["filled"]((ROOT / "docs" / HOOK["PAGE"]).read_text(encoding="utf-8"))
    assert "<!--" not in page
    for difference in LISTS["DIFFERENCES"]:
        assert difference.what in page and difference.why in page
        assert all(test.split("::")[-1] in page for test in difference.tests)
    assert "The model overrides `make_…_function`." in page
    assert "| `trainers` | " in page


def test_each_difference_is_described_in_full():
    """What, why, and at least one test of Keras, on one replica, two or both."""
    for difference in [*LISTS["DIFFERENCES"], *LISTS["KERAS_ALONE"]]:
        assert difference.what.endswith(".") and difference.why.endswith(".")
        assert difference.tests and set(difference.replicas) <= {0, 1, 2}
        assert all("_test.py::" in test for test in difference.tests)
