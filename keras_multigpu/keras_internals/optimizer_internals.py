"""Lets optimizers update plain variables, whatever their strategy, and small ones together.

Keras updates variables one by one, with a dozen operations each. For a MobileNet with Adam these
are 2,000 operations on a few hundred numbers each, whose cost is dispatch. An elementwise optimizer
gets the same numbers, bit for bit, from all small variables joined end to end. On two CPU replicas
that saves 4 % of the processor time of a MobileNetV2's step, and a fifth in the first step. Which
slot belongs to which variable is only in private lists of the optimizer.
"""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.optimizers.base_optimizer import BaseOptimizer

_exchanging = threading.RLock()

# Variables with fewer elements are joined.
SMALL = 2**16

# A multiple of the numbers that any processor handles at once.
AT_ONCE = 64

# Optimizers that treat every element of a variable alike. Lamb uses the norm of a variable,
# Adafactor its rows and columns, Muon the matrix, and a user's subclass may do anything.
ELEMENTWISE = frozenset(
    {
        keras.optimizers.SGD,
        keras.optimizers.Adam,
        keras.optimizers.AdamW,
        keras.optimizers.Adamax,
        keras.optimizers.Adadelta,
        keras.optimizers.Adagrad,
        keras.optimizers.Ftrl,
        keras.optimizers.Lion,
        keras.optimizers.Nadam,
        keras.optimizers.RMSprop,
    }
)


