"""Imports inside the package only point down; siblings never import each other.

So each part can be read, tested and replaced without the parts above it.
"""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "keras_multigpu"

# From the bottom up. A part is a module of the package or a folder with all its modules.
# `__init__` re-exports the public names; only the commands stand above it.
LAYERS = (
    {"batch_sizes", "checks", "keras_internals"},
    {"devices", "processes"},
    {"cluster"},
    {"host_memory", "identities", "partition", "replicas", "seeded_layers", "writing"},
    {"pictures"},
    {"image_grid"},
    {"data", "augmentation", "training"},
    {"explanation"},
    {"callbacks", "separately", "verification"},
    {"__init__"},
    {"commands"},
    {"__main__"},
)
HEIGHT = {part: height for height, layer in enumerate(LAYERS) for part in layer}


def part_of(module: str) -> str:
    """The part that a module such as `keras_multigpu.data.pipeline.order` belongs to."""
    return (module.split(".") + ["__init__"])[1]


def imported_parts(source: str) -> set[str]:
    """The parts of the package that a file imports, inside functions too."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are banned"
            for alias in node.names:
                # `from keras_multigpu import checks` is a module, `... import strategy` is not.
                inside = node.module == "keras_multigpu" and alias.name in HEIGHT
                modules.add(f"{node.module}.{alias.name}" if inside else node.module)
    return {part_of(module) for module in modules if module.split(".")[0] == "keras_multigpu"}


def forbidden_imports(package: Path) -> list[str]:
    """Every import that does not point down, written as `file imports part`."""
    found = []
    for path in sorted(package.rglob("*.py")):
        file = path.relative_to(package)
        importer = file.parts[0].removesuffix(".py")
        for part in sorted(imported_parts(path.read_text(encoding="utf-8")) - {importer}):
            if HEIGHT[part] >= HEIGHT[importer]:
                found.append(f"{file.as_posix()} imports {part}")
    return found


def test_imports_point_down():
    """No file imports a sibling of its part, or a part above."""
    assert forbidden_imports(PACKAGE) == []


def test_every_part_has_a_layer():
    """A new module or folder needs a place in LAYERS, and in docs and CONTRIBUTING.md."""
    parts = {path.relative_to(PACKAGE).parts[0] for path in PACKAGE.rglob("*.py")}
    assert {part.removesuffix(".py") for part in parts} <= HEIGHT.keys()


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("replicas.py", "from keras_multigpu.checks import problem", []),
        ("training/loops.py", "from keras_multigpu.training import packing", []),
        ("training/loops.py", "from keras_multigpu import replicas", []),
        ("training/loops.py", "import numpy, keras.layers", []),
        ("__init__.py", "from keras_multigpu.verification.verify import verify", []),
        ("commands/demo.py", "import keras_multigpu as kmg", []),
        ("checks.py", "import keras_multigpu.replicas", ["checks.py imports replicas"]),
        ("checks.py", "from keras_multigpu import batch_sizes", ["checks.py imports batch_sizes"]),
        (
            "data/pipeline/order.py",
            "from keras_multigpu.training.loops import x",
            ["data/pipeline/order.py imports training"],
        ),
        (
            "verification/verify.py",
            "from keras_multigpu import strategy",
            ["verification/verify.py imports __init__"],
        ),
        (
            "verification/verify.py",
            "def f():\n  import keras_multigpu.callbacks",
            ["verification/verify.py imports callbacks"],
        ),
    ],
)
def test_the_checker_finds_planted_imports(tmp_path, file, source, expected):
    """Upward and sibling imports in every form; downward ones are allowed."""
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(source)
    assert forbidden_imports(tmp_path) == expected
