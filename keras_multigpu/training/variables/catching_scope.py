"""Catches what the user's code does with variables while a step computes new values for them.

A step is a function of the values of variables, so it must know every variable that a layer, a
loss or a metric assigns or reads, also one that the model does not track: a global one, one of
a loss, one of a plain Python object. A `CatchingScope` sees them all.

It also lets gradients that the code takes itself reach the weights. TensorFlow looks for the
`tf.Variable`s that were read: where `tf.custom_gradient` decorates a function, as `keras.remat` and
`tf.recompute_grad` do, and where a `GradientTape` watches. In a pass there are none, because
weights are tensors. Without this the weights inside of `keras.remat` would stay as they are, and a
tape in `compute_loss` would know none.
"""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import error_of, value_error
from keras_multigpu.keras_internals import model_internals, step_hooks, variable_internals


def scope_of_pass() -> Any:
    """The present `CatchingScope`; None where no pass runs on this thread."""
    scope = model_internals.stateless_scope()
    return scope if hasattr(scope, "reads") else None


def with_weights_as_inputs(
    original: Callable[..., Any], function: Callable[..., Any], args: Any, kwargs: Any
) -> Any:
    """What calls a function with a gradient of its own: the weights that it reads are inputs."""
    scope = scope_of_pass()
    if scope is None:
        return original(function, args, kwargs)

    def reading(weights: list[tf.Tensor], *own: Any, **named: Any) -> Any:
        before = dict(scope.state_mapping)
        with scope.reads() as read:
            result, gradient_of = function(*own, **named)
        # TensorFlow takes as inputs what is in the list now.
        weights.extend(read.values())
        if not weights:
            return result, gradient_of

        def gradient(*arriving: Any, variables: Any = ()) -> Any:
            # Computed anew it reads the same values, and what it assigns has been assigned.
            with scope.again(before):
                of_inputs, found = gradient_of(*arriving, variables=[*weights, *variables])
            here = [*found[: len(weights)], *tf.nest.flatten(of_inputs)]
            return (here, found[len(weights) :]) if variables else here

        return result, gradient

    return original(reading, ([], *args), kwargs)


def watching_weights(original: Callable[..., Any], tape: tf.GradientTape) -> Any:
    """What begins to record on a tape, which watches weights as it would watch variables."""
    entered, scope = original(tape), scope_of_pass()
    if scope is not None and step_hooks.watches_variables(tape):
        tape.watch(scope.weights)
    return entered