class JoinedVariable:
    """Several variables of one dtype as one flat variable."""

    index_in_slots = 0
    """The index of its slots in the lists of `joined_slots`."""

    def __init__(self, parts: Sequence[keras.Variable]) -> None:
        self.parts = parts
        self.dtype = parts[0].dtype
        self.sizes = [math.prod(part.shape) for part in parts]
        # Processors handle a remainder one by one, and some functions then round otherwise. With
        # padding, results do not depend on which variables are joined.
        self.sizes.append(-sum(self.sizes) % AT_ONCE)
        self.value = self.before = self.joined([part.value for part in parts])
        self.shape = self.value.shape

    def joined(self, tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        """Join tensors of the parts' shapes end to end."""
        flat = [t if t.shape.rank == 1 else tf.reshape(t, [-1]) for t in tensors]
        return tf.concat([*flat, tf.zeros(self.sizes[-1:], flat[0].dtype)], axis=0)

    def assign(self, value: Any) -> None:
        self.value = tf.cast(value, self.dtype)

    def assign_add(self, value: Any) -> None:
        self.assign(self.value + tf.cast(value, self.dtype))

    def assign_sub(self, value: Any) -> None:
        self.assign(self.value - tf.cast(value, self.dtype))

    def give_back(self) -> None:
        """Assign the new values to the parts."""
        if self.value is not self.before:
            *pieces, _ = tf.split(self.value, self.sizes)
            for part, piece in zip(self.parts, pieces, strict=True):
                is_flat = len(part.shape) == 1
                part.assign(piece if is_flat else tf.reshape(piece, part.shape))

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return self.value if dtype is None else tf.cast(self.value, dtype)

    def __add__(self, other: Any) -> tf.Tensor:
        return self.value + other

    def __sub__(self, other: Any) -> tf.Tensor:
        return self.value - other

    def __mul__(self, other: Any) -> tf.Tensor:
        return self.value * other

    def __truediv__(self, other: Any) -> tf.Tensor:
        return self.value / other

    def __neg__(self) -> tf.Tensor:
        return -self.value

    __radd__, __rmul__ = __add__, __mul__


def update_jointly(
    optimizer: Any,
    gradients: Sequence[tf.Tensor],
    variables: Sequence[keras.Variable],
    learning_rate: Any,
) -> None:
    """Update the variables, the small ones of each dtype together."""
    groups: dict[str, list[tuple[tf.Tensor, keras.Variable]]] = {}
    for gradient, variable in zip(gradients, variables, strict=True):
        # Keras accepts TensorFlow's variables too.
        dense = not isinstance(gradient, tf.IndexedSlices) and isinstance(variable, keras.Variable)
        joinable = dense and optimizer.keras_class in ELEMENTWISE
        if joinable and math.prod(variable.shape) < SMALL:
            groups.setdefault(variable.dtype, []).append((gradient, variable))
        else:
            optimizer.update_step(gradient, variable, learning_rate)
    for pairs in groups.values():
        members = [variable for _, variable in pairs]
        whole = JoinedVariable(members)
        with joined_slots(optimizer, members):
            gradient = whole.joined([gradient for gradient, _ in pairs])
            optimizer.update_step(gradient, whole, learning_rate)
        whole.give_back()


@contextlib.contextmanager
def joined_slots(optimizer: Any, members: list[keras.Variable]) -> Iterator[None]:
    """Replace each of the optimizer's lists of slots by one joined slot for the members."""
    positions = [optimizer._get_variable_index(variable) for variable in members]
    slots = {
        name: [value[position] for position in positions]
        for name, value in vars(optimizer).items()
        if isinstance(value, list) and len(value) > max(positions)
    }
    whole = {
        name: JoinedVariable(parts)
        for name, parts in slots.items()
        # Slots have the shape and dtype of their variables, but are not the variables themselves.
        if all(
            isinstance(part, keras.Variable)
            and part is not member
            and part.shape == member.shape
            and part.dtype == members[0].dtype
            for part, member in zip(parts, members, strict=True)
        )
    }
    saved = {name: vars(optimizer)[name] for name in whole}
    vars(optimizer).update({name: [slot] for name, slot in whole.items()})
    try:
        yield
    finally:
        vars(optimizer).update(saved)
    for slot in whole.values():
        slot.give_back()


class JoiningOptimizer(TFOptimizer):
    """An optimizer that updates small variables together."""

    # Keras's own method would look for a strategy and merge replicas.
    _backend_update_step = update_jointly
    keras_class: type

    def _get_variable_index(self, variable: Any) -> int:
        joined = getattr(variable, "index_in_slots", None)
        return super()._get_variable_index(variable) if joined is None else joined


@contextlib.contextmanager
def joining(optimizer: keras.optimizers.Optimizer) -> Iterator[None]:
    """Let an elementwise optimizer update small variables together."""
    original = type(optimizer)
    if original not in ELEMENTWISE:
        yield
        return
    # Keras's class comes first, because one of them overrides `_backend_update_step`.
    bases = (original, JoiningOptimizer)
    optimizer.__class__ = type(original.__name__, bases, {"keras_class": original})
    try:
        yield
    finally:
        optimizer.__class__ = original


def remember_variables(optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
    """Index each optimizer's tables by variable before a model moves.

    Keras looks variables up by their storage, which changes with the strategy.
    """
    for optimizer in optimizers:
        if not optimizer.built or "_tables_by_identity" in vars(optimizer):
            continue
        ids = {optimizer._var_key(each): id(each) for each in optimizer._trainable_variables}
        tables: dict[str, Any] = {}
        for name in ("_trainable_variables_indices", "_var_to_optimizer_idx"):
            if hasattr(optimizer, name):
                tables[name] = {ids[key]: value for key, value in getattr(optimizer, name).items()}
        excluded: set[Any] = getattr(optimizer, "_exclude_from_weight_decay", set())
        tables["_exclude_from_weight_decay"] = {ids[key] for key in excluded if key in ids}
        tables["_exclude_from_weight_decay_cache"] = {}
        vars(optimizer)["_exclude_from_weight_decay"] = excluded
        vars(optimizer)["_exclude_from_weight_decay_cache"] = {}
        vars(optimizer)["_tables_by_identity"] = tables


def compiled_rate(optimizer: keras.optimizers.Optimizer) -> Any:
    """The learning rate as compiled: a variable, a schedule or a function."""
    # The public `learning_rate` is its value at the next step.
    return optimizer._learning_rate


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """The number of steps so far, the argument of schedules."""
    # The public `iterations` counts updates, which are fewer with accumulated gradients.
    return optimizer._iterations


def chosen_by(optimizer: Any) -> Any:
    """How a `MultiOptimizer` chooses an optimizer: numbered patterns, a function, or None."""
    # Its public configuration raises or contains learning rates.
    chosen = getattr(optimizer, "_optimizer_map", None)
    if not isinstance(chosen, Mapping):
        return chosen
    return [[pattern, optimizer.optimizers.index(each)] for pattern, each in chosen.items()]


def not_decayed(optimizer: Any) -> list[Any]:
    """What `exclude_from_weight_decay` was given: how many variables, and parts of names."""
    excluded = getattr(optimizer, "_exclude_from_weight_decay", ())
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    # Keras joins a set, which has another order in each process.
    return [len(excluded), sorted(pattern.pattern.split("|")) if pattern else []]


def optimized_variables(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    return list(getattr(optimizer, "_trainable_variables", []))


def remembered_and_moved(
    optimizer: keras.optimizers.Optimizer,
) -> tuple[list[keras.Variable], list[keras.Variable]]:
    """An optimizer's slots, and the weights that it updates with their moving averages."""
    averages = list(getattr(optimizer, "_model_variables_moving_average", []))
    known = {id(variable) for variable in averages}
    remembered = [v for v in optimizer.variables if len(v.shape) and id(v) not in known]
    return remembered, [*optimized_variables(optimizer), *averages]


def before_moving(
    optimizers: Sequence[keras.optimizers.Optimizer], strategy: tf.distribute.Strategy | None
) -> None:
    """Prepare optimizers for variables that are about to move, to `strategy` if there is one."""
    remember_variables(optimizers)
    for optimizer in optimizers if strategy is not None else ():
        optimizer._distribution_strategy = strategy


@contextlib.contextmanager
def variables_anywhere(create: Callable[..., tf.Variable] | None = None) -> Iterator[None]:
    """Let optimizers create variables for a model under any strategy.

    Args:
        create: Creates those of a weight, see `tf.variable_creator_scope`.
    """
    added = BaseOptimizer.add_variable_from_reference

    def add(optimizer: Any, *args: Any, **kwargs: Any) -> keras.Variable:
        # Outside of a step that builds its optimizer while it is traced.
        with tf.init_scope(), tf.variable_creator_scope(create):
            return added(optimizer, *args, **kwargs)

    # Keras requires that both were made in one scope. An optimizer may build others, so the rule is
    # lifted for the whole class; other threads wait.
    with _exchanging:
        checked = TFOptimizer.add_variable_from_reference
        TFOptimizer.add_variable_from_reference = added if create is None else add
        try:
            yield
        finally:
            TFOptimizer.add_variable_from_reference = checked


@contextlib.contextmanager
def on_one_device(optimizers: Sequence[keras.optimizers.Optimizer]) -> Iterator[None]:
    """Let optimizers update their variables, which now have plain storages, without a strategy."""
    saved = []
    for optimizer in optimizers:
        own = vars(optimizer)
        changed = {"_distribution_strategy": tf.distribute.get_strategy()}
        for name, table in own.get("_tables_by_identity", {}).items():
            known = [v for v in optimizer._trainable_variables if id(v) in table]
            # Keras looks variables up by their storage, which has changed.
            if isinstance(table, dict):
                changed[name] = {optimizer._var_key(v): table[id(v)] for v in known}
            else:
                changed[name] = {optimizer._var_key(v) for v in known}
        if "_exclude_from_weight_decay_cache" in changed:
            changed["_exclude_from_weight_decay_cache"] = {}
        saved.append((own, {name: own[name] for name in changed}))
        own.update(changed)
    try:
        with contextlib.ExitStack() as stack:
            for optimizer in optimizers:
                stack.enter_context(joining(optimizer))
            yield
    finally:
        for own, before in saved:
            own.update(before)
