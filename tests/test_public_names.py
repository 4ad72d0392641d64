"""`keras_multigpu.__all__` is the public interface: exact and sorted, with no leaks."""

import inspect
import re
from types import ModuleType

import pytest

import keras_multigpu

PUBLIC_NAMES = [
    "augmentation",
    "callbacks",
    "cluster",
    "data",
    "distribute",
    "DistributedModel",
    "explain",
    "function",
    "strategy",
    "train_separately",
    "verify",
]


def test_the_public_names_are_these():
    """A public name is added or removed on purpose: here, in the docs and in CHANGELOG.md."""
    assert keras_multigpu.__all__ == PUBLIC_NAMES


def test_the_public_names_are_sorted():
    """Sorted without regard to case, so that a list of names has one form."""
    assert keras_multigpu.__all__ == sorted(keras_multigpu.__all__, key=str.casefold)


def test_every_public_name_exists_and_is_documented():
    """Each name can be had from the package, and has a docstring."""
    for name in keras_multigpu.__all__:
        assert getattr(keras_multigpu, name).__doc__, name


@pytest.mark.parametrize("part", ["augmentation", "callbacks", "data", ""])
def test_every_public_parameter_is_explained(part):
    """In the `Args:` of the function, or of the class that it makes."""
    module = getattr(keras_multigpu, part) if part else keras_multigpu
    unexplained = []
    for name in module.__all__:
        public = getattr(module, name)
        if isinstance(public, ModuleType):
            continue
        for parameter in inspect.signature(public).parameters.values():
            if parameter.kind.name.startswith("VAR_") or parameter.name.startswith("_"):
                continue
            if not re.search(rf"^ *{parameter.name}(, .*)?: ", public.__doc__, flags=re.MULTILINE):
                unexplained.append(f"{name}({parameter.name})")
    assert unexplained == []


@pytest.mark.parametrize("part", ["augmentation", "callbacks", "data", ""])
def test_every_public_method_is_explained(part):
    """In its own words, or in those of the class it overrides one of."""
    module = getattr(keras_multigpu, part) if part else keras_multigpu
    unexplained = []
    for name in module.__all__:
        public = getattr(module, name)
        for method, value in vars(public).items() if inspect.isclass(public) else [(name, public)]:
            wants = inspect.isroutine(value) or isinstance(value, property)
            documented = inspect.getdoc(getattr(public, method, value))
            if wants and not method.startswith("_") and not documented:
                unexplained.append(f"{name}.{method}")
    assert unexplained == []


@pytest.mark.parametrize("name", keras_multigpu.data.__all__)
def test_every_source_shows_the_shared_arguments(name):
    """`help` and an editor show them by name, type and default, in the same order."""
    parameters = list(inspect.signature(getattr(keras_multigpu.data, name)).parameters.values())
    shown = [
        (one.name, inspect.formatannotation(one.annotation), one.default) for one in parameters
    ]
    assert shown[-9:] == [
        ("global_batch_size", "int | None", None),
        ("replica_batch_size", "int | None", None),
        ("shuffle", "bool", True),
        ("seed", "int", 0),
        ("remainder", "str", "keep"),
        ("augment", "Any", None),
        ("cache", "str | pathlib.Path | None", None),
        ("balance", "str | None", None),
        ("on_error", "str", "raise"),
    ]
    assert all(one.kind is one.KEYWORD_ONLY for one in parameters[-9:])


@pytest.mark.parametrize("name", keras_multigpu.callbacks.__all__)
def test_callbacks_take_one_argument_by_place(name):
    """The rest by name; and one word means the same in all of them."""
    words = {
        "path": "str | pathlib.Path | None",
        "picture": "str | pathlib.Path | None",
        "apply": "str | None",
        "verbose": "int",
        "momentum_correction": "bool | str",
        "smoothing": "float",
    }
    signature = inspect.signature(getattr(keras_multigpu.callbacks, name))
    _, *others = signature.parameters.values() or [None]
    assert all(one.kind is one.KEYWORD_ONLY for one in others)
    for one in signature.parameters.values():
        if one.name in words:
            assert inspect.formatannotation(one.annotation) == words[one.name], one


@pytest.mark.parametrize("part", ["augmentation", "callbacks", "data"])
def test_each_part_offers_its_public_names_and_nothing_else(part):
    """To `dir`, and so to the completion of a notebook: no module, no imported name."""
    module = getattr(keras_multigpu, part)
    shown = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert sorted(module.__all__, key=str.casefold) == module.__all__
    assert set(module.__all__) == shown
    assert dir(module) == sorted(module.__all__)


def test_the_package_offers_its_public_names_and_version():
    assert dir(keras_multigpu) == sorted([*PUBLIC_NAMES, "__version__"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", keras_multigpu.__version__)


def test_nothing_else_leaks():
    """Apart from its own modules the package shows no other name without an underscore."""
    others = {
        name
        for name, value in vars(keras_multigpu).items()
        if not name.startswith("_")
        and not (isinstance(value, ModuleType) and value.__name__ == f"keras_multigpu.{name}")
    }
    assert others <= set(keras_multigpu.__all__)
