"""What an object was made of, as plain values: two objects that were made alike have the same.

    layers, losses, optimizers   class and configuration, without names, seeds and initial values
    functions                    name, code, defaults, and the values that they take from outside
    arrays                       type, shape and a digest, of large ones of a sample
    anything else                the name of its class, and what it keeps of its arguments

Names are left out because Keras counts them: a cell of a notebook that runs twice makes `dense_1`.
`joblib.hash` takes a model that is built twice for two, and a function whose code has changed for
the same one; at lambdas and datasets it fails.
"""

import contextlib
import contextvars
import dis
import functools
import hashlib
import inspect
import json
import math
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import dataset_internals, model_internals

# The bytes of an array that are read; that takes about 10 ms.
SAMPLED_BYTES = 2**24

PIECES = 256
"""The evenly spaced places at which a larger array is read."""

LONG = 1000
"""Of longer lists than this there is a digest only."""

PLAIN = (bool, int, float, str, bytes)

UNIMPORTANT = ("name", "seed", "module", "registered_name", "build_config")
"""What a configuration says about names, and about draws and values that a checkpoint brings."""

NOT_OF_USER = (Path(sysconfig.get_paths()["stdlib"]), Path(__file__).parent)
"""Besides what is installed with `pip`."""

_seen: contextvars.ContextVar[set[int] | None] = contextvars.ContextVar("seen", default=None)
"""The classes and functions whose code has been looked at; None where classes are names."""

HELD = "held"
"""What an identity says besides a configuration."""

Where = tuple[int, ...]
"""The ids of the objects that this one is a part of."""


def identity_of(value: Any, inside: Where = ()) -> Any:
    """What a value was made of, as something that JSON can hold; it may be inside of others."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # NaN is not even equal to itself.
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return repr(value)
    if isinstance(value, (list, tuple)):
        if len(value) > LONG:
            return of_array(np.fromiter(value, object, len(value)))
        return [identity_of(item, inside) for item in value]
    if isinstance(value, (set, frozenset)):
        # In another order in each process.
        return identity_of(sorted(json.dumps(identity_of(item, inside)) for item in value))
    if isinstance(value, dict):
        return of_dict(value, inside)
    if isinstance(value, np.generic):
        return identity_of(value.item(), inside)
    if isinstance(value, (keras.Variable, tf.Variable)):
        return f"a variable of shape {tuple(value.shape)}"
    if isinstance(value, (Path, np.dtype, tf.DType, tf.TypeSpec, keras.DTypePolicy)):
        return str(value)
    if hasattr(value, "__array__") and hasattr(value, "shape"):
        return of_arraylike(value)
    if id(value) in inside:
        return "itself"
    inside = (*inside, id(value))
    if isinstance(value, (types.FunctionType, types.MethodType)):
        return of_function(value, inside)
    if isinstance(value, functools.partial):
        parts = [value.func, value.args, value.keywords]
        return {"partial": [identity_of(part, inside) for part in parts]}
    if isinstance(value, tf.data.Dataset):
        return of_dataset(value)
    if isinstance(value, keras.Model):
        return [of_layer(part, inside) for part in model_internals.layers_of(value)]
    named = value if isinstance(value, (type, types.BuiltinFunctionType)) else None
    return named.__qualname__ if named is not None else of_object(value, inside)


def of_object(value: Any, inside: Where = (), kinds: Sequence[type] = ()) -> dict[str, Any]:
    """An object's class, its configuration, and what it keeps of its constructor's arguments.

    These may be those of the constructors of some of the classes that it inherits from. Of those of
    its own also counts what it holds elsewhere than in its configuration, under `held`.
    """
    # Keras's configuration of a function is its name, or bytes that name a file; so functions are
    # looked up among the arguments, too.
    config: dict[str, Any] = {}
    with contextlib.suppress(Exception):  # An own class's may raise anything.
        config = dict(value.get_config())
    identity = of_config(config, inside)
    for name in dict.fromkeys(name for kind in kinds or [type(value)] for name in arguments(kind)):
        kept = kept_by(value, name)
        is_function = isinstance(kept, (types.FunctionType, functools.partial))
        if is_important(name) and (is_function or name not in config) and kept is not None:
            identity[name] = identity_of(kept, inside)
    held = {} if kinds else held_by(value, config, identity)
    if held:
        identity[HELD] = {name: identity_of(part, inside) for name, part in held.items()}
    if _seen.get() is not None and (code := of_class(value.__class__)):
        identity["code"] = code
    return {"class": value.__class__.__qualname__, **identity}


def held_by(value: Any, config: dict[str, Any], known: dict[str, Any]) -> dict[str, Any]:
    """What decides what an object does, and neither its configuration nor its arguments say."""
    # Some of Keras's configurations leave arguments out, and one that raises says nothing at all.
    held = {
        name: part
        for name in every_argument(type(value))
        if is_important(name) and name not in known
        for part in [kept_by(value, "dtype_policy" if name == "dtype" else name, f"_{name}")]
        if part is not None
    }
    # Of objects a configuration has the names of their functions only; and `adapt` fills in what
    # was left out.
    held |= {
        name: part
        for name, said in config.items()
        if is_important(name) and name not in held
        for part in [kept_by(value, name)]
        if part is not None and not is_function(part) and (said is None or runs(part))
    }
    held |= model_internals.arguments_of_function(value)
    if hasattr(value, "get_config") and not isinstance(value, keras.Model):
        held |= {
            name: part
            for name, part in getattr(value, "__dict__", {}).items()
            # Keras wraps methods, and notes layers under names of its own.
            if not hasattr(type(value), name) and name not in {*known, *held}
            if is_function(part) or (not config and not name.startswith("_") and runs(part))
        }
    elif callable(value):  # As NumPy's functions, and those that `functools` has wrapped.
        names = ("__wrapped__", "__name__")
        held |= {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, keras.Layer) and hasattr(value, "get_vocabulary"):
        with contextlib.suppress(Exception):  # Before it is there.
            held["vocabulary"] = value.get_vocabulary()
    return held


def kept_by(value: Any, *names: str) -> Any:
    """What an object has under the first of some names; None where it has nothing."""
    for name in names:
        with contextlib.suppress(Exception):  # A property may raise anything, too.
            if (kept := getattr(value, name, None)) is not None:
                return kept
    return None


def is_function(value: Any) -> bool:
    return isinstance(value, (types.FunctionType, types.MethodType, functools.partial))


def runs(value: Any) -> bool:
    """Whether it can be called, or something in it can."""
    parts = value.values() if isinstance(value, dict) else value
    return callable(value) or (isinstance(value, (dict, list, tuple)) and any(map(runs, parts)))


def of_dataset(dataset: tf.data.Dataset) -> dict[str, Any]:
    """How a dataset was made, and the user's functions that are called in it; not its elements."""
    made = {"made": identity_of(dataset_internals.recipe(dataset))}
    # Side by side processes may read from folders of their own, which a function may name.
    called = [] if _seen.get() is not None else dataset_internals.functions_of(dataset)
    own = [each for each in called if not is_function(each) or is_of_user(file_of(each))]
    return {**made, HELD: {"functions": identity_of(own)}} if own else made


