"""What is known of the custom step that runs now on this thread, on one replica."""

import contextlib
import threading
from collections.abc import Callable, Container, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals, step_hooks, variable_internals
from keras_multigpu.training.exchange.sparse_gradients import rows_noted, zero_unless
from keras_multigpu.training.replica_group import Replica, ReplicaGroup
from keras_multigpu.training.replica_pass.rows_flow import RowsFlow
from keras_multigpu.training.shares import Rows, wide
from keras_multigpu.training.variables.catching_scope import permitted, refused_without_keras
from keras_multigpu.training.variables.placement import NeedsVariables

_thread = threading.local()


class PresentStep:
    """A step of the user's own on one replica.

    The known variables, by identity, are looked after. If somebody is to follow the rows, the flow
    does.
    """

    def __init__(
        self,
        model: keras.Model,
        rows: Rows,
        group: ReplicaGroup,
        replica: Replica,
        known: Container[int] = (),
        flow: RowsFlow | None = None,
    ) -> None:
        self.model = model
        self.rows = rows
        self.group = group
        self.replica = replica
        self.flow = flow
        self._known = known
        self.present = rows.examples > 0
        self.holders = tf.cast(tf.minimum(rows.global_batch_size, group.count), wide())
        """How many replicas have examples."""
        self.of_batch: set[int] = set()
        self.with_gradient: set[int] = set()
        self.quiet = group.count == 1
        self._graph = tf.compat.v1.get_default_graph()
        self._origins: dict[Any, frozenset[str]] = {}
        self._kept: list[Any] = []
        for leaf in tf.nest.flatten(rows.data, expand_composites=True):
            if leaf is not None and leaf.shape.rank != 0:
                self._come_from(leaf, frozenset({"rows"}))

    @property
    def is_open(self) -> bool:
        """Whether the length of an axis tells the batch's from others: only it is unknown."""
        return not tf.executing_eagerly() and self.lengths == {None}

    @property
    def lengths(self) -> set[int | None]:
        """How many rows the parts of the batch have; None where that is not known."""
        leaves = [leaf for leaf in tf.nest.flatten(self.rows.data) if leaf is not None]
        return {leaf.shape[0] for leaf in leaves if leaf.shape.rank}

    @property
    def is_nested(self) -> bool:
        """Whether TensorFlow traces a function inside the step: a branch, a loop's body."""
        return tf.compat.v1.get_default_graph() is not self._graph

    def require_outermost(self, what: str) -> None:
        """Raise a `ValueError` inside a branch or loop, where replicas cannot exchange values."""
        if self.is_nested:
            raise value_error(
                f"{what} inside a `tf.cond`, a `tf.while_loop` or a `tf.function`.",
                "Expected it directly in the step: replicas cannot exchange values in a "
                "branch or loop that TensorFlow traces.",
                "Move it out of there: write the loop in Python, choose with `tf.where`, "
                "leave out the inner `@tf.function`.",
                model=type(self.model).__name__,
            )

    def require_known(self, variable: keras.Variable) -> None:
        """Ask for a variable of which nobody would see to it that the replicas agree."""
        # Each replica draws numbers of its own; from one state they come in turn.
        own = id(variable) in self._known or variable_internals.is_seed_state(variable)
        if self.group.count > 1 and not own:
            raise NeedsVariables(self.model.replication.placement, [variable])

    def agreed(self, value: tf.Tensor) -> tf.Tensor:
        """A value for a weight, the same on all replicas: the mean, where rows decide it."""
        if not value.dtype.is_floating or "rows" not in self.origins(value):
            return value
        self.require_outermost("A trainable variable is assigned what depends on the batch,")
        with left_alone():
            own = value * tf.cast(self.rows.fraction, value.dtype)
            return self.shared(*self.group.sum([zero_unless(self.present, own)]))

    def relates(self, what: str) -> None:
        """Note that the user's code relates rows, in a way that no operation shows."""
        if self.flow is not None:
            self.flow.find(what)

    def shared(self, tensor: tf.Tensor, is_total: bool = False) -> tf.Tensor:
        """The tensor, remembered as a value that all replicas have in common, such as a total."""
        tensor = tf.identity(tensor)
        self._come_from(tensor, frozenset({"shared"}))
        if self.flow is not None:
            (self.flow.is_total if is_total else self.flow.forget)(tensor)
        return tensor

    def origins(self, tensor: tf.Tensor) -> frozenset[str]:
        """What a tensor depends on: the replica's own `rows`, `shared` values.

        Random numbers count as rows, for each replica draws its own.
        """
        if tf.executing_eagerly():
            return self._origins.get(id(tensor), frozenset())
        waiting = [tensor.op]
        while waiting:
            operation = waiting.pop()
            if operation in self._origins:
                continue
            inputs = [t.op for t in operation.inputs]
            unknown = [op for op in inputs if op not in self._origins]
            if unknown:
                waiting += [operation, *unknown]
            else:
                self._origins[operation] = self._of(operation.type, inputs)
        return self._origins[tensor.op]

    def note(self, kind: str, inputs: Any, attributes: Any, outputs: Any) -> None:
        """Remember what an operation made its outputs of."""
        if self.flow is not None:
            self.flow.quiet = self.quiet
            self.flow.note(kind, inputs, attributes, outputs)
        if not tf.executing_eagerly():
            return  # A graph can be asked later.
        origins = self._of(kind, map(id, inputs))
        for tensor in outputs if origins else ():
            if id(tensor) not in self._origins:
                self._come_from(tensor, origins)

    def noted(self) -> contextlib.AbstractContextManager[None]:
        """A context in which operations are noted, where somebody wants to know of them."""
        eager = tf.executing_eagerly()
        if self.quiet or not (eager or self.flow):
            return contextlib.nullcontext()
        return step_hooks.noted_operations(self.note, None if eager else self._graph)

    def _come_from(self, tensor: Any, origins: frozenset[str]) -> None:
        eager = tf.executing_eagerly()
        self._origins[id(tensor) if eager else tensor.op] = origins
        # What is alive shares its identity with nothing else.
        self._kept += [tensor] if eager else []

    def _of(self, kind: str, inputs: Any) -> frozenset[str]:
        found = [self._origins.get(key, frozenset[str]()) for key in inputs]
        own = {"rows"} if "Random" in kind else set[str]()
        return frozenset(own.union(*found))


