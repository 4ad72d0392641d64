"""Each guarantee of the documentation has a test, which `tests/guarantees.md` names."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "guarantees"
LISTS = (ROOT / "tests" / "guarantees.md").read_text(encoding="utf-8")
SECTIONS = dict(
    re.findall(r"^## \[[^]]+\]\(\.\./([\w./]+\.md)\)\n(.*?)(?=^## |\Z)", LISTS, re.M | re.S)
)
ROWS = {
    page: re.findall(r"^- (.+?):\s+`(test_\w+\.py)::(test_\w+)`$", text, re.M)
    for page, text in SECTIONS.items()
}


# The mark of tests that only `make test-all` runs.
LEFT_OUT = re.compile(r"pytest\.mark\.skipif\(not ALL_REPLICAS")


def defined_in(name):
    """The tests that `make test` runs in the file with this name."""
    (path,) = ROOT.glob(f"tests/**/{name}")
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and not any(map(LEFT_OUT.match, map(ast.unparse, node.decorator_list)))
    }


def test_each_page_of_guarantees_has_its_rows():
    """A promise without a test is not a guarantee."""
    assert {f"docs/guarantees/{page.name}" for page in PAGES.glob("*.md")} <= set(ROWS)
    assert all((ROOT / page).is_file() for page in ROWS)
    lines = {page: text.count("\n- ") for page, text in SECTIONS.items()}
    assert {page: len(rows) for page, rows in ROWS.items()} == lines
    assert min(lines.values()) > 0


@pytest.mark.parametrize("page", ROWS)
def test_the_tests_named_on_the_page_exist(page):
    """Whoever renames, moves or deletes a test has to change the list."""
    missing = [f"{file}::{test}" for _, file, test in ROWS[page] if test not in defined_in(file)]
    assert not missing
