"""Describes how an object was made, as plain values that are equal for objects made alike.

    layers, losses, optimizers   class and configuration, without names, seeds and initial values
    functions                    name, source text, defaults, and the outside values they use
    arrays                       type, shape and a digest, for large ones of a sample
    anything else                the name of the class, and the constructor's arguments it keeps

Names are left out because Keras counts them: a notebook cell that runs twice makes `dense_1`.
`joblib.hash` tells two builds of one model apart, misses changes in a function's code, and fails
for lambdas and datasets.
"""

import ast
import contextlib
import functools
import hashlib
import inspect
import json
import linecache
import math
import sysconfig
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import dataset_internals, model_internals

# The most bytes read of an array; that takes about 10 ms.
SAMPLED_BYTES = 2**24

# The number of evenly spaced places at which a larger array is read.
PIECES = 256

# Longer lists are described by a digest.
LONG = 1000

PLAIN = (bool, int, float, str, bytes)

# Entries of a configuration that are names, or draws and values that a checkpoint restores.
UNIMPORTANT = ("name", "seed", "module", "registered_name", "build_config")

# The folders of code that is not the user's, besides packages installed with `pip`.
NOT_OF_USER = (Path(sysconfig.get_paths()["stdlib"]), Path(__file__).parent)

# The ids of the objects that contain this one.
Where = tuple[int, ...]


def identity_of(value: Any, inside: Where = ()) -> Any:
    """Describe how a value was made, in values that JSON can hold.

    Args:
        inside: The objects that contain the value, to stop at cycles.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # NaN does not equal itself.
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, complex)) or value is ...:
        return repr(value)
    if isinstance(value, (list, tuple)):
        if len(value) > LONG:
            return identify_array(np.fromiter(value, object, len(value)))
        return [identity_of(item, inside) for item in value]
    if isinstance(value, (set, frozenset)):
        # The order differs between processes.
        return identity_of(sorted(json.dumps(identity_of(item, inside)) for item in value))
    if isinstance(value, dict):
        return identify_dict(value, inside)
    if isinstance(value, np.generic):
        return identity_of(value.item(), inside)
    if isinstance(value, (keras.Variable, tf.Variable)):
        return f"a variable of shape {tuple(value.shape)}"
    if isinstance(value, types.CodeType):
        return value.co_name  # Its parts are described beside it.
    if isinstance(value, (Path, np.dtype, tf.DType, tf.TypeSpec, keras.DTypePolicy)):
        return str(value)
    if hasattr(value, "__array__") and hasattr(value, "shape"):
        return identify_arraylike(value)
    if id(value) in inside:
        return "itself"
    inside = (*inside, id(value))
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return identify_function(value, inside)
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
        return {"partial": [identity_of(part, inside) for part in parts]}
    if isinstance(value, tf.data.Dataset):
        return identify_dataset(value)
    if isinstance(value, keras.Model):
        return [identify_layer(part, inside) for part in model_internals.layers_of(value)]
    if isinstance(value, (type, types.BuiltinFunctionType)):
        return value.__qualname__
    return identify_object(value, inside)


def identify_object(value: Any, inside: Where = ()) -> dict[str, Any]:
    """Describe an object by its class, its configuration and the arguments it keeps.

    Args:
        inside: The objects that contain it.
    """
    config: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # A user's class may raise anything.
        config = dict(value.get_config())
    held = find_held(value, config)
    identity = identify_config(config, inside)
    identity |= {name: identity_of(part, inside) for name, part in held.items()}
    return {"class": value.__class__.__qualname__, **identity}


def find_held(value: Any, config: dict[str, Any]) -> dict[str, Any]:
    """What decides an object's behaviour, but is missing in its configuration."""
    held: dict[str, Any] = {}
    for name in filter(is_important, dict.fromkeys([*arguments(type(value)), *config])):
        public = ["dtype_policy", "dtype"] if name == "dtype" else [name]
        part = get_first(value, *public, f"_{name}")
        # For functions a configuration has only names, and `adapt` sets what it has as None.
        if part is not None and (config.get(name) is None or runs(part)):
            held[name] = part
    held |= model_internals.arguments_of_function(value)
    if hasattr(value, "get_config") and not isinstance(value, keras.Model):
        held |= {
            name: part
            for name, part in getattr(value, "__dict__", {}).items()
            # Keras wraps methods, and stores layers under names of its own.
            if not hasattr(type(value), name) and name not in {*config, *held}
            if is_function(part) or (not config and not name.startswith("_") and runs(part))
        }
    elif callable(value):  # Such as NumPy's functions, and those that `functools` wrapped.
        names = ("__wrapped__", "__name__")
        held |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, keras.Layer) and hasattr(value, "get_vocabulary"):
        with contextlib.suppress(Exception):  # It raises before `adapt`.
            held["vocabulary"] = value.get_vocabulary()
    return held


