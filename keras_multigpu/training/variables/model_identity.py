"""What a model, its optimizers, losses and metrics were made of, as plain values."""

from typing import Any

import keras

from keras_multigpu import keras_internals
from keras_multigpu.identities import identity_of
from keras_multigpu.identities import of_object
from keras_multigpu.keras_internals import optimizer_internals
from keras_multigpu.keras_internals.compile_internals import compile_arguments
from keras_multigpu.training.variables.placement import optimizers_of

COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
"""The arguments of `compile` that decide what is trained and logged, besides the optimizer."""


def identity_of_model(model: keras.Model) -> dict[str, Any]:
    """What has to be the same for a state to mean the same; see `keras_multigpu.identities`.

    Args:
        model: A compiled model that is built.
    """
    given = compile_arguments(model)
    return {
        "layers": [identity_of_layer(part) for part in keras_internals.layers_of(model)],
        "optimizers": [identity_of_optimizer(part) for part in optimizers_of(model)],
        **{name: identity_of(given.get(name)) for name in COMPILED},
    }


def identity_of_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """That of an optimizer, without its rate, which `rates_of` has."""
    # Those inside it have their own places in the list.
    without = ("learning_rate", "inner_optimizer", "optimizers")
    return {name: part for name, part in of_object(optimizer).items() if name not in without}


def rates_of(model: keras.Model) -> list[Any]:
    """The learning rate of each optimizer: a number, or what the schedule was made of."""
    rates = [optimizer_internals.compiled_rate(part) for part in optimizers_of(model)]
    return [
        float(keras_internals.variable_storage(rate).numpy())
        if isinstance(rate, keras.Variable)
        else identity_of(rate)
        for rate in rates
    ]


def identity_of_layer(layer: keras.Layer) -> dict[str, Any]:
    """That of a layer; of one that Keras made of others only how they are wired."""
    if type(layer).get_config in MADE_OF_OTHERS:
        return {"class": type(layer).__name__, "wiring": identity_of(keras_internals.wiring(layer))}
    return of_object(layer)


MADE_OF_OTHERS = (keras.Sequential.get_config, keras_internals.FunctionalModel.get_config)
"""The layers inside have their own places in the list."""
