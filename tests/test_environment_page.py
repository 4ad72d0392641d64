"""The page on errors and environment variables names what the package reads and defines."""

import re
from pathlib import Path

from keras_multigpu.cluster.environment import Settings

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")
CODE = "\n".join(path.read_text("utf-8") for path in (ROOT / "keras_multigpu").rglob("*.py"))


def test_the_page_gives_the_default_of_each_setting():
    rows = dict(re.findall(r"^\| `(KERAS_MULTIGPU_\w+)` \| (\d+) by default:", PAGE, re.M))
    settings = Settings()._asdict().items()
    assert rows == {f"KERAS_MULTIGPU_{name.upper()}": str(usual) for name, usual in settings}
    assert set(re.findall(r"KERAS_MULTIGPU_[A-Z_]+[A-Z]", CODE)) == set(rows)


def test_the_page_names_each_variable_that_the_package_reads():
    asked = r'environ(?:\.get\(|\.pop\(|\.setdefault\(|\[)"(\w+)"|"(\w+)" (?:not )?in os\.environ'
    read = {name for pair in re.findall(asked, CODE) for name in pair if name}
    assert len(read) > 5
    assert not {name for name in read if f"`{name}`" not in PAGE}


def test_the_page_names_each_exception_that_users_may_catch():
    """The package's subclasses of `ValueError` and `RuntimeError`."""
    defined = re.findall(r"^class (\w+)\((?:ValueError|RuntimeError)\)", CODE, re.M)
    assert defined
    assert not [name for name in defined if f".{name}`" not in PAGE]
