"""The code in the README and on every page of the documentation runs and prints what it shows."""

import json
import re
import sys
from pathlib import Path

import pytest
from exactness.cases import CASES
from helpers import documented_code
from helpers.all_replicas import ALL_REPLICAS
from helpers.documented_code import Block, blocks_of, same_text
from helpers.processes_left import as_users_start_it, ended_process

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
WITH_CODE = [page for page in PAGES if documented_code.has_code(page)]


def title(page):
    """A page's name in the repository."""
    return page.relative_to(ROOT).as_posix()


def is_of_page(item):
    """Whether a selected test runs the code of a page."""
    return getattr(item, "originalname", "") == test_the_code_of_a_page_runs.__name__


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory):
    """Each page's traceback; pages run in one process because TensorFlow starts slowly."""
    chosen = [item.callspec.params["page"] for item in request.session.items if is_of_page(item)]
    results = tmp_path_factory.mktemp("docs") / "results.json"
    ended = ended_process(
        [sys.executable, documented_code.__file__, str(results), *map(str, chosen)],
        env=as_users_start_it(),
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(results.read_text(encoding="utf-8"))


# `make test` leaves out the pages on callbacks, which have tests of their own.
RUN = [page for page in WITH_CODE if ALL_REPLICAS or page.parent.name != "callbacks"]


@pytest.mark.parametrize("page", RUN, ids=title)
@pytest.mark.slow
def test_the_code_of_a_page_runs(page, errors):
    """Its blocks run in order and print the output shown below them."""
    assert errors[str(page)] is None, errors[str(page)]


@pytest.mark.parametrize("page", WITH_CODE, ids=title)
def test_a_page_splits_the_cpu_before_its_first_model(page):
    """Pages run in one process here; a reader's has as many devices as its first line asks for."""
    code = "\n".join(block.code for block in blocks_of(page) if block.language == "python")
    before, *asks = re.split(r"kmg\.strategy\(devices=\w+\)", code, maxsplit=1)
    if asks:
        lines = [line for line in before.splitlines() if line and not line.startswith((" ", "#"))]
        assert not [line for line in lines if re.search(r"(?<!import )keras\.|distribute\(", line)]


COMMANDS = [
    (title(page), line.strip())
    for page in PAGES
    for block in blocks_of(page)
    if block.language == "shell"
    for line in block.code.splitlines()
]


@pytest.mark.parametrize(("page", "command"), COMMANDS)
def test_commands_shown_on_pages_exist(page, command):
    """Make targets, `keras-multigpu` commands and script files."""
    program, *words = command.partition("#")[0].split()
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif program == "keras-multigpu":
        assert (ROOT / "keras_multigpu" / "commands" / f"{words[0].replace('-', '_')}.py").exists()
    elif program.endswith("python"):
        assert (ROOT / words[0]).exists()
    else:
        assert program in ("pip", "git", "cd")


def test_blocks_are_found_and_paired_with_their_output(tmp_path):
    """Only a `text` block right below the code is its output. Included files are skipped."""
    page = tmp_path / "page.md"
    page.write_text(
        "One:\n\n```python\nprint(1)\n```\n\n```text\n1\n```\n\n"
        "```python\nprint(2)\n```\n\nTwo:\n\n```text\n2\n```\n\n"
        '```python\n--8<-- "examples/a.py:b"\n```\n'
    )
    assert blocks_of(page) == [
        Block("python", 4, "print(1)\n", "1\n"),
        Block("text", 8, "1\n", None),
        Block("python", 12, "print(2)\n", None),
        Block("text", 18, "2\n", None),
    ]


@pytest.mark.parametrize(
    ("expected", "found", "same"),
    [
        ("loss 1.234", "loss  1.2341\n", True),
        ("loss 1.2", "loss 1.3", False),
        ("1.9e-07", "3.1e-08", True),
        ("1.9e-07", "3.1e-03", False),
        ("[1.0, 2.0]", "[1.001, 2.0]", True),
        ("True", "False", False),
        ("a b", "a", False),
    ],
)
def test_only_rounding_may_differ_in_printed_numbers(expected, found, same):
    assert same_text(expected, found) is same


def test_a_page_that_prints_something_else_is_an_error(tmp_path):
    """The message shows the page, the line and both texts."""
    page = tmp_path / "page.md"
    page.write_text("```python\nprint('no')\n```\n\n```text\nyes\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:2 prints\nno\n\ninstead of\nyes"):
        documented_code.run(page)


def test_the_table_of_exactness_has_rows_that_exist():
    """Whoever renames a case has to measure its row again."""
    page = (ROOT / "tests/benchmarks/README.md").read_text(encoding="utf-8")
    table = page.partition("<!-- parity cases: begin -->")[2].partition("<!-- parity")[0]
    rows = re.findall(r"^\| ([^|*]+) \|", table, flags=re.MULTILINE)
    assert set(rows) & {"case"}
    assert set(rows) - {"case", "---"} <= {case.name for case in CASES}
