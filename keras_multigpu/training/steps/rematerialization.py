"""Rematerialization: layers computed once more for their gradient, as `keras.RematScope` asks.

    forward    the layer in a scope that notes what it reads and assigns ──> results, assigned once
    backward   the layer again, with the values that it read before      ──> gradients

Keras uses `tf.recompute_grad` on TensorFlow, which takes no keywords in a graph, so that every
layer in `fit` fails (keras#21207). It would also draw other masks in Dropout, update statistics
twice, read weights that have changed since, and lose what `add_loss` adds.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_multigpu.checks import runtime_error, value_error
from keras_multigpu.keras_internals import model_internals, remat_internals, variable_internals
from keras_multigpu.partition.program import Operation, runs_once
from keras_multigpu.partition.replica import BARRIER
from keras_multigpu.training.shares import present_leaves, with_leaves

logger = logging.getLogger("keras_multigpu")

# Keras's losses look for logits before these operations.
ENDS = {"Softmax", "Sigmoid"}

_warned_of: set[str] = set()


class Noted(keras.StatelessScope):
    """A scope that changes no variable; it notes which are read and assigned.

    Args:
        known: The values of variables when the function ran first, by id.
        unwatched: The tape that must not see variables being read.
    """

    def __init__(self, known: Mapping[int, tf.Tensor] | None = None, unwatched: Any = None) -> None:
        super().__init__(collect_losses=True)
        self.state_mapping = dict(known or {})
        self._again, self._unwatched = known is not None, unwatched
        self._graph = tf.compat.v1.get_default_graph()
        self.read: list[tuple[keras.Variable, tf.Tensor]] = []
        self.assigned: dict[int, tuple[keras.Variable, tf.Tensor]] = {}
        # Variables that were read before they had a value.
        self.unmade: list[keras.Variable] = []
        # A variable that was assigned in a loop or a condition.
        self.assigned_inside: keras.Variable | None = None

    def get_current_value(self, variable: keras.Variable) -> tf.Tensor | None:
        known = self.state_mapping.get(id(variable))
        if known is None:
            storage = variable_internals.variable_storage(variable)
            if storage is None:
                self.unmade.append(variable)
                return None
            if self._again:
                raise runtime_error(
                    f"{variable.path} is read when a layer is computed again, and was not before.",
                    "Expected a layer that does the same each time that it is called.",
                    "Make the layer outside of `keras.RematScope`.",
                    variable=variable.path,
                )
            # A value that is read in a loop cannot be used outside of it.
            with self._graph.as_default(), self._unwatched.stop_recording():
                outer = self.original_scope and self.original_scope.get_current_value(variable)
                known = tf.convert_to_tensor(storage) if outer is None else outer
            self.state_mapping[id(variable)] = known
            self.read.append((variable, known))
        return known

    def add_update(self, update: tuple[keras.Variable, tf.Tensor]) -> None:
        variable, value = update
        if tf.compat.v1.get_default_graph() is not self._graph:
            self.assigned_inside = variable
            raise RuntimeError(f"{variable.path} is assigned in a loop or a condition")
        before = self.get_current_value(variable)
        self.assigned[id(variable)] = variable, value
        # An assignment has no gradient: what reads a weight afterwards has the weight's own.
        found = tf.stop_gradient(value)
        if variable.trainable and before is not None:
            found = tf.custom_gradient(lambda _: (tf.stop_gradient(value), lambda d: d))(before)
        self.state_mapping[id(variable)] = found


class Results(NamedTuple):
    """The results of a function that may have a gradient.

    Attributes:
        tensors: The tensors that it returns.
        logits: The logits that Keras's losses take in place of each of these, or None.
        losses: The losses that layers have added in it.
    """

    tensors: list[tf.Tensor]
    logits: list[tf.Tensor | None]
    losses: list[tf.Tensor]


def results_of(outputs: Any, scope: Noted) -> Results:
    tensors = [leaf for leaf in flattened(outputs) if is_in_graph(leaf)]
    return Results(tensors, [logits_of(tensor) for tensor in tensors], scope.losses)


def logits_of(tensor: tf.Tensor) -> tf.Tensor | None:
    (_, attached) = model_internals.attached([tensor])
    return tensor.op.inputs[0] if attached is None and tensor.op.type in ENDS else attached


class Recorded(NamedTuple):
    """What a function did when it ran first.

    Attributes:
        outputs: What it returned.
        scope: The Keras variables that it read and assigned.
        variables: The other variables that it read.
        operations: The operations that it added to the graph.
    """

    outputs: Any
    scope: Noted
    variables: list[tf.Variable]
    operations: list[tf.Operation]


def recorded(function: Callable[..., Any], args: Any, kwargs: Any) -> Recorded | None:
    """Run a function and note what it does; None if the scope cannot note an assignment."""
    graph = tf.compat.v1.get_default_graph()
    before = len(graph.get_operations())
    with tf.GradientTape() as tape:
        scope = Noted(unwatched=tape)
        try:
            with scope:
                outputs = function(*args, **kwargs)
        except Exception:
            if scope.assigned_inside is None:
                raise
            if effect := effect_in(graph.get_operations()[before:]):
                raise value_error(
                    f"{name_of(function)} assigns variables in a loop, and {effect.type} in it "
                    "has effects as well.",
                    "Expected one of both at most.",
                    "Make the layer outside of `keras.RematScope`.",
                    operation=effect.name,
                ) from None
            warn_of(function, f"{scope.assigned_inside.path} is assigned in a loop")
            return None
    if any(variable_internals.variable_storage(each) is not None for each in scope.unmade):
        # It has created variables, which have values only now.
        return recorded(function, args, kwargs)
    made = graph.get_operations()[before:]
    return Recorded(outputs, scope, list(tape.watched_variables()), made)


def recomputed(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """The results of a function, which is computed once more for their gradient."""
    # A cell keeps its masks until its layer, which is recomputed itself, has ended.
    is_cell = hasattr(getattr(function, "__self__", None), "reset_dropout_mask")
    known = None if is_cell else recorded(function, args, kwargs)
    if known is None:
        return function(*args, **kwargs)
    results = results_of(known.outputs, known.scope)
    if effect := effect_in(known.operations):
        warn_of(function, f"{effect.type} in it has effects, or draws from a state of its own")
    elif present_leaves(results) and not known.scope.unmade:
        results = computed_again(function, (args, kwargs), results, known)
    return finished(function, known, results)


def computed_again(
    function: Callable[..., Any],
    arguments: Any,
    results: Results,
    known: Recorded,
) -> Results:
    """The same results, with a gradient that computes them once more."""
    leaves = flattened(arguments)
    given = [leaf for leaf in leaves if is_in_graph(leaf)]
    states = [value for _, value in known.scope.read]
    keys = [id(variable) for variable, _ in known.scope.read]
    outside = from_outside(known.operations, present_leaves(results), [*given, *states])
    call = remat_internals.call_under_way()

    def again(starts: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        taken, read = list(starts[: len(given)]), starts[len(given) :]
        model_internals.attach(taken, model_internals.attached(given))
        args, kwargs = packed(arguments, leaves, taken)
        with remat_internals.in_call(call), Noted(dict(zip(keys, read, strict=True))) as noted:
            outputs = function(*args, **kwargs)
        return present_leaves(results_of(outputs, noted))

    def gradient(*upstream: tf.Tensor) -> list[Any]:
        # TensorFlow passes zeros for unused results; the weights behind these have no gradient.
        unused = [n for n, each in enumerate(upstream) if is_nothing(each)]
        starts, weights = begun([*given, *states], upstream)
        # The gradient of a loop has its own graph.
        sources = [*starts, *map(remat_internals.in_this_graph, outside), *known.variables]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([each for each in sources if is_differentiable(each)])
            found = again(starts)
        used = [n for n, each in enumerate(found) if is_differentiable(each) and n not in unused]
        gradients: list[Any] = tape.gradient(
            [found[n] for n in used], sources, output_gradients=[weights[n] for n in used]
        )
        return gradients

    @tf.custom_gradient
    def of_inputs(*inputs: tf.Tensor) -> Any:
        return present_leaves(results), gradient

    values = [tf.convert_to_tensor(variable) for variable in known.variables]
    found: Results = with_leaves(results, of_inputs(*given, *states, *outside, *values))
    return found


def is_nothing(gradient: tf.Tensor) -> bool:
    """Whether a gradient is the zeros of an unused result."""
    op, value = gradient.op, tf.get_static_value(gradient)
    if value is not None:
        return not value.any()
    return bool(op.type == "ZerosLike" and op.inputs[0].op.type == "IdentityN")


def begun(
    starts: Sequence[tf.Tensor], upstream: Sequence[Any]
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """A function's inputs, held back until there are gradients of its results."""
    # Otherwise TensorFlow would find that all has been computed already, and keep it.
    dense = [tf.convert_to_tensor(each) for each in upstream]
    tensors = tf.identity_n([*starts, *dense], name=BARRIER)
    return tensors[: len(starts)], tensors[len(starts) :]


