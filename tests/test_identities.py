"""`identities`: objects made in the same way have equal identities, and others do not."""

import functools
import importlib
import json
import sys
import time

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu import augmentation
from keras_multigpu.identities import (
    changes,
    code_of,
    identify_array,
    identify_dataset,
    identity_of,
)

STRENGTH = 0.1


class Own(keras.layers.Layer):
    def __init__(self, strength, table, function):
        super().__init__()
        self.strength, self.function = strength, function

    def call(self, x):
        return x


def same(one, other):
    """Whether the identities are equal after a round trip through JSON."""
    one, other = (json.loads(json.dumps(identity_of(value))) for value in (one, other))
    return not changes(one, other)


def scaled(factor):
    return lambda x: x * factor


def with_default(number):
    def made(x, by=number):
        return x * by

    return made


def twice(x):
    """Doubles."""
    return 2 * x


def halved(x, by=2):
    return x / by


def by_strength(x):
    return x * STRENGTH


class Registered(keras.regularizers.Regularizer):
    """Has an empty configuration, and keeps its argument under a private name."""

    def __init__(self, factor):
        self._factor = factor

    def get_config(self):
        return {}


class Handing(keras.layers.Layer):
    """Passes arguments on, and keeps a function under another name."""

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.inner = {"of_user": function}
        self.of_user = [function]


class Sparse(keras.losses.SparseCategoricalCrossentropy):
    """Like Keras's class, with the same gap in its configuration."""


def adapted(texts):
    """A layer whose vocabulary comes from `adapt`."""
    layer = keras.layers.StringLookup()
    layer.adapt(np.array(texts))
    return layer


def of_library(number):
    """A function that seems to come from an installed package."""
    names = {}
    text = "def make(number):\n    def made(x):\n        return x * number\n    return made"
    exec(compile(text, "/usr/lib/site-packages/some.py", "exec"), names)
    return names["make"](number)


def decorated(factor):
    """A function in a user's wrapper that contains the number."""

    @functools.wraps(twice)
    def wrapper(x):
        return factor * twice(x)

    return wrapper


class Unready:
    """Has a property that raises because it is not ready yet."""

    def __init__(self, value, other):
        self.other = other

    @property
    def value(self):
        raise RuntimeError("Not yet.")


class Reference:
    """Its `repr` contains its address, like that of most classes."""


