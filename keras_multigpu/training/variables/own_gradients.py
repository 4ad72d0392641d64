"""Lets gradients that a user's code takes itself reach the weights, in a pure pass.

TensorFlow looks for the `tf.Variable`s that were read: where `tf.custom_gradient` decorates a
function, as `keras.remat` and `tf.recompute_grad` do, and where a `GradientTape` watches. In a pass
there are none, because weights are tensors. Without this the weights inside of `keras.remat` would
stay as they are, and a tape in `compute_loss` would know none.
"""

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.keras_internals import step_hooks


def scope_of_pass() -> Any:
    """The present `CatchingScope`; None where no pass runs on this thread."""
    scope = keras_internals.stateless_scope()
    return scope if hasattr(scope, "reads") else None


def with_weights_as_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """What calls a function with a gradient of its own: the weights that it reads are inputs."""

    def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
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

    return call


def watching_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """What begins to record on a tape, which watches weights as it would watch variables."""

    def enter(tape: tf.GradientTape) -> Any:
        entered, scope = original(tape), scope_of_pass()
        if scope is not None and step_hooks.watches_variables(tape):
            tape.watch(scope.weights)
        return entered

    return enter


def of_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """What takes a tape's gradient, of weights' values in place of Keras's variables."""

    def gradient(
        tape: tf.GradientTape, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> Any:
        scope = scope_of_pass()

        def value(source: Any) -> Any:
            known = scope.get_current_value(source) if isinstance(source, keras.Variable) else None
            return source if known is None else known

        if scope is not None:
            sources = tf.nest.map_structure(value, sources)
        return original(tape, target, sources, *args, **kwargs)

    return gradient


EXCHANGES: list[step_hooks.Exchange] = [
    (*place, replacement)
    for places, replacement in (
        (step_hooks.CUSTOM_GRADIENTS, with_weights_as_inputs),
        (step_hooks.TAPES, watching_weights),
        (step_hooks.GRADIENTS, of_weights),
    )
    for place in places
]
