"""The benchmarks, which rarely run, still match the package."""

import ast
import importlib
from pathlib import Path

import pytest

import keras_multigpu as kmg

BENCHMARKS = Path(__file__).parent / "benchmarks"
ROOTS = {"kmg": kmg, "augmentation": kmg.augmentation, "callbacks": kmg.callbacks}


def names_of_package(tree):
    """The names a script uses, as `(module, name)`; `kmg.data.x` is `("kmg", "data.x")`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras_multigpu"):
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            root, *chain = ast.unparse(node).split(".")
            if root in ROOTS and all(name.isidentifier() for name in chain):
                yield root, ".".join(chain)


def exists(root, chain):
    found = ROOTS.get(root) or importlib.import_module(root)
    for name in chain.split("."):
        if not hasattr(found, name):
            return False
        found = getattr(found, name)
    return True


@pytest.mark.parametrize("script", sorted(BENCHMARKS.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_uses_names_that_exist(script):
    tree = ast.parse(script.read_text(encoding="utf-8"))
    assert [pair for pair in names_of_package(tree) if not exists(*pair)] == []