def of_weights(
    original: Callable[..., Any],
    tape: tf.GradientTape,
    target: Any,
    sources: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """What takes a tape's gradient, of weights' values in place of Keras's variables."""
    scope = scope_of_pass()

    def value(source: Any) -> Any:
        known = scope.get_current_value(source) if isinstance(source, keras.Variable) else None
        return source if known is None else known

    if scope is not None:
        sources = tf.nest.map_structure(value, sources)
    return original(tape, target, sources, *args, **kwargs)


EXCHANGES: list[step_hooks.Exchange] = [
    (step_hooks.CUSTOM_GRADIENTS, with_weights_as_inputs),
    (step_hooks.TAPES, watching_weights),
    (step_hooks.GRADIENTS, of_weights),
]


class AssignsWeights(ValueError):
    """A weight is assigned that the optimizer updates: only a step on variables can do both."""


class CatchingScope(keras.StatelessScope):
    """A stateless scope that notes what is assigned in it, and what it was given no value for.

    Args:
        part: The rows' fraction of the global batch. A `Mean` that is updated with a single
            number takes it for a mean over the rows, so it weighs as much. None where the rows
            are the global batch.
        apart: Variables that are looked after elsewhere.
        several: Whether the code inside runs several times for a batch: for each replica, or
            piece. A `tf.Variable` that it assigns would be assigned as often.
        updated: Variables that the optimizer updates: to assign one raises `AssignsWeights`.

    Attributes:
        weights: The values of the variables that are trained.
        assigned: The variables that have new values, by identity.
        unknown: The variables that were used without a known value, by identity.
        updates: How often a variable was assigned.
    """

    def __init__(
        self,
        variables: Sequence[keras.Variable],
        values: Sequence[tf.Tensor],
        part: tf.Tensor | None = None,
        apart: Sequence[keras.Variable] = (),
        several: bool = False,
        updated: Sequence[keras.Variable] = (),
    ) -> None:
        super().__init__(list(zip(variables, values, strict=True)), collect_losses=True)
        self.part = part
        self.assigned: dict[int, keras.Variable] = {}
        self.unknown: dict[int, keras.Variable] = {}
        self.updates = 0
        self._known = {id(variable) for variable in (*variables, *apart)}
        self._graph = tf.compat.v1.get_default_graph()
        self._read: dict[int, tf.Tensor] = {}
        pairs = zip(variables, values, strict=True)
        self.weights = [
            value for variable, value in pairs if variable.trainable and value.dtype.is_floating
        ]
        self._watch = contextlib.ExitStack()
        self._several = several
        self._updated = updated

    def __enter__(self) -> "CatchingScope":
        if self._several:
            self._watch.enter_context(refused_without_keras())
        self._watch.enter_context(step_hooks.exchanged(EXCHANGES))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._watch.close()

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        """Note a new value; no gradient flows through it, as through no assignment."""
        variable, value = update
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise_assigned_in_branch(variable)
        if any(variable is weight for weight in self._updated):
            raise_assigned(
                AssignsWeights,
                "a trainable",
                "Make the variable non-trainable, or use the assigned value without storing it.",
                variable,
            )
        self._meet(variable)
        self.assigned[id(variable)] = variable
        self.updates += 1
        value = tf.stop_gradient(value)
        value.set_shape(variable.shape)  # A slice of as many rows as there are does not tell.
        super().add_update((variable, value))

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        """The value of a variable inside the scope; None if it is not known here."""
        self._meet(variable)
        value = super().get_current_value(variable)
        if value is not None and variable.trainable:
            self._read[id(variable)] = value
        return value

    def values_of(self, variables: Sequence[keras.Variable]) -> list[tf.Tensor]:
        """The values of variables inside the scope."""
        return [self.get_current_value(variable) for variable in variables]

    @property
    def new_values(self) -> list[tf.Tensor]:
        """What has been assigned."""
        return [self.state_mapping[key] for key in self.assigned]

    @contextlib.contextmanager
    def reads(self) -> Iterator[dict[int, tf.Tensor]]:
        """The values of the trainable variables that are read in this context, by identity."""
        before, self._read = self._read, {}
        try:
            yield self._read
        finally:
            # In place: who began to note before has this very dictionary.
            before.update(self._read)
            self._read = before

    def again(self, values: dict[int, tf.Tensor]) -> "CatchingScope":
        """A scope in which the same code runs once more, with these values by identity."""
        scope = copy.copy(self)
        scope.begin(values)
        return scope

    def begin(self, values: dict[int, tf.Tensor]) -> None:
        """Forget what has been assigned."""
        self.state_mapping, self.assigned = dict(values), {}
        self.losses: list[tf.Tensor] = []
        self._graph, self._watch = tf.compat.v1.get_default_graph(), contextlib.ExitStack()

    def _meet(self, variable: keras.Variable) -> None:
        if (
            id(variable) not in self._known
            and variable_internals.variable_storage(variable) is not None
        ):
            self.unknown[id(variable)] = variable


def raise_assigned_in_branch(variable: keras.Variable) -> None:
    """Raise because only the inside of a condition or loop would know the new value."""
    raise value_error(
        "A variable is assigned inside of a condition, a loop or a `tf.function`.",
        "Expected assignments in the body of `call`, `compute_loss` or a loss.",
        "Compute the new value there and assign it outside: "
        "`variable.assign(keras.ops.where(condition, new, variable))`.",
        variable=variable.path,
    )


def raise_assigned(error: type[ValueError], kind: str, fix: str, variable: keras.Variable) -> None:
    """Raise because a variable is assigned whose new value the step itself computes."""
    raise error_of(
        error,
        f"A layer or a loss assigns a value to {kind} variable while it is called.",
        "Expected forward passes and losses that change no variable that an update changes.",
        fix,
        variable=variable.path,
    )


_thread = threading.local()


@contextlib.contextmanager
def refused_without_keras() -> Iterator[None]:
    """Refuse what is assigned to a `tf.Variable` on this thread, past Keras."""
    before, _thread.refuses = getattr(_thread, "refuses", False), True
    try:
        with step_hooks.exchanged([(step_hooks.ASSIGNMENTS, refusing)]):
            yield
    finally:
        _thread.refuses = before


@contextlib.contextmanager
def permitted() -> Iterator[None]:
    """Let the code inside assign what it likes, as the library does to replicas' copies."""
    before, _thread.refuses = getattr(_thread, "refuses", False), False
    try:
        yield
    finally:
        _thread.refuses = before


def refusing(original: Callable[..., Any], self: tf.Variable, *args: Any, **kwargs: Any) -> Any:
    """A method of `tf.Variable` that raises where it is refused."""
    if getattr(_thread, "refuses", False):
        raise value_error(
            "A `tf.Variable` is assigned in a step.",
            "Expected a `keras.Variable`: the code runs on each replica and for each "
            "micro-batch, and only of Keras's variables it is known what comes of that.",
            "Make it with `self.add_weight(..., trainable=False)`.",
            variable=self.name,
        )
    return original(self, *args, **kwargs)


UPDATE = keras.metrics.Mean.update_state


class WeighedNumbers:
    """Lets `Mean` weigh a single number with the part of the batch that it is the mean of."""

    _lock = threading.Lock()
    _users = 0

    @classmethod
    @contextlib.contextmanager
    def weighed(cls) -> Iterator[None]:
        """A context in which it does; replicas that are traced in turn may be in it together."""
        with cls._lock:
            cls._users += 1
            keras.metrics.Mean.update_state = update_with_part
        try:
            yield
        finally:
            with cls._lock:
                cls._users -= 1
                if not cls._users:
                    keras.metrics.Mean.update_state = UPDATE


def update_with_part(metric: Any, values: Any, sample_weight: Any = None) -> Any:
    """`Mean.update_state`, which weighs a single number as the scope says."""
    part = getattr(model_internals.stateless_scope(), "part", None)
    if part is not None and sample_weight is None and keras.ops.ndim(values) == 0:
        sample_weight = part
    return UPDATE(metric, values, sample_weight)
