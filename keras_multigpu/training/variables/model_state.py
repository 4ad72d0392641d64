"""All values that training changes, taken from a model and given back, bit for bit.

And what a model, its optimizers, losses and metrics were made of, as plain values: a state belongs
to a model that was made alike.
"""

from typing import Any, NamedTuple

import keras
import numpy as np

from keras_multigpu.checks import value_error
from keras_multigpu.identities import HELD, identity_of, of_layer, of_object
from keras_multigpu.keras_internals import model_internals, optimizer_internals, variable_internals
from keras_multigpu.keras_internals.compile_internals import compile_arguments
from keras_multigpu.training.replica_group import copies_in
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
        """Give the values back, to this model or to one that was built alike.

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
            give(variables[name], self.values[name])

    def differences(self, model: keras.Model) -> list[str]:
        """What keeps this state from fitting a model, a phrase for each variable."""
        variables = variables_of(model)
        # Each value is read once: reading copies it off its device.
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


def known_replicas(model: keras.Model) -> Any:
    """The model's `Replication`, if it has one; a model of Keras's own `fit` has none."""
    return vars(model).get("_replication")


def settle(model: keras.Model) -> None:
    """Wait until no other thread changes the model's values."""
    replication = known_replicas(model)
    if replication is not None:
        replication.settle()


def is_rate(name: str) -> bool:
    """Whether a variable is a learning rate, which a user may replace by a schedule."""
    return name.startswith(f"{RATE}/")


def variables_of(model: keras.Model) -> dict[str, Any]:
    """The variables that training changes, by name: `group/number`.

    Those that the model does not track are `tf.Variable`s, the others are Keras's.
    """
    # Numbers and not paths, because Keras counts layers as they are made: a model that is built
    # twice has other paths, in the same order.
    rates = [optimizer_internals.compiled_rate(part) for part in optimizers_of(model)]
    replication = known_replicas(model)
    groups = {
        "weights": model.variables,
        # Apart, so that a schedule can take the place of a number.
        RATE: [rate for rate in rates if isinstance(rate, keras.Variable)],
        "optimizer": [v for optimizer in optimizers_of(model) for v in optimizer.variables],
        "metrics": model.metrics_variables,
        # A model of Keras's own `fit` may have copies as well.
        "untracked": replication.placement.untracked if replication else [],
        "seed": [variable_internals.global_seed_state()],
    }
    named, seen = {}, set()
    for group, variables in groups.items():
        kept = [variable for variable in unique(variables) if id(variable) not in seen]
        seen |= {id(variable) for variable in kept}
        named.update({f"{group}/{number}": variable for number, variable in enumerate(kept)})
    return named


def unique(variables: list[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


def value_of(variable: Any) -> np.ndarray:
    return np.array(storage_of(variable).numpy())


def storage_of(variable: Any) -> Any:
    """What holds a variable's value; of those that the model does not track, themselves."""
    if isinstance(variable, keras.Variable):
        return variable_internals.variable_storage(variable)
    return variable


def name_of(variable: Any) -> str:
    path: str = variable.path if isinstance(variable, keras.Variable) else variable.name
    return path


def kind_of(value: np.ndarray) -> str:
    return f"{value.dtype.name} of shape {value.shape}"


def give(variable: Any, value: np.ndarray) -> None:
    for part in copies_in(storage_of(variable)):
        part.assign(value)


COMPILED = ("loss", "loss_weights", "metrics", "weighted_metrics")
"""The arguments of `compile` that decide what is trained and logged, besides the optimizer."""


def identity_of_model(model: keras.Model) -> dict[str, Any]:
    """What has to be the same for a state to mean the same; see `keras_multigpu.identities`.

    The model is compiled and built.
    """
    given = compile_arguments(model)
    return {
        "layers": [of_layer(part) for part in model_internals.layers_of(model)],
        "optimizers": [identity_of_optimizer(part) for part in optimizers_of(model)],
        **{name: identity_of(given.get(name)) for name in COMPILED},
        # Single weights can be frozen, or kept from decay, and no configuration says so.
        HELD: {
            "distribute": how_distributed(model),
            "frozen": [n for n, weight in enumerate(model.weights) if not weight.trainable],
            "without_decay": [
                optimizer_internals.not_decayed(part) for part in optimizers_of(model)
            ],
        },
    }


def how_distributed(model: keras.Model) -> dict[str, Any]:
    """The arguments of `distribute` that decide what replicas compute together."""
    replication = known_replicas(model)
    if replication is None:
        return {}
    return {"sum_dtype": "bfloat16" if replication.half_sums else "float32"}


def identity_of_optimizer(optimizer: keras.optimizers.Optimizer) -> dict[str, Any]:
    """That of an optimizer, without its rate, which `rates_of` has."""
    # Those inside it have their own places in the list.
    without = ("learning_rate", "inner_optimizer", "optimizers", "optimizer_map", "_optimizer_map")
    known = {name: part for name, part in of_object(optimizer).items() if name not in without}
    held = {name: part for name, part in known.pop(HELD, {}).items() if name not in without}
    held["chosen_by"] = identity_of(optimizer_internals.chosen_by(optimizer))
    return {**known, HELD: held}


def rates_of(model: keras.Model) -> list[Any]:
    """The learning rate of each optimizer: a number, or what the schedule was made of."""
    rates = [optimizer_internals.compiled_rate(part) for part in optimizers_of(model)]
    return [
        float(variable_internals.variable_storage(rate).numpy())
        if isinstance(rate, keras.Variable)
        else identity_of(rate)
        for rate in rates
    ]
