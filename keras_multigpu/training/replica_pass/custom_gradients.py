"""Lets gradients that a function defines itself reach the weights that it reads, in a pure pass.

`keras.remat`, `tf.recompute_grad` and whatever else `tf.custom_gradient` decorates look for the
`tf.Variable`s that a function has read, to give them gradients. In a pass there are none: weights
are tensors. Without this they would stay as they are, with Keras's warning that gradients do not
exist.
"""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.keras_internals import step_hooks
from keras_multigpu.training.variables.caught_assignments import CatchingScope


def reaching_weights(original: Callable[..., Any]) -> Callable[..., Any]:
    """What calls a function with a gradient of its own, so that the weights it reads are inputs."""

    def call(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        scope = keras_internals.stateless_scope()
        if not isinstance(scope, CatchingScope):
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


CUSTOM_GRADIENTS: list[step_hooks.Exchange] = [
    (*place, reaching_weights) for place in step_hooks.CUSTOM_GRADIENTS
]