def file_of(function: Any) -> str:
    """Where a function's code is."""
    function = getattr(function, "func", function)
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return "" if code is None else code.co_filename


def of_layer(layer: keras.Layer, inside: Where = ()) -> dict[str, Any]:
    """That of a layer; of one that Keras made of others only how they are wired."""
    if type(layer).get_config in MADE_OF_OTHERS:
        return {"class": type(layer).__name__, "wiring": identity_of(model_internals.wiring(layer))}
    return of_object(layer, inside)


# The layers inside have their own places in the list.
MADE_OF_OTHERS = (keras.Sequential.get_config, model_internals.FunctionalModel.get_config)


def arguments(kind: type) -> list[str]:
    """The names of what a class is made with."""
    with contextlib.suppress(ValueError, TypeError):  # Some classes have no signature.
        return [*inspect.signature(kind).parameters]
    return []


def every_argument(kind: type) -> list[str]:
    """Those, and what a class hands on to those that it inherits from."""
    found: list[str] = []
    for each in kind.__mro__:
        if inspect.isfunction(init := vars(each).get("__init__")):
            _, *parameters = inspect.signature(init).parameters.values()
            found += [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
            if all(p.kind != p.VAR_KEYWORD for p in parameters):
                break
    return [*dict.fromkeys(found)]


@contextlib.contextmanager
def with_all_code() -> Iterator[None]:
    """Include the code of the user's classes and of what it calls: to compare processes.

    Checkpoints do without, because a later version of the code may read them.
    """
    token = _seen.set(set())
    try:
        yield
    finally:
        _seen.reset(token)


def of_class(kind: type) -> list[Any]:
    """The code and the numbers of a class, as far as it is the user's."""
    found: list[Any] = []
    for own in kind.__mro__:
        module = getattr(sys.modules.get(own.__module__), "__file__", None) or ""
        if is_of_user(module) and is_new(own):
            for name, member in vars(own).items():
                member = getattr(member, "fget", None) or getattr(member, "__func__", member)
                member = getattr(member, "python_function", member)  # Of a `tf.function`.
                if isinstance(member, types.FunctionType):
                    found.append([name, of_function(member, of_values=False)])
                elif isinstance(member, (bool, int, float)) and not name.startswith("__"):
                    found.append([name, member])
    return found


def of_called(function: Callable[..., Any]) -> list[Any]:
    """The code of what a function calls, and what that calls, as far as it is the user's."""
    found: list[Any] = []
    waiting: list[Any] = [function]
    for caller in waiting:  # One after another: a chain of many calls would be too deep.
        for each in named_in(caller, caller.__code__):
            if isinstance(each, type):
                found += of_class(each)
            elif isinstance(each, types.FunctionType) and is_of_user(each.__code__.co_filename):
                if is_new(each):
                    found.append(of_function(each, follows=False, of_values=False))
                    waiting.append(inspect.unwrap(each))
    return [each for each in found if not isinstance(each, str)]


def named_in(function: Any, code: types.CodeType) -> list[Any]:
    """What a function names, also in functions inside of it."""
    names = [*code.co_names]
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    named = [getattr(function, "__globals__", {}).get(name) for name in names]
    modules = [each for each in named if isinstance(each, types.ModuleType)]
    named += [
        vars(module).get(name)
        for module in modules
        if is_of_user(getattr(module, "__file__", None) or "")
        for name in names
    ]
    return [part for each in inner for part in named_in(function, each)] + named


def is_new(value: Any) -> bool:
    """Whether it has not been looked at, which it now is."""
    seen = _seen.get()
    assert seen is not None
    known = id(value) in seen
    seen.add(id(value))
    return not known


@functools.cache
def is_of_user(path: str) -> bool:
    """Whether a file of code is not one of Python's, of an installed package, or of this one."""
    place = Path(path)
    installed = {"site-packages", "dist-packages"} & {*place.parts}
    return bool(path) and not installed and not any(map(place.is_relative_to, NOT_OF_USER))


def of_config(config: dict[Any, Any], inside: Where = ()) -> dict[str, Any]:
    """The identities of the entries of a configuration that matter."""
    return {
        key_of(name): identity_of(value, inside)
        for name, value in config.items()
        if is_important(name)
    }


def key_of(name: Any) -> str:
    """The key of a dict as a text, which of an object names an address."""
    plain = name is None or isinstance(name, (bool, int, float, str, bytes))
    return str(name) if plain else json.dumps(identity_of(name))


def of_dict(value: dict[Any, Any], inside: Where) -> dict[str, Any]:
    """That of a dict, which may be an object that Keras has turned into one."""
    kind, config = value.get("class_name"), value.get("config")
    if not isinstance(kind, str) or kind.endswith("DTypePolicy"):
        return {key_of(name): identity_of(item, inside) for name, item in value.items()}
    if kind == "__lambda__":  # Bytes that name a file.
        config = None
    known = of_config(config, inside) if isinstance(config, dict) else identity_of(config, inside)
    return {"class": kind, "config": known}


def is_important(name: Any) -> bool:
    """Whether an entry of a configuration decides what is computed from a checkpoint on."""
    return name not in UNIMPORTANT and not str(name).endswith("_initializer")


def of_function(
    function: Callable[..., Any],
    inside: Where = (),
    *,
    follows: bool = True,
    of_values: bool = True,
) -> Any:
    """A function's name; of one that is not installed with a library also what it does.

    Args:
        inside: The objects that it is a part of.
        follows: Whether what it calls counts, where all code does.
        of_values: Whether plain global values that it reads count. Those of a method, or of what it
            calls, may be a worker's own: its number, a folder, when it began.
    """
    owner = getattr(function, "__self__", None)
    wrapper: Any = getattr(function, "__func__", function)
    function, code = inspect.unwrap(wrapper), getattr(inspect.unwrap(wrapper), "__code__", None)
    held: dict[str, Any] = {}
    while wrapper is not function:
        if not is_installed(wrapper):
            of_wrapper = [code_of(wrapper), closed_over(wrapper, function)]
            held.setdefault("wrapped_in", []).append(of_wrapper)
        wrapper = wrapper.__wrapped__
    if code is None or is_installed(function):
        if owner is not None and not isinstance(owner, (type, types.ModuleType)):
            held["of"] = owner
        if getattr(function, "__closure__", None):
            held["closed_over"] = closed_over(function)
        parts = {name: identity_of(part, inside) for name, part in held.items()}
        name = function.__qualname__
        return {"function": name, HELD: parts} if parts else name
    names = plain_globals(function, code) if of_values else []
    # And those that functions inside of it read, as comprehensions are.
    inner = [plain_globals(function, each) for each in codes_in(code)] if of_values else []
    deeper = {name for found in inner for name in found}.difference(names)
    held |= {name: function.__globals__[name] for name in sorted(deeper)}
    known = {
        "code": code_of(function),
        "defaults": [function.__defaults__, function.__kwdefaults__],
        "closed_over": closed_over(function),
        "globals": {name: function.__globals__.get(name) for name in names},
        "of": owner,
        **({HELD: held} if held else {}),
    }
    parts = {name: identity_of(part, inside) for name, part in known.items()}
    if follows and _seen.get() is not None:
        parts["calls"] = of_called(function)
    return {"function": function.__qualname__, **parts}


def is_installed(function: Any) -> bool:
    """Whether a function comes with a library, and is known by its name."""
    code = getattr(function, "__code__", None)
    return code is None or bool(
        {"site-packages", "dist-packages"} & {*Path(code.co_filename).parts}
    )


def code_of(function: Any) -> str:
    """A digest of what a function does."""
    code = of_code(function.__code__, function.__doc__)
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def closed_over(function: Any, but: Any = None) -> list[Any]:
    """The values that a function takes from outside, without one of them."""
    values = [read_cell(cell) for cell in function.__closure__ or ()]
    return [value for value in values if but is None or value is not but]


def of_code(code: types.CodeType, text: str | None = None) -> list[Any]:
    """What a function does, without its place and its text."""
    constants = [
        of_code(constant) if isinstance(constant, types.CodeType) else of_constant(constant)
        for constant in code.co_consts
        if constant is None or constant != text
    ]
    return [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars]


def of_constant(constant: Any) -> str:
    # A set has another order in each process.
    return repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    """The code of the functions inside of one."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from codes_in(constant)


def plain_globals(function: Any, code: types.CodeType) -> list[str]:
    """The global names that a function's code reads, if they are numbers or texts."""
    asked = [step for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"]
    names = sorted({str(step.argval) for step in asked})
    plain = (bool, int, float, str, tuple)
    return [
        name
        for name in names
        # `__file__` differs where machines have the script in other folders.
        if not name.startswith("__") and isinstance(function.__globals__.get(name), plain)
    ]


def read_cell(cell: types.CellType) -> Any:
    """What a function closes over; None before it is there."""
    with contextlib.suppress(ValueError):
        return cell.cell_contents
    return None


def of_arraylike(value: Any) -> Any:
    """An array of anybody's, of which large ones are not read as a whole."""
    try:
        sliced = isinstance(value.dtype, np.dtype) and value.nbytes > SAMPLED_BYTES
    except Exception:  # Not all know these.
        sliced = False
    try:
        return of_array(value if sliced else np.asarray(value))
    except Exception:  # One without numbers, as Keras's tensors are.
        return f"{type(value).__qualname__} of shape {value.shape}"


def of_array(array: np.ndarray | None, whole: bool = False) -> dict[str, Any] | None:
    """The type, shape and digest of an array; of a large one 16 MB in 256 places, or all."""
    if array is None:
        return None
    content = hashlib.sha256()
    is_small = array.nbytes <= SAMPLED_BYTES
    for rows in [array] if is_small else pieces(array, whole):
        content.update(bytes_of(rows))
    kind = "object" if array.dtype == object else array.dtype.name
    return {"dtype": kind, "shape": list(array.shape), "digest": content.hexdigest()[:32]}


def pieces(array: np.ndarray, whole: bool) -> Iterator[np.ndarray]:
    """Rows of a large array: all, or from many places, the first and the last among them."""
    places = max(min(PIECES, SAMPLED_BYTES * len(array) // array.nbytes), 2)
    rows = max(SAMPLED_BYTES * len(array) // array.nbytes // places, 1)
    starts = np.linspace(0, len(array) - rows, places).astype(int)
    for start in range(0, len(array), rows) if whole else starts:
        yield array[start : start + rows]


def bytes_of(array: np.ndarray) -> bytes | memoryview:
    """The content of an array as bytes to hash; `bfloat16` and the like offer none themselves."""
    if array.dtype == object:
        # Its own bytes are addresses, and so may be what objects say of themselves.
        flat = np.ravel(array).tolist()
        if not all(item is None or type(item) in PLAIN for item in flat):
            flat = [json.dumps(identity_of(item)) for item in flat]
        return repr(flat).encode()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def changes(then: Any, now: Any, place: str = "") -> dict[str, tuple[Any, Any]]:
    """Where two identities differ: for each place what was there, and what is there now."""
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
