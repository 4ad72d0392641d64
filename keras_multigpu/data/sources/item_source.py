"""Examples that a user's function makes from items, in several threads."""

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import require_positive_integer, value_error, warn
from keras_multigpu.data.addresses import Unreachable
from keras_multigpu.data.pipeline.arrays import class_labels, specs_of
from keras_multigpu.data.pipeline.damage import (
    Damaged,
    DamagedExample,
    is_of_machine,
    unread,
)
from keras_multigpu.data.pipeline.loader import BATCHES_AT_ONCE, in_pieces, submit
from keras_multigpu.data.pipeline.settings import require_examples
from keras_multigpu.data.pipeline.source import Example, Source, present, read_rows, three_parts
from keras_multigpu.data.sources.items import Items
from keras_multigpu.identities import identify_array, identity_of
from keras_multigpu.seeded_layers import preserve_random_state

# How many threads read items. More than cores, because reading often waits.
THREADS = 16

# With on_error="skip", one of this many first items must be intact.
MOST_TRIED = 16

# How many examples are in memory at a time while all labels are read.
READ_AT_ONCE = 1024

logger = logging.getLogger("keras_multigpu")


class ItemSource(Source):
    """Examples made from items.

    Args:
        example: Makes `x`, `(x, y)` or `(x, y, sample_weight)` from an item; None for the item.
        labels: The class of each example; None to read them when they are needed.
        threads: How many items are read at a time.
        skips: Whether damaged examples are left out, so that the first items may be damaged.
    """

    def __init__(
        self,
        items: Items,
        example: Callable[[Any], Any] | None,
        *,
        labels: Any = None,
        class_names: Sequence[str] | None = None,
        threads: int = THREADS,
        skips: bool = False,
    ) -> None:
        require_positive_integer("threads", threads)
        self.name = items.name
        self._items = items
        self._function = example
        # Without tensors, a `tf.function` would be traced again for each text.
        self._in_tensorflow = isinstance(example, tf.types.experimental.PolymorphicFunction)
        self._example = functools.partial(on_tensors, example) if self._in_tensorflow else example
        self._pieces = max(threads // BATCHES_AT_ONCE, 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="keras_multigpu_items")
        self.num_examples = len(items)
        require_examples(self.name, self.num_examples)
        self.class_names = None if class_names is None else list(class_names)
        self._given = None if labels is None else require_classes(labels, self.num_examples)
        with preserve_random_state():
            self._first, made = self._first_intact(MOST_TRIED if skips else 1)
            self.spec = self._spec_of(made)
            self.draws = self._draws(made)
        self._structure = flatten(made, [])
        self._first_target = made[1]

    def _first_intact(self, most: int) -> tuple[int, Example]:
        """The number of the first intact item, and its example."""
        for index in range(min(most, self.num_examples)):
            try:
                # If `threads` is 1, that thread must be the only one that ever reads.
                return index, submit(self._pool, self._make, index).result()
            except DamagedExample as damage:
                found = damage
        raise DamagedExample(found.cause, self.example_name(index)) from found.__cause__

    def _spec_of(self, made: Example) -> Example:
        name = self.example_name(self._first)
        for leaf in [*keras.tree.flatten(made[0]), *present(made[1:])]:
            if not is_supported(leaf):
                raise value_error(
                    f"The example of {name} holds something other than numbers and texts.",
                    "Expected numbers, texts, arrays and images of one shape, in tuples and dicts.",
                    "Convert it in `example`, for example with `numpy.asarray`, or leave it out.",
                    value=leaf,
                )
        return specs_of(keras.tree.map_structure(as_row, made))

    def _draws(self, made: Example) -> bool:
        """Whether the first item differs when it is read again."""
        again = submit(self._pool, self._make, self._first).result()
        one, other = (
            [identify_array(np.asarray(leaf, object if is_text(leaf) else None)) for leaf in leaves]
            for leaves in (present(made), present(again))
        )
        if one != other:
            warn(
                f"{self.example_name(self._first)} differs each time it is read, so a run that "
                "resumes does not get the same examples. Move random draws to `augment`, which "
                "replays them.",
                stacklevel=5,
            )
        return one != other

    @functools.cached_property
    def labels(self) -> np.ndarray | None:  # type: ignore[override]
        """The class of each example. If none were given, all examples are read once."""
        if self._given is not None:
            return self._given
        first = self._first_target
        if not isinstance(first, np.ndarray) or class_labels(first[None]) is None:
            return None
        logger.info("Reading the classes of %s examples of %s.", self.num_examples, self.name)
        parts = []
        for low in range(0, self.num_examples, READ_AT_ONCE):
            rows = np.arange(low, min(low + READ_AT_ONCE, self.num_examples))
            leaves = [np.empty((len(rows), *s.shape), s.dtype.as_numpy_dtype) for s in self._leaves]
            for row, cause in self.read(leaves, rows, np.zeros((len(rows), 2), np.int32)):
                raise DamagedExample(
                    f"{cause} (its class is needed; pass `labels`)", self.example_name(low + row)
                )
            parts.append(leaves[len(present(self.spec[0]))])
        return class_labels(np.concatenate(parts))

    @property
    def _leaves(self) -> list[tf.TensorSpec]:
        return present(self.spec)

    def read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        if len(self._items) != self.num_examples:
            raise value_error(
                f"{self.name} had {self.num_examples} items and now has {len(self._items)}.",
                "Expected items that stay the same while they are read.",
                source=self.name,
            )
        pieces = min(self._pieces, len(indices))
        if pieces <= 1:
            return submit(self._pool, self._read, out, indices, seeds).result()
        return in_pieces(pieces, self._pool, self._read, out, indices, seeds)

    def _read(self, out: Sequence[np.ndarray], indices: np.ndarray, seeds: np.ndarray) -> Damaged:
        numbers = indices.tolist()
        items = self._items.get_many(numbers) if len(numbers) > 1 else None

        def read(row: int) -> None:
            made = self._make(numbers[row], *([] if items is None else [items[row]]))
            leaves: list[Any] = []
            if flatten(made, leaves) != self._structure:
                problem = f"it is {keras.tree.map_structure(shape_text, made)}"
            else:
                stores = (store(a[row : row + 1], b) for a, b in zip(out, leaves, strict=True))
                problem = next(filter(None, stores), "")
            if problem:
                raise value_error(
                    f"{self.example_name(numbers[row])} differs from "
                    f"{self.example_name(self._first)}: {problem}.",
                    "Expected one structure, shape and type for all examples.",
                    "Pad, crop, resize or convert it in `example`.",
                    expected=keras.tree.map_structure(shape_text, self.spec),
                )

        return read_rows(len(numbers), read)

    def _make(self, index: int, *item: Any) -> Example:
        """`(x, y, sample_weight)` of an item, as arrays and texts; None for missing parts."""
        known: Any = None
        try:
            known = item[0] if item else self._items.get(index)
            if known is None:
                raise DamagedExample("it is None")
            # TensorFlow would copy results to a GPU and back. Choosing a device initializes
            # TensorFlow, and after that a CPU cannot be split.
            with tf.device("CPU") if self._in_tensorflow else contextlib.nullcontext():
                made = self._arrays(known if self._example is None else self._example(known))
        except (DamagedExample, Unreachable):
            raise
        except Exception as error:
            if is_of_machine(error):
                raise unread(self.example_name(index), error) from error
            words, hint = " ".join(str(error).split()), ""
            if isinstance(error, KeyError) and isinstance(known, dict):
                hint = f" (the item has {', '.join(map(str, known))})"
            # An item may be as damaged as a file, and the function may be wrong.
            raised = "`example` raised " if known is not None and self._example else ""
            cause = f"{raised}{type(error).__name__}: {words[:200]}{hint}"
            raise DamagedExample(cause) from error
        parts = made if isinstance(made, tuple) else (made,)
        example = three_parts(parts, f"The example of {self.example_name(index)}")
        if example[0] is None:
            raise value_error(
                f"The example of {self.example_name(index)} has no inputs.",
                "Expected x, (x, y) or (x, y, sample_weight).",
                example=keras.tree.map_structure(shape_text, made),
            )
        return example

    def _arrays(self, value: Any) -> Any:
        """Convert leaves to arrays, except texts; lists become arrays, as in `tf.data`."""
        if isinstance(value, tuple):
            return tuple(map(self._arrays, value))
        if isinstance(value, Mapping):
            return {name: self._arrays(part) for name, part in value.items()}
        if value is None or is_text(value):
            return value
        self._in_tensorflow = self._in_tensorflow or isinstance(value, tf.Tensor)
        array = np.asarray(value)
        if array.dtype.kind in "SU":
            array = array.astype(object)
        # A tensor with one text has no axes.
        only = array.item() if array.dtype == object and not array.ndim else None
        return only if is_text(only) else array

    def example_name(self, index: int) -> str:
        return self._items.item_name(index)

    def identity(self, exact: bool = False) -> dict[str, Any]:
        function = getattr(self._function, "python_function", self._function)
        made_by, spec = identity_of(function), identity_of(self.spec)
        items = self._items.identity(exact)
        return {**items, "examples": self.num_examples, "spec": spec, "example": made_by}


def flatten(value: Any, leaves: list[Any]) -> Any:
    """Append the leaves of an example to a list, and return its structure."""
    # `keras.tree` takes ten times as long, and this happens for each item.
    if isinstance(value, tuple):
        return tuple(flatten(part, leaves) for part in value)
    if isinstance(value, dict):
        return {name: flatten(value[name], leaves) for name in sorted(value)}
    if value is not None:
        leaves.append(value)
    return value is None


def on_tensors(function: Any, item: Any) -> Any:
    return function(keras.tree.map_structure(tf.convert_to_tensor, item))


def is_text(leaf: Any) -> bool:
    return isinstance(leaf, bytes | str)


def is_supported(leaf: Any) -> bool:
    if leaf is None or is_text(leaf):
        return leaf is not None
    if leaf.dtype == object:
        return all(map(is_text, leaf.flat)) and leaf.ndim > 0
    try:
        return bool(tf.as_dtype(leaf.dtype))
    except TypeError:
        return False


def as_row(leaf: Any) -> np.ndarray | None:
    """A leaf as the first row of an array."""
    if leaf is None:
        return None
    return np.array([leaf], object) if is_text(leaf) else leaf[None]


def store(row: np.ndarray, leaf: Any) -> str | None:
    """Put a leaf into its row of a batch; if it does not fit, return why."""
    shape = () if is_text(leaf) else leaf.shape
    if shape != row.shape[1:]:
        return f"its shape is {shape} instead of {row.shape[1:]}"
    texts = is_text(leaf) or leaf.dtype == object
    if texts and not is_supported(leaf):
        return "it is neither a number nor a text"
    if texts != (row.dtype == object):
        return "it is a text instead of a number" if texts else "it is a number instead of a text"
    if not texts and leaf.dtype != row.dtype and not leaf.dtype.kind == row.dtype.kind == "f":
        with np.errstate(invalid="ignore"):
            if not (leaf.astype(row.dtype) == leaf).all():
                return f"its values are {leaf.dtype}, which {row.dtype} cannot hold"
    row[0] = leaf
    return None


def shape_text(leaf: Any) -> str:
    if leaf is None or is_text(leaf):
        return "None" if leaf is None else "text"
    return f"{np.dtype(getattr(leaf.dtype, 'as_numpy_dtype', leaf.dtype)).name}{[*leaf.shape]}"


def require_classes(labels: Any, count: int) -> np.ndarray:
    found = class_labels(np.asarray(labels))
    if found is None or len(found) != count:
        raise value_error(
            "`labels` is not one class for each item.",
            f"Expected {count} integers from zero, or one-hot rows.",
            shape=np.shape(labels),
        )
    return found
