"""Fills in the page on what of Keras works while the documentation is built.

From the list that Keras's own tests run with, and from the errors in the code. mkdocs calls
`on_page_markdown`: see `hooks` in mkdocs.yml.
"""

import ast
import collections
import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "tests" / "keras_suite"
KERAS = Path(importlib.util.find_spec("keras").origin).parent / "src"
PAGE = "guarantees/what_of_keras_works.md"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put the tables where the page has their names as comments.

    Args:
        markdown: The text of a page.
        page: The page.
    """
    return filled(markdown) if page.file.src_uri == PAGE else markdown


def filled(markdown: str) -> str:
    """The page with its tables."""
    parts = {"tests": tests(), "differences": differences(), "refusals": refusals()}
    for name, table in parts.items():
        markdown = markdown.replace(f"<!-- {name} -->", table)
    return markdown


def table(*rows: tuple[Any, ...]) -> str:
    """Rows of text, of which the first is the head."""
    lines = [" | ".join(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    return "\n".join(
        f"| {line} |" for line in [lines[0], " | ".join("-" * len(rows[0])), *lines[1:]]
    )


def tests() -> str:
    """How many of Keras's tests are run, by its folders."""
    files = runpy.run_path(str(SUITE / "files.py"))["test_files"]()
    counts: collections.Counter[str] = collections.Counter()
    for file in map(Path, files):
        folder = file.relative_to(KERAS).parts[0]
        counts[folder] += len(re.findall(r"^ *def test_", file.read_text("utf-8"), re.MULTILINE))
    return table(("folder of Keras", "tests"), *((f"`{f}`", n) for f, n in sorted(counts.items())))


def differences() -> str:
    """What does not hold, with the tests that show it."""
    listed = runpy.run_path(str(SUITE / "differences.py"))["DIFFERENCES"]
    rows = [
        (
            difference.what,
            difference.why,
            " and ".join(map(str, difference.replicas)),
            ", ".join(f"`{test.split('::')[-1]}`" for test in difference.tests),
        )
        for difference in listed
    ]
    return (
        table(("what differs", "why", "replicas", "Keras's tests"), *rows) if rows else "Nothing."
    )


def refusals() -> str:
    """The errors that are raised where a model or its data cannot be trained on replicas."""
    begins = {"problem": 0, "value_error": 0, "error_of": 1}
    found = {
        tuple(map(plain, node.args[begins[name] :][:3]))
        for path in sorted((ROOT / "keras_multigpu" / "training").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)) in begins
    }
    rows = sorted(
        (
            came,
            capital(expected.removeprefix("Expected ")),
            "The error says it." if do == "…" else do,
        )
        for came, expected, do in found
    )
    return table(("what came", "what is expected", "what to do"), *rows)


def capital(sentence: str) -> str:
    """A sentence that begins as sentences do."""
    return sentence[:1].upper() + sentence[1:]


def plain(text: ast.expr) -> str:
    """A text in code, with dots for what only a run knows."""
    if isinstance(text, ast.Constant):
        return str(text.value)
    if isinstance(text, ast.JoinedStr):
        return "".join(plain(part) for part in text.values).replace("….", "…")
    if isinstance(text, ast.BinOp):
        return f"{plain(text.left)}{plain(text.right)}".replace("……", "…").replace("….", "…")
    return "…"
