"""`ModelState`: all values that training changes, saved and restored bit for bit.

A state fits only a model that was made alike, so `identity_of_model` describes what a model, its
optimizers, losses and metrics were made of.
"""

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.identities import identify_layer, identify_object, identity_of
from keras_multigpu.keras_internals import model_internals, optimizer_internals, variable_internals
from keras_multigpu.keras_internals.compile_internals import compile_arguments
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.replication import known_replication
from keras_multigpu.training.variables.placement import optimizers_of

RATE = "rate"
"""The group of the learning rates that are numbers."""


class ModelState(NamedTuple):
    """The values of a model's weights, seeds, optimizers and metrics; see `variables_of`."""

    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, model: keras.Model) -> "ModelState":
        settle(model)
        return cls({name: value_of(variable) for name, variable in variables_of(model).items()})

    def restore(self, model: keras.Model) -> None:
        """Assign the values to the model, or to another one that was built alike.

        Nothing is changed unless every variable finds its value.
        """
        settle(model)
        variables = variables_of(model)
        if differences := self.differences(model):
            raise value_error(
                "The state belongs to a different model: " + "; ".join(differences[:3]) + ".",
                "Expected the same layers, optimizer and metrics.",
                "Build and compile the model as it was when the state was taken.",
                differences=len(differences),
            )
        for name in variables.keys() & self.values.keys():
            set_value(variables[name], self.values[name])

    def differences(self, model: keras.Model) -> list[str]:
        """Why this state does not fit a model, a phrase for each variable."""
        variables = variables_of(model)
        # Read each value once, because that copies it off its device.
        kinds = {name: kind_of(value_of(variables[name])) for name in variables}
        found = [
            f"{name_of(variables[name])} is {kind} and the state has {kind_of(self.values[name])}"
            for name, kind in kinds.items()
            if name in self.values and kind != kind_of(self.values[name])
        ]
        new = variables.keys() - self.values.keys()
        found += [f"{name_of(variables[name])} is new" for name in sorted(new) if not is_rate(name)]
        gone = self.values.keys() - variables.keys()
        found += [f"{name} is gone" for name in sorted(gone) if not is_rate(name)]
        return found


def settle(model: keras.Model) -> None:
    """Wait until all values of the model are there, on all workers alike."""
    replication = known_replication(model)
    if replication is not None:
        replication.settle()


def are_open(model: keras.Model) -> bool:
    """Whether some values are sums to which other workers have not added theirs yet."""
    replication = known_replication(model)
    return replication is not None and replication.open_sums.are_open


def is_rate(name: str) -> bool:
    """Whether a variable is a learning rate, which a user may replace by a schedule."""
    return name.startswith(f"{RATE}/")


def variables_of(model: keras.Model) -> dict[str, Any]:
    """The variables that training changes, by name: `group/number`.

    Those that the model does not track are `tf.Variable`s, the others are Keras's.
    """
    # Numbers instead of paths: Keras numbers layers as they are made, so a model that is built a
    # second time has other paths, but in the same order.
    rates = [optimizer_internals.compiled_rate(part) for part in optimizers_of(model)]
    replication = known_replication(model)
    groups = {
        "weights": model.variables,
        # Apart, so that a schedule can replace a number.
        RATE: [rate for rate in rates if isinstance(rate, keras.Variable)],
        "optimizer": [v for optimizer in optimizers_of(model) for v in optimizer.variables],
        "metrics": model.metrics_variables,
        "untracked": replication.placement.untracked if replication else [],
        "seed": [variable_internals.global_seed_state()],
    }
    named: dict[str, Any] = {}
    seen: set[int] = set()
    for group, variables in groups.items():
        new = {id(v): v for v in variables if id(v) not in seen}
        seen |= new.keys()
        named.update({f"{group}/{number}": v for number, v in enumerate(new.values())})
    return named


def value_of(variable: Any) -> np.ndarray:
    return np.array(variable_internals.variable_storage(variable).numpy())


def name_of(variable: Any) -> str:
    path: str = variable.path if isinstance(variable, keras.Variable) else variable.name
    return path


def kind_of(value: np.ndarray) -> str:
    return f"{value.dtype.name} of shape {value.shape}"


def set_value(variable: Any, value: np.ndarray) -> None:
    for copy in copies_of(variable):
        copy.assign(value)


COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
"""The arguments of `compile` that decide what is trained and logged, besides the optimizer."""


def identity_of_model(model: keras.Model) -> dict[str, Any]:
    """What two models must have in common to exchange states; see `keras_multigpu.identities`.

    The model is compiled and built.
    """
    given = compile_arguments(model)
    return {
        "layers": [identify_layer(part) for part in model_internals.layers_of(model)],
        "optimizers": [identity_of_optimizer(part) for part in optimizers_of(model)],
        **{name: identity_of(given.get(name)) for name in COMPILED},
        # Single weights can be frozen or excluded from decay, which no configuration shows.
        "frozen": [n for n, weight in enumerate(model.weights) if not weight.trainable],
        "without_decay": [optimizer_internals.not_decayed(part) for part in optimizers_of(model)],
    }


def identity_of_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """What an optimizer was made of, except its learning rate, for which there is `rates_of`."""
    # Inner optimizers have their own places in the list.
    without = ("learning_rate", "inner_optimizer", "optimizers", "optimizer_map", "_optimizer_map")
    known = {name: part for name, part in identify_object(optimizer).items() if name not in without}
    return {**known, "chosen_by": identity_of(optimizer_internals.chosen_by(optimizer))}


def rates_of(model: keras.Model) -> list[Any]:
    """The learning rate of each optimizer: a number, or what the schedule was made of."""
    rates = [optimizer_internals.compiled_rate(part) for part in optimizers_of(model)]
    return [
        float(variable_internals.variable_storage(rate).numpy())
        if isinstance(rate, keras.Variable)
        else identity_of(rate)
        for rate in rates
    ]
