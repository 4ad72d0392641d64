"""`__all__` of the package and of its parts is the public interface: sorted and documented."""

import inspect
import re
from pathlib import Path
from types import ModuleType

import keras
import pytest

import keras_multigpu
from keras_multigpu.callbacks import RunCallback

DOCS = Path(__file__).parents[1] / "docs"
DOCUMENTED = {
    name: page
    for page in DOCS.glob("**/*.md")
    for name in re.findall(r"^::: (\S+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
}
"""The page of each object that the documentation explains."""
API = DOCS / "api" / "augmentation.md"
NOT_OFFERED = {
    "DeviceMemory",
    "Explanation",
    "JobResult",
    "MemoryEstimate",
    "Part",
    "Report",
    "StepView",
    "TrainingRun",
    "Verification",
}
"""Documented because functions return them or pass them to callbacks; not in `__all__`."""
PARTS = ("augmentation", "callbacks", "cluster", "data")
PATH = inspect.formatannotation(Path)
"""`Path` as signatures show it: in Python 3.13 it belongs to a submodule of `pathlib`."""


def offered(module):
    """The classes and functions that a module offers, by their full names."""
    named = {name: getattr(module, name) for name in module.__all__}
    return {
        f"{one.__module__}.{name}": one
        for name, one in named.items()
        if not isinstance(one, ModuleType)
    }


def test_the_public_names_are_those_in_the_docs():
    """Whoever adds or removes one changes the docs and CHANGELOG.md."""
    modules = [keras_multigpu, *(getattr(keras_multigpu, part) for part in PARTS)]
    names = {name for module in modules for name in offered(module)}
    explained = {name for name in DOCUMENTED if name.rpartition(".")[2] not in NOT_OFFERED}
    assert names == explained - {"keras_multigpu.cluster.ray.train"}, (
        "a page of docs/ has a line `::: NAME` for each, and mkdocs.yml has each page"
    )


def test_the_index_of_the_api_lists_each_name_with_its_page():
    index = DOCS / "api" / "index.md"
    row = re.compile(r"^\| \[`kmg\.(\S+)`\]\(([^)#]+)[^)]*\) \| .+ \|$", re.MULTILINE)
    listed = {
        name: (index.parent / page).resolve()
        for name, page in row.findall(index.read_text(encoding="utf-8"))
    }
    pages = {"cluster.ray.train": DOCUMENTED["keras_multigpu.cluster.ray.train"]}
    for part in ("", *PARTS):
        module = getattr(keras_multigpu, part) if part else keras_multigpu
        for full, one in offered(module).items():
            pages[f"{part}.{one.__name__}".lstrip(".")] = DOCUMENTED[full]
    assert listed == pages


def test_each_callback_has_a_page_a_row_in_the_overview_and_a_cost():
    """One says what it is for, and the other what it costs."""
    overview = (DOCS / "callbacks" / "index.md").read_text(encoding="utf-8")
    purposes, costs = overview.split("\n## Cost\n")
    for name, one in offered(keras_multigpu.callbacks).items():
        if issubclass(one, keras.callbacks.Callback) and one is not RunCallback:
            assert name in DOCUMENTED, f"{name} needs a page in docs/callbacks/"
            assert f"| [{one.__name__}]({DOCUMENTED[name].name}) " in purposes, name
            assert f"`{one.__name__}`" in costs, name


def test_each_layer_has_a_picture():
    """The build of the page draws it, under the layer's name in snake case."""
    page = API.read_text(encoding="utf-8")
    without = {"AugmentationLayer", "KerasCVLayer", "KerasLayer", "Sequence"}
    for name, one in offered(keras_multigpu.augmentation).items():
        if inspect.isclass(one) and issubclass(one, keras.layers.Layer):
            layer = one.__name__
            picture = re.sub(r"(?<!^)(?=[A-Z])", "_", layer).lower()
            assert layer in without or f"(images/{picture}.webp)" in page, (
                f"{name} needs a picture: drawn in docs/augmentation_pictures.py, shown on {API}"
            )


@pytest.mark.parametrize("part", [*PARTS, ""])
def test_every_public_parameter_is_explained(part):
    """In the `Args:` of the function, or of `Batches` for the shared ones."""
    module = getattr(keras_multigpu, part) if part else keras_multigpu
    unexplained = []
    for name in module.__all__:
        public = getattr(module, name)
        if isinstance(public, ModuleType):
            continue
        for parameter in inspect.signature(public).parameters.values():
            if parameter.kind.name.startswith("VAR_") or parameter.name.startswith("_"):
                continue
            explained = public.__doc__
            if f"`{parameter.name}`" in explained[explained.find("**batching: ") :]:
                explained = keras_multigpu.data.Batches.__doc__
            if not re.search(rf"^ *{parameter.name}(, .*)?: ", explained, flags=re.MULTILINE):
                unexplained.append(f"{name}({parameter.name})")
    assert unexplained == []


@pytest.mark.parametrize("part", [*PARTS, ""])
def test_every_public_name_and_method_has_a_docstring(part):
    """A method may have that of the method it overrides."""
    module = getattr(keras_multigpu, part) if part else keras_multigpu
    unexplained = []
    for name in module.__all__:
        public = getattr(module, name)
        if not public.__doc__:
            unexplained.append(name)
        for method, value in vars(public).items() if inspect.isclass(public) else ():
            wants = inspect.isroutine(value) or isinstance(value, property)
            documented = inspect.getdoc(getattr(public, method, value))
            if wants and not method.startswith("_") and not documented:
                unexplained.append(f"{name}.{method}")
    assert unexplained == []


@pytest.mark.parametrize("name", keras_multigpu.data.__all__)
def test_every_source_shows_the_shared_arguments(name):
    """By name, type and default, and in the same order, as in `help` and editors."""
    parameters = list(inspect.signature(getattr(keras_multigpu.data, name)).parameters.values())
    shown = [
        (one.name, inspect.formatannotation(one.annotation), one.default) for one in parameters
    ]
    assert shown[-9:] == [
        ("global_batch_size", "int | None", None),
        ("replica_batch_size", "int | None", None),
        ("shuffle", "bool", True),
        ("seed", "int", 0),
        ("remainder", "Literal['keep', 'drop']", "keep"),
        ("augment", "Any", None),
        ("cache", f"str | {PATH} | None", None),
        ("balance", "Optional[Literal['class_weight', 'oversample']]", None),
        ("on_error", "Literal['raise', 'skip']", "raise"),
    ]
    assert all(one.kind is one.KEYWORD_ONLY for one in parameters[-9:])


@pytest.mark.parametrize("name", keras_multigpu.callbacks.__all__)
def test_callbacks_take_one_positional_argument(name):
    """The others are keywords, and have the same type wherever they occur."""
    words = {
        "path": f"str | {PATH} | None",
        "apply": "str | None",
        "verbose": "int",
    }
    signature = inspect.signature(getattr(keras_multigpu.callbacks, name))
    _, *others = signature.parameters.values() or [None]
    assert all(one.kind is one.KEYWORD_ONLY for one in others)
    for one in signature.parameters.values():
        if one.name in words:
            # A required argument is never None.
            word = words[one.name]
            word = word.removesuffix(" | None") if one.default is one.empty else word
            assert inspect.formatannotation(one.annotation) == word, one


@pytest.mark.parametrize("part", PARTS)
def test_each_part_offers_its_public_names_and_nothing_else(part):
    module = getattr(keras_multigpu, part)
    shown = {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert sorted(module.__all__, key=str.casefold) == module.__all__
    assert {one for one in module.__all__ if callable(getattr(module, one))} == shown
    assert dir(module) == sorted(module.__all__)


def test_the_package_offers_its_public_names_and_version():
    names = keras_multigpu.__all__
    assert names == sorted(names, key=str.casefold)
    assert dir(keras_multigpu) == sorted([*names, "__version__"])
    assert re.fullmatch(r"\d+\.\d+\.\d+", keras_multigpu.__version__)


def test_the_package_shows_no_other_name():
    """Except for its own modules."""
    others = {
        name
        for name, value in vars(keras_multigpu).items()
        if not name.startswith("_")
        and not (isinstance(value, ModuleType) and value.__name__ == f"keras_multigpu.{name}")
    }
    assert others <= set(keras_multigpu.__all__)
