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
    {"augmentation"},
    {"data", "training"},
    {"explanation"},
    {"callbacks", "separately", "verification"},
    {"rehearsal", "scaling", "scoreboard"},
    {"__init__"},
    {"commands"},
    {"__main__"},
)


# The rooms of a part, in the same order. A room is a module of the part or a folder.
ROOMS = {
    "partition": (
        {"program", "sizes", "source_line"},
        {"layouts"},
        {"facts", "replica"},
        {"rules"},
        {"planning"},
        {"emission"},
        {"local_step"},
        {"__init__"},
    ),
    "data": (
        {"addresses"},
        {"pipeline"},
        {"caching", "decoding"},
        {"streams"},
        {"sources"},
        {"reading"},
        {"preview"},
        {"batches"},
        {
            f"from_{name}"
            for name in "arrays dataset directory files flow records source tfds".split()
        },
        {"__init__"},
    ),
}


def imported_modules(source: str) -> set[str]:
    """Everything that a file imports, inside functions too: modules, and names in them."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports are banned"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def forbidden_imports(
    folder: Path, layers: tuple[set[str], ...] = LAYERS, package: str = "keras_multigpu"
) -> list[str]:
    """Every import that does not point down, written as `file imports part`."""
    height = {part: height for height, layer in enumerate(layers) for part in layer}
    found = []
    for path in sorted(folder.rglob("*.py")):
        file = path.relative_to(folder)
        importer = file.parts[0].removesuffix(".py")
        modules = imported_modules(path.read_text(encoding="utf-8"))
        own = [f"{name}." for name in modules if f"{name}.".startswith(f"{package}.")]
        below = {name.removeprefix(f"{package}.") for name in own}
        # `from keras_multigpu import checks` is a module, `... import strategy` is not.
        parts = {part if (part := name.split(".")[0]) in height else "__init__" for name in below}
        for part in sorted(parts - {importer}):
            if height[part] >= height[importer]:
                found.append(f"{file.as_posix()} imports {part}")
    return found


def test_imports_point_down():
    """No file imports a sibling of its part, or a part above."""
    assert forbidden_imports(PACKAGE) == []


@pytest.mark.parametrize("part", ROOMS)
def test_imports_between_rooms_point_down(part):
    """The rooms of a part have layers too, so that no circle stands anywhere."""
    assert forbidden_imports(PACKAGE / part, ROOMS[part], f"keras_multigpu.{part}") == []


def parts_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).parts[0].removesuffix(".py") for path in folder.rglob("*.py")}


def test_every_part_has_a_layer():
    """A new module or folder needs a place in LAYERS, and in docs and CONTRIBUTING.md."""
    assert parts_in(PACKAGE) <= set().union(*LAYERS)
    for part, layers in ROOMS.items():
        assert parts_in(PACKAGE / part) <= set().union(*layers)


@pytest.mark.parametrize(
    ("file", "source", "expected"),
    [
        ("training/loops.py", "from keras_multigpu.training import packing", []),
        ("training/loops.py", "from keras_multigpu import replicas", []),
        ("commands/demo.py", "import keras_multigpu as kmg", []),
        ("checks.py", "import keras_multigpu.replicas", ["checks.py imports replicas"]),
        ("checks.py", "from keras_multigpu import batch_sizes", ["checks.py imports batch_sizes"]),
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