def present_step() -> PresentStep:
    """The step that runs on this thread."""
    step: PresentStep = _thread.step
    return step


def present_rows() -> Rows | None:
    """The rows of the replica whose custom step runs now; None outside such a step."""
    step = getattr(_thread, "step", None)
    return None if step is None else step.rows


def step_of_user_code() -> PresentStep | None:
    """The step, where code of the user's own runs in it and no layer is being called."""
    step = getattr(_thread, "step", None)
    if step is None or step.quiet or step_hooks.inside_a_layer():
        return None
    return step


def assignment(original: Callable[..., Any], self: keras.Variable, value: Any) -> Any:
    """`keras.Variable.assign`, which each replica does to a copy of its own."""
    step = getattr(_thread, "step", None)
    if step is None or model_internals.stateless_scope() is not None:
        return original(self, value)
    step.require_known(self)
    # All others may differ until the step ends, see `CustomStep`.
    if not step.quiet and any(self is each for each in step.model.trainable_variables):
        value = step.agreed(keras.ops.convert_to_tensor(value, self.dtype))
    with permitted():
        return original(self, value)


def turn(
    original: Callable[..., Any], self: tf.distribute.ReplicaContext, *args: Any, **kwargs: Any
) -> Any:
    """`merge_call`, in which other replicas call the layers, and leave in them what is theirs."""
    step = getattr(_thread, "step", None)
    if step is None:
        return original(self, *args, **kwargs)
    with model_internals.kept_by_layers(step.model):
        return original(self, *args, **kwargs)


@contextlib.contextmanager
def running(step: PresentStep) -> Iterator[None]:
    _thread.step = step
    try:
        noted = step.noted()
        watch = refused_without_keras() if step.group.count > 1 else contextlib.nullcontext()
        with noted, watch, rows_noted(step.rows):
            yield
    finally:
        _thread.step = None


@contextlib.contextmanager
def left_alone() -> Iterator[None]:
    """Let losses, means and gradients be those of the replica's own rows, its copies assigned."""
    step = present_step()
    before, step.quiet = step.quiet, True
    try:
        with permitted():
            yield
    finally:
        step.quiet = before