def get_first(value: Any, *names: str) -> Any:
    """The object's first attribute of these names that is not None."""
    for name in names:
        with contextlib.suppress(Exception):  # A property may raise anything.
            if (kept := getattr(value, name, None)) is not None:
                return kept
    return None


def is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial))


def runs(value: Any) -> bool:
    """Whether a value can be called, or something in it."""
    parts = value.values() if isinstance(value, dict) else value
    return callable(value) or (isinstance(value, (dict, list, tuple)) and any(map(runs, parts)))


def identify_dataset(dataset: tf.data.Dataset) -> dict[str, Any]:
    """Describe how a dataset was made and the user's functions in it, but not its elements."""
    made = {"made": identity_of(dataset_internals.recipe(dataset))}
    called = dataset_internals.functions_of(dataset)
    own = [each for each in called if not is_function(each) or is_of_user(file_of(each))]
    return {**made, "functions": identity_of(own)} if own else made


def file_of(function: Any) -> str:
    function = getattr(function, "func", function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "" if code is None else code.co_filename


def identify_layer(layer: keras.Layer, inside: Where = ()) -> dict[str, Any]:
    """Describe a layer; one that Keras made of others only by how they are connected."""
    if type(layer).get_config in MADE_OF_OTHERS:
        return {"class": type(layer).__name__, "wiring": identity_of(model_internals.wiring(layer))}
    return identify_object(layer, inside)


# The layers inside are described separately.
MADE_OF_OTHERS = (keras.Sequential.get_config, model_internals.FunctionalModel.get_config)


def arguments(kind: type) -> list[str]:
    """The names of the arguments of a class, and of those that it passes to its bases."""
    found: list[str] = []
    with contextlib.suppress(ValueError, TypeError):  # Some classes have no signature.
        # An enumeration has only this one.
        found += inspect.signature(kind).parameters
    for each in kind.__mro__:
        if inspect.isfunction(init := vars(each).get("__init__")):
            _, *parameters = inspect.signature(init).parameters.values()
            found += [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
            if all(p.kind != p.VAR_KEYWORD for p in parameters):
                break
    return [*dict.fromkeys(found)]


@functools.cache
def is_of_user(path: str) -> bool:
    """Whether a file of code is not from Python, an installed package or this package."""
    place = Path(path)
    if not path or {"site-packages", "dist-packages"} & {*place.parts}:
        return False
    return not any(map(place.is_relative_to, NOT_OF_USER))


def identify_config(config: dict[Any, Any], inside: Where = ()) -> dict[str, Any]:
    """The identities of the entries of a configuration that matter."""
    return {
        key_of(name): identity_of(value, inside)
        for name, value in config.items()
        if is_important(name)
    }


def key_of(name: Any) -> str:
    """The key of a dict as text; the text of an object itself would contain its address."""
    is_plain = name is None or isinstance(name, PLAIN)
    return str(name) if is_plain else json.dumps(identity_of(name))


def identify_dict(value: dict[Any, Any], inside: Where) -> dict[str, Any]:
    """Describe a dict, which may be an object that Keras has serialized."""
    kind, config = value.get("class_name"), value.get("config")
    if not isinstance(kind, str) or kind.endswith("DTypePolicy"):
        return {key_of(name): identity_of(item, inside) for name, item in value.items()}
    if kind == "__lambda__":  # It holds bytes that name a file.
        config = None
    known = (
        identify_config(config, inside) if isinstance(config, dict) else identity_of(config, inside)
    )
    return {"class": kind, "config": known}


def is_important(name: Any) -> bool:
    """Whether an entry of a configuration decides what is computed after a checkpoint."""
    return name not in UNIMPORTANT and not str(name).endswith("_initializer")


def identify_function(function: Callable[..., Any], inside: Where = ()) -> Any:
    """Describe a function: by its name if a library brings it, otherwise also by its code.

    What it calls is left out: a later version of that may read a checkpoint.

    Args:
        inside: The objects that contain it.
    """
    owner = getattr(function, "__self__", None)
    # A wrapper of the user's contains what it wraps.
    function = inspect.unwrap(
        getattr(function, "__func__", function), stop=lambda each: is_of_user(file_of(each))
    )
    held: dict[str, Any] = {}
    if owner is not None and not isinstance(owner, (type, types.ModuleType)):
        held["of"] = owner
    if getattr(function, "__closure__", None):
        held["closed_over"] = find_closed_over(function)
    if is_of_user(file_of(function)):
        held["code"] = code_of(function)
        held["defaults"] = [function.__defaults__, function.__kwdefaults__]
        held["globals"] = plain_globals(function)
    parts = {name: identity_of(part, inside) for name, part in held.items()}
    return {"function": function.__qualname__, **parts} if parts else function.__qualname__


def plain_globals(function: Any) -> dict[str, Any]:
    """The numbers and texts outside of a function that it uses."""
    return {
        name: value
        for name in names_in(function.__code__)
        # Names such as `__file__` differ between machines.
        if not name.startswith("__")
        if isinstance(value := function.__globals__.get(name), (bool, int, float, str, tuple))
    }


def code_of(function: Any) -> str:
    """A digest of what a function does, the same under each version of Python.

    It is that of the source text, without comments, docstrings and annotations. Where there is
    none, as for `exec`, that of the byte code, which another version compiles to something else.
    """
    code = function.__code__
    node = node_of(code, function.__globals__)
    with contextlib.suppress(RecursionError):  # Of hundreds of nested branches.
        if node is not None:
            return digest([describe_node(node.args), describe_node(node.body)])
    return digest(
        [
            [each.co_code.hex(), each.co_names, identity_of(each.co_consts)]
            for each in codes_in(code)
        ]
    )


def digest(plain: Any) -> str:
    return hashlib.sha256(json.dumps(plain).encode()).hexdigest()


def node_of(code: types.CodeType, names: dict[str, Any]) -> Any:
    """The definition or `lambda` that was compiled to this code; None without its source text."""
    linecache.checkcache(code.co_filename)
    text = "".join(linecache.getlines(code.co_filename, names))
    found = definitions_in(text).get((code.co_firstlineno, code.co_name), [])
    places = [
        (first, start, last, end)
        for first, last, start, end in code.co_positions()
        if first is not None and last is not None and (start, end) not in [(0, 0), (None, None)]
    ]

    def encloses(node: Any) -> bool:
        begin, end = (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)
        return all(begin <= place[:2] and place[2:] <= end for place in places)

    # Several lambdas may stand on a line, one inside another.
    return max(filter(encloses, found), key=lambda node: node.col_offset, default=None)


@functools.lru_cache(maxsize=64)
def definitions_in(text: str) -> dict[tuple[int, str], list[Any]]:
    """The definitions and lambdas in a source text, by first line and name."""
    found: dict[tuple[int, str], list[Any]] = {}
    with contextlib.suppress(SyntaxError, ValueError):  # A notebook's cell may hold magics.
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = min(part.lineno for part in [node, *node.decorator_list])
                found.setdefault((first, node.name), []).append(node)
            elif isinstance(node, ast.Lambda):
                found.setdefault((node.lineno, "<lambda>"), []).append(node)
    return found


def describe_node(node: Any) -> Any:
    """A syntax tree as plain values; `ast.dump` and `ast.unparse` differ between versions."""
    if isinstance(node, list):
        # Without texts that stand for themselves, as docstrings do.
        return [describe_node(part) for part in node if not is_text(part)]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):
        # Python 3.12 adds empty texts.
        return describe_node([part for part in node.values if getattr(part, "value", None) != ""])
    parts = {
        name: describe_node(part)
        for name, part in ast.iter_fields(node)
        if name not in ("annotation", "returns", "type_params", "kind", "ctx")
        and part not in (None, [])
    }
    return [type(node).__name__, parts]


def is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def find_closed_over(function: Any) -> list[Any]:
    """The values that a function closes over."""
    values: list[Any] = []
    for cell in function.__closure__ or ():
        values.append(None)
        with contextlib.suppress(ValueError):  # The cell is still empty.
            values[-1] = cell.cell_contents
    return values


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of a function, and of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_in(constant)


def names_in(code: types.CodeType) -> list[str]:
    """The names of all globals and attributes that code uses."""
    return sorted({name for each in codes_in(code) for name in each.co_names})


def identify_arraylike(value: Any) -> Any:
    """Describe an array of any library; large ones are not read as a whole."""
    is_of_numpy = isinstance(getattr(value, "dtype", None), np.dtype)
    try:
        is_large = is_of_numpy and getattr(value, "nbytes", 0) > SAMPLED_BYTES
        return identify_array(value if is_large else np.asarray(value))
    except Exception:  # Keras's symbolic tensors have no numbers.
        return f"{type(value).__qualname__} of shape {value.shape}"


def identify_array(array: np.ndarray | None, whole: bool = False) -> dict[str, Any] | None:
    """Describe an array by type, shape and digest; of a large one, 16 MB in 256 places, or all."""
    if array is None:
        return None
    content = hashlib.sha256()
    is_small = array.nbytes <= SAMPLED_BYTES
    for rows in [array] if is_small else pieces(array, whole):
        content.update(bytes_of(rows))
    kind = "object" if array.dtype == object else array.dtype.name
    return {"dtype": kind, "shape": list(array.shape), "digest": content.hexdigest()[:32]}


def pieces(array: np.ndarray, whole: bool) -> Iterator[np.ndarray]:
    """Rows of a large array: all, or from many places including the first and the last."""
    places = max(min(PIECES, SAMPLED_BYTES * len(array) // array.nbytes), 2)
    rows = max(SAMPLED_BYTES * len(array) // array.nbytes // places, 1)
    starts = np.linspace(0, len(array) - rows, places).astype(int)
    for start in range(0, len(array), rows) if whole else starts:
        yield array[start : start + rows]


def bytes_of(array: np.ndarray) -> bytes | memoryview:
    """The content of an array as bytes; types such as `bfloat16` have no buffer of their own."""
    if array.dtype == object:
        # Its own bytes are addresses, and an object's `repr` may contain one.
        flat = np.ravel(array).tolist()
        if not all(item is None or type(item) in PLAIN for item in flat):
            flat = [json.dumps(identity_of(item)) for item in flat]
        return repr(flat).encode()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def changes(then: Any, now: Any, place: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two identities differ: for each place, what was there and what is there now."""
    if isinstance(then, dict) and isinstance(now, dict):
        if then.get("class") != now.get("class"):
            return {place: (then.get("class", then), now.get("class", now))}
        pairs = [
            (f"{place}.{name}".lstrip("."), then.get(name), now.get(name))
            for name in dict.fromkeys([*then, *now])
        ]
    elif isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = [
            (f"{place}[{number}]", *pair) for number, pair in enumerate(zip(then, now, strict=True))
        ]
    else:
        return {} if then == now else {place: (then, now)}
    return {key: value for pair in pairs for key, value in changes(*pair[1:], pair[0]).items()}
