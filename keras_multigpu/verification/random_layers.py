"""Switches random layers off, because on N replicas they draw differently by design.

Dropout, noise and augmentation give every replica its own draws (a guarantee of this
package), so a model with such layers cannot be compared as it is. In inference mode they
let their inputs pass, on one device and on N alike, and everything else stays comparable.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import keras

from keras_multigpu import keras_internals


def switch_off(model: keras.Model) -> list[str]:
    """Let the model's random layers run in inference mode; their names.

    A layer that draws and has no `training` argument, and a model with draws of its own,
    cannot be switched off; `causes` tells the user where that makes a difference.
    """
    names = []
    for layer in keras_internals.layers_of(model):
        signature = inspect.signature(layer.call)
        if draws(layer) and "training" in signature.parameters:
            vars(layer)["call"] = in_inference_mode(layer.call, signature)
            names.append(layer.name)
    return names


def draws(layer: keras.Layer) -> bool:
    """Whether the layer itself, not one inside it, owns a seed generator."""
    if isinstance(layer, keras.Model):
        return False
    own, *inner = keras_internals.layers_of(layer)
    states = {id(state) for state in keras_internals.seed_states(own)}
    for part in inner:
        states -= {id(state) for state in keras_internals.seed_states(part)}
    return bool(states)


def in_inference_mode(call: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    """A `call` whose `training` argument is always False."""

    @functools.wraps(call)
    def without_draws(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.arguments["training"] = False
        return call(*bound.args, **bound.kwargs)

    return without_draws
