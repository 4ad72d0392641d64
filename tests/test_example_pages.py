"""Tutorials link to their scripts, on GitHub and on the site, and each script to its tutorial."""

import os
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
TUTORIALS = [DOCS / "quick_start.md", *sorted(DOCS.glob("tutorials/*.md"))]
HOOK = runpy.run_path(str(DOCS / "example_pages.py"))
SCRIPTS = [name.removesuffix(".md") for name in HOOK["pages"]()]
LINK = re.compile(r"\]\(([^)]*\bexamples/[^)#]+)\)")


def targets(text, page):
    """The paths below `docs/` of a page's links to `examples/`."""
    return {os.path.normpath(page.relative_to(DOCS).parent / link) for link in LINK.findall(text)}


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_links_to_the_scripts_that_it_shows(page):
    """GitHub shows the marker of an included snippet, not its code."""
    text = page.read_text(encoding="utf-8")
    shown = {f"../{name}" for name in re.findall(r'--8<-- "(examples/[\w./]+)', text)}
    assert shown <= targets(text, page)


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_links_to_scripts_lead_to_pages_of_the_site(page):
    text = page.read_text(encoding="utf-8")
    assert all((DOCS / target).is_file() for target in targets(text, page))
    assert targets(HOOK["on_page_markdown"](text), page) <= HOOK["pages"]().keys()


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_list_of_examples_has_each_script_with_its_tutorial(script):
    name = script.removeprefix("examples/")
    listed = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    row = re.search(
        rf"^\| \[{re.escape(name)}\]\({re.escape(name)}\) \| .+ \| .+ \|$", listed, re.M
    )
    assert row, f"examples/README.md needs a row `| [{name}]({name}) | … | its tutorial |`"
    tutorial = re.search(r"\]\(\.\./([^)#]+\.md)", row[0])
    assert tutorial, row[0]
    page = ROOT / tutorial[1]
    assert f"../{script}" in targets(page.read_text(encoding="utf-8"), page)