MADE_ALIKE = [
    (lambda: keras.layers.Dense(3), lambda: keras.layers.Dense(3, name="x"), None),
    (lambda: keras.layers.Dense(3), None, lambda: keras.layers.EinsumDense("ab,bc->ac", 3)),
    (
        lambda: keras.layers.Lambda(lambda x: x + 1),
        lambda: keras.layers.Lambda(lambda x: x + 1),
        lambda: keras.layers.Lambda(lambda x: x + 2),
    ),
    (
        lambda: Own(1, [2], scaled(3)),
        lambda: Own(1, [4], scaled(3)),  # The layer does not keep its table.
        lambda: Own(1, [2], scaled(4)),
    ),
    (lambda: Own(1, [], twice), None, lambda: Own(2, [], twice)),
    (lambda: scaled(2), None, lambda: scaled(3)),
    (lambda: with_default(2), None, lambda: with_default(3)),
    (lambda: twice, None, lambda: halved),
    (lambda: functools.partial(halved, by=3), None, lambda: functools.partial(halved, by=4)),
    (lambda: float("nan"), None, lambda: float("inf")),
    (lambda: list(range(9999)), None, lambda: list(range(1, 10000))),
    (lambda: np.zeros(3, "f4"), lambda: tf.zeros(3), lambda: np.zeros(3, "f8")),
    (lambda: np.array(["a", None]), None, lambda: np.array(["b", 0])),
    (lambda: np.ones(3, ml_dtypes.bfloat16), None, lambda: np.ones(3, "f2")),
    (
        lambda: keras.mixed_precision.DTypePolicy("float32"),
        None,
        lambda: keras.mixed_precision.DTypePolicy("float16"),
    ),
    # What a configuration leaves out: arguments, the code of functions, what `adapt` finds.
    (lambda: decorated(2), None, lambda: decorated(3)),
    (lambda: keras.losses.Huber(1.0).call, None, lambda: keras.losses.Huber(2.0).call),
    (lambda: of_library(2), None, lambda: of_library(3)),
    (lambda: Sparse(axis=-1), None, lambda: Sparse(axis=1)),
    (lambda: Registered(1), None, lambda: Registered(2)),
    (lambda: Handing(scaled(2)), None, lambda: Handing(scaled(3))),
    (lambda: Handing(scaled(2)), None, lambda: Handing(scaled(2), autocast=False)),
    (lambda: Handing(scaled(2)), None, lambda: Handing(scaled(2), dtype="mixed_float16")),
    (
        lambda: augmentation.KerasLayer(Handing(scaled(2))),
        None,
        lambda: augmentation.KerasLayer(Handing(scaled(3))),
    ),
    (lambda: functools.cache(scaled(2)), None, lambda: functools.cache(scaled(3))),
    (lambda: np.sqrt, None, lambda: np.exp),
    (lambda: tf.function(scaled(2)), None, lambda: tf.function(scaled(3))),
    (lambda: adapted(["a"]), None, lambda: adapted(["b"])),
    # In long lists, arrays and dicts; and in sets, which have no order.
    (lambda: [Reference()] * 2000, None, lambda: [Unready(1, 2)] * 2000),
    (lambda: np.array([Reference(), None]), None, lambda: np.array([None, None])),
    (lambda: {Reference(): 1}, None, lambda: {Reference(): 2}),
    (lambda: [{"a", "b"}] * 2000, lambda: [{"b", "a"}] * 2000, lambda: [{"a"}] * 2000),
    (lambda: {"a", "b", "c"}, lambda: {"c", "b", "a"}, lambda: {"a", "b"}),
    (lambda: b"a", None, lambda: b"b"),
    (
        lambda: np.array([np.arange(2000), None], object),
        None,
        lambda: np.array([np.arange(2000) // 1999, None], object),
    ),
]
"""An object, one made alike (in the same way if it is None), and another."""


@pytest.mark.parametrize(("one", "same_one", "other"), MADE_ALIKE)
def test_objects_have_equal_identities_only_if_made_alike(one, same_one, other):
    """Addresses are no part of identities."""
    kept = one()
    assert same(kept, (same_one or one)())
    assert other is None or not same(kept, other())


def test_functions_of_a_dataset_change_its_identity():
    """The user's functions in each step count, TensorFlow's own do not."""

    def made(double, limit):
        data = tf.data.Dataset.range(9).map(double).interleave(tf.data.Dataset.from_tensors)
        return identify_dataset(data.filter(lambda x: x < limit).batch(2).unbatch())

    one = made(scaled(2), 3)
    assert one == made(scaled(2), 3) and len(one["functions"]) == 2
    for other in (made(scaled(3), 3), made(scaled(2), 4)):
        ((place, (then, now)),) = changes(one, other).items()
        assert place.startswith("functions") and then + 1 == now


def test_a_registered_function_is_identified_by_its_code():
    found = []
    for function in (lambda x: 2 * x, lambda x: 3 * x):
        function.__name__ = function.__qualname__ = "of_user"
        keras.saving.register_keras_serializable("tests")(function)
        found.append(keras.layers.Lambda(function))
        assert "function" in found[-1].get_config()
    assert not same(*found)


def test_global_numbers_that_a_function_uses_change_its_identity(monkeypatch):
    before = identity_of(by_strength)
    monkeypatch.setitem(globals(), "STRENGTH", 0.9)
    assert changes(before, identity_of(by_strength)) == {"globals.STRENGTH": (0.1, 0.9)}
    inner = lambda x: [[each * STRENGTH for each in row] for row in x]  # noqa: E731
    assert identity_of(inner)["globals"] == {"STRENGTH": 0.9}


def with_much_syntax(x, *rest, by=(1, 2.5), **more):
    """A docstring."""
    total: int = 0

    def inner(y):
        """Another one."""
        return f"{y!r:>{total}} {more['a']}" if y else None

    for each in [one * 2 for one in rest if (size := len(x)) > 1 and one in {1, 2}]:
        match each:
            case [first, *_] | {"a": first}:
                total += first[1:, ..., ::size]
            case _:
                with inner(each) as (a, b), b:
                    raise ValueError(a) from None
    return lambda z=by, /: (yield from inner(z)) or not {**more, "b": -1e-3j}


def test_the_code_of_a_function_has_the_same_digest_under_each_python():
    """Its byte code differs between versions of Python, and so do `ast.dump` and `ast.unparse`."""
    digests = [code_of(each)[:8] for each in (twice, halved, scaled(3), with_much_syntax)]
    assert digests == ["142b1bfc", "80e96044", "22486f89", "91f4f5e4"]


@pytest.mark.parametrize(
    ("text", "same_one", "other"),
    [
        (
            "def f(x):\n    return 2 * x",
            '@id\ndef g(): pass\ndef f(x: int) -> int:\n  "Twice."\n  return (2*x)  # x',
            "def f(x):\n    return 3 * x",
        ),
        ("f = lambda x: 2 * x", "f = (lambda x:\n     2 * x)", "f = lambda x: 3 * x"),
        # Two on a line, one after or inside the other.
        ("_, f = lambda x: 1 * x, lambda x: 2 * x", "f = lambda x: 2 * x", "f = lambda x: 1 * x"),
        ("f = (lambda y: lambda x: 2 * x)(1)", "f = lambda x: 2 * x", "f = lambda y: 2 * y"),
        (
            "def f(x):\n  if x == 0: pass\n" + "  elif x == 1: pass\n" * 400,
            None,
            "def f(x):\n  if x == 0: pass\n" + "  elif x == 2: pass\n" * 400,
        ),
        ("f = lambda: lambda: 2", "f, _ = lambda: lambda: 2, lambda: 3", "f = lambda: 2"),
    ],
)
def test_only_the_syntax_of_a_function_counts(text, same_one, other, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    for number, each in enumerate((text, same_one or text, other)):
        (tmp_path / f"of_user_{number}.py").write_text(each)
        found.append(identity_of(importlib.import_module(f"of_user_{number}").f)["code"])
        monkeypatch.delitem(sys.modules, f"of_user_{number}")
    assert found[0] == found[1] != found[2]


def test_functions_of_libraries_are_identified_by_name():
    assert identity_of(keras.activations.relu) == "relu"


def test_a_function_that_refers_to_itself_is_identified():
    def again(x):
        return again(x - 1) if x else 0

    assert identity_of(again)["closed_over"] == ["itself"]


def test_a_large_array_is_identified_by_a_small_sample():
    large = np.zeros((300, 128, 1024), np.float32)
    times = [time.thread_time()]
    for whole in (False, True):
        before = identify_array(large, whole)
        times.append(time.thread_time())
    in_places, of_all = np.diff(times)
    assert in_places < of_all / 3, "A sample is 16 of 157 MB."
    before = identify_array(large)
    for change in (0, 299, np.s_[::20]):
        other = large.copy()
        other[change] = 1
        assert identify_array(other) != before
    other = large.copy()
    other[150, 7] = 1
    assert identify_array(other, whole=True) != identify_array(large, whole=True)
    narrow = np.zeros(8_000_000, np.float32)
    before = identify_array(narrow)
    narrow[100:31_000] = 1  # Between the starts of two of 256 pieces, each 15,625 long.
    assert identify_array(narrow) != before
    assert identify_array(large[:5, ::2]) == identify_array(np.zeros((5, 64, 1024), np.float32))


def test_changes_name_the_place_that_differs():
    then = {"a": [1, {"b": 2}], "c": {"class": "SGD", "momentum": 1}, "d": [1], "e": 0}
    now = {"a": [1, {"b": 3}], "c": {"class": "Adam"}, "d": [1, 2]}
    assert changes(then, now) == {
        "a[1].b": (2, 3),
        "c": ("SGD", "Adam"),
        "d": ([1], [1, 2]),
        "e": (0, None),
    }


def test_unreadable_attributes_are_left_out():
    assert identity_of(Unready(1, 2)) == {"class": "Unready", "other": 2}
    assert identity_of([keras.Input((3,))]) == ["KerasTensor of shape (None, 3)"]


def test_a_model_called_by_a_loss_is_identified_without_names():
    """When it is built again, as for a perceptual loss, its layers have other names."""

    def made(units):
        inputs = keras.Input((3,))
        model = keras.Model(inputs, keras.layers.Dense(units)(inputs))
        return lambda y, y_pred: model(y) - model(y_pred)

    assert same(made(2), made(2)) and not same(made(2), made(3))


def test_the_folder_of_a_script_is_not_part_of_an_identity():
    def in_folder(folder):
        names: dict[str, object] = {"__file__": folder, "LEVEL": 1}
        exec(compile("def of(x):\n    return __file__, LEVEL", "user.py", "exec"), names)
        return names["of"]

    assert same(in_folder("a"), in_folder("b"))
    assert identity_of(in_folder("a"))["globals"] == {"LEVEL": 1}