def from_outside(
    made: Sequence[tf.Operation], results: Sequence[tf.Tensor], known: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The tensors that operations and their results use from outside and may have a gradient."""
    own = {op.name for op in made if op.type != "Placeholder"}
    names = {(id(tensor.graph), tensor.name) for tensor in known}
    held = remat_internals.held_outside(tf.compat.v1.get_default_graph())
    found = {}
    for tensor in (*(tensor for op in made for tensor in op.inputs), *results):
        if is_differentiable(tensor) and tensor.op.name not in own:
            there = held.get(tensor.name, tensor)
            if tf.is_symbolic_tensor(there) and (id(there.graph), there.name) not in names:
                found[tensor.name] = there
    return list(found.values())


def finished(function: Callable[..., Any], known: Recorded, results: Results) -> Any:
    """What a function returns, after its assignments and the losses that it adds."""
    outputs, scope = known.outputs, known.scope
    tensors = [leaf for leaf in flattened(outputs) if is_in_graph(leaf)]
    if results.tensors and results.tensors[0] is not tensors[0]:
        masks = model_internals.attached(tensors)[::2]
        pairs = [each for pair in zip(masks, results.logits, strict=True) for each in pair]
        model_internals.attach(results.tensors, pairs)
        outputs = packed(outputs, flattened(outputs), results.tensors)
    for variable, value in scope.assigned.values():
        variable.assign(value)
    for before, loss in zip(scope.losses, results.losses, strict=True):
        layer = remat_internals.adding_layer(before, function)
        if layer is None:
            raise value_error(
                f"{name_of(function)} adds a loss, and it is not known which layer's.",
                "Expected `keras.remat` of a layer or its method, or inside a layer's `call`.",
                "Pass the layer itself.",
                function=function,
            )
        layer.add_loss(loss)
    return outputs


def warn_of(function: Callable[..., Any], reason: str) -> None:
    text = f"{name_of(function)} is not computed again, so it saves no memory: {reason}."
    if text not in _warned_of:
        _warned_of.add(text)
        logger.warning("%s The results are the same.", text)


def effect_in(made: Sequence[tf.Operation]) -> tf.Operation | None:
    """An operation that must not run twice."""
    effects = (op for op in made if runs_once(Operation(op, op.type), changes_tables=False))
    return next(effects, None)


def name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    return f"`{getattr(owner, 'name', None) or getattr(function, '__name__', function)}`"


def is_in_graph(leaf: Any) -> bool:
    """Whether a leaf is a tensor of a graph, and not a value, a variable or a number."""
    return isinstance(leaf, tf.Tensor) and bool(tf.is_symbolic_tensor(leaf))


def is_differentiable(tensor: Any) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def flattened(structure: Any) -> list[Any]:
    return list(tf.nest.flatten(structure, expand_composites=True))


def packed(structure: Any, leaves: Sequence[Any], tensors: Sequence[tf.Tensor]) -> Any:
    """A structure with these tensors in place of its own."""
    own = iter(tensors)
    new = [next(own) if is_in_graph(leaf) else leaf for leaf in leaves]
    return tf.nest.pack_sequence_as(structure, new, expand_composites=True)
