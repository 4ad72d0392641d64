"""Private names of Keras and TensorFlow are used in `keras_internals` only.

There each of them has its reason and a test, so a new Keras breaks one file, with a clear sentence.
"""

import ast
from pathlib import Path

import keras
import pytest

PACKAGE = Path(__file__).parents[1] / "keras_multigpu"
PRIVATE_DOOR = "keras_internals"
# Public in spite of the underscore, which keeps a named tuple's methods apart from its fields,
# marks the hooks that notebooks call, or warns that a function is for experts.
DOCUMENTED = {"_asdict", "_fields", "_make", "_replace", "_repr_png_", "_current_frames", "_exit"}
PRIVATE_MODULES = ("keras.src", "tensorflow.python", "tf.__internal__")


def inherited_private_names() -> set[str]:
    """Keras's own `_name` attributes of the classes that ours extend."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    functional = keras.Model(model.inputs, model.outputs)
    objects = [model, functional, model.layers[0], keras.callbacks.Callback()]
    return {name for instance in objects for name in dir(instance) if is_private(name)}


def is_private(name: str) -> bool:
    """Whether a name is private by its underscore."""
    return name.startswith("_") and not name.startswith("__") and name not in DOCUMENTED


def is_own(node: ast.expr) -> bool:
    """Whether an expression is `self`, `cls` or `super()`."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id == "super"
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def inside_keras_classes(tree: ast.AST) -> set[ast.AST]:
    """All nodes inside subclasses of Keras classes, where `self` has Keras's private names, too."""
    return {
        node
        for owner in ast.walk(tree)
        if isinstance(owner, ast.ClassDef)
        and any(ast.unparse(base).startswith("keras.") for base in owner.bases)
        for node in ast.walk(owner)
    }


def without_docstrings(tree: ast.AST) -> ast.AST:
    """The same code without docstrings; `ast` has dropped the comments already."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(...)
    return tree


def private_names(source: str, inherited: set[str]) -> list[str]:
    tree = without_docstrings(ast.parse(source))
    code = ast.unparse(tree)
    found = [module for module in PRIVATE_MODULES if module in code]
    in_keras = inside_keras_classes(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=owner, attr=name):
                pass
            # vars(layer)["_name"].
            case ast.Subscript(
                value=ast.Call(func=ast.Name(id="vars"), args=[owner]),
                slice=ast.Constant(value=str(name)),
            ):
                pass
            # getattr(model, "_name"), setattr and so on.
            case ast.Call(func=ast.Name(), args=[owner, ast.Constant(value=str(name)), *_]):
                pass
            case _:
                continue
        theirs = not is_own(owner) or (name in inherited and node in in_keras)
        if is_private(name) and theirs:
            found.append(f"{ast.unparse(owner)}.{name}")
    return sorted(set(found))


@pytest.mark.slow
def test_private_names_are_used_only_in_keras_internals():
    """Other files use only their own private names."""
    inherited = inherited_private_names()
    found = {
        str(path.relative_to(PACKAGE)): private_names(path.read_text(encoding="utf-8"), inherited)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != PRIVATE_DOOR
    }
    assert {file: names for file, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("self._mine = cls._mine = super()._mine()", []),
        ("model.__class__", []),
        ("pair._replace(first=1)", []),
        ("'''See keras.src.'''  # keras.src", []),
        ("getattr(self, '_mine'); getattr(model, 'name')", []),
        ("model._theirs()", ["model._theirs"]),
        ("self.model._theirs", ["self.model._theirs"]),
        ("setattr(model, '_theirs', 1)", ["model._theirs"]),
        ("vars(layer)['_theirs'] = vars(self)['_mine']", ["layer._theirs"]),
        ("class A(keras.Model):\n  x = lambda self: self._inherited", ["self._inherited"]),
        ("class A:\n  x = lambda self: self._inherited", []),
        ("import tensorflow.python.eager as x", ["tensorflow.python"]),
        ("from keras.src import ops", ["keras.src"]),
        ("import_module('keras.src.ops')", ["keras.src"]),
        ("tf.__internal__.x()", ["tf.__internal__"]),
    ],
)
def test_the_checker_finds_planted_names(source, expected):
    """Private names of others in every form; a class's own are allowed."""
    assert private_names(source, {"_inherited"}) == expected
