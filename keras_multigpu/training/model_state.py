"""All values that training changes, taken from a model and given back, bit for bit."""

from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import problem
from keras_multigpu.training.placement import copies
from keras_multigpu.training.placement import optimizers_of


class ModelState(NamedTuple):
    """The values of a model's weights, seeds, optimizers and metrics.

    Attributes:
        values: An array for each variable, under the name that `variables_of` gives it.
    """

    values: dict[str, np.ndarray]

    @classmethod
    def of(cls, model: keras.Model) -> "ModelState":
        """The present values."""
        return cls({name: value_of(variable) for name, variable in variables_of(model).items()})

    def restore(self, model: keras.Model) -> None:
        """Give the values back, to this model or to one that was built alike.

        Nothing is changed unless every variable finds its value.
        """
        variables = variables_of(model)
        if differences := self.differences(model):
            raise ValueError(
                problem(
                    "The state is that of another model: " + "; ".join(differences[:3]) + ".",
                    "Expected the same layers, optimizer and metrics.",
                    "Build and compile the model as it was when the state was taken.",
                    differences=len(differences),
                )
            )
        for name, variable in variables.items():
            give(variable, self.values[name], model.distribute_strategy)

    def differences(self, model: keras.Model) -> list[str]:
        """What keeps this state from fitting a model, a phrase for each variable."""
        variables = variables_of(model)
        found = [
            f"{variables[name].path} has shape {tuple(variables[name].shape)} and the state "
            f"has {self.values[name].shape[-len(variables[name].shape) or 1 :]}"
            for name in variables.keys() & self.values.keys()
            if not fits(variables[name], self.values[name])
        ]
        found += [f"{variables[name].path} is new" for name in variables.keys() - self.values]
        found += [f"{name} is gone" for name in self.values.keys() - variables]
        return found


def variables_of(model: keras.Model) -> dict[str, keras.Variable]:
    """The variables that training changes, by name: `group/number`.

    Numbers and not paths, because Keras counts layers as they are made: a model that is built
    twice has other paths, in the same order.
    """
    groups = {
        "weights": model.variables,
        "optimizer": [v for optimizer in optimizers_of(model) for v in optimizer.variables],
        "metrics": model.metrics_variables,
        "untracked": model.replication.untracked.variables,
        "seed": [keras_internals.global_seed_state()],
    }
    named, seen = {}, set()
    for group, variables in groups.items():
        kept = [variable for variable in unique(variables) if id(variable) not in seen]
        seen |= {id(variable) for variable in kept}
        named.update({f"{group}/{number}": variable for number, variable in enumerate(kept)})
    return named


def unique(variables: list[keras.Variable]) -> list[keras.Variable]:
    """The variables, each once."""
    return list({id(variable): variable for variable in variables}.values())


def value_of(variable: keras.Variable) -> np.ndarray:
    """A variable's value; of one whose copies add up, the copies."""
    storage = keras_internals.variable_storage(variable)
    if adds_up(storage):
        return np.stack([part.numpy() for part in storage.values])
    return np.array(storage.numpy())


def fits(variable: keras.Variable, value: np.ndarray) -> bool:
    """Whether a value has the shape that the variable has, whatever the number of its copies."""
    shape = tuple(variable.shape)
    return value.shape == shape or value.shape[1:] == shape


def give(variable: keras.Variable, value: np.ndarray, strategy: tf.distribute.Strategy) -> None:
    """Let a variable have a value, on all replicas."""
    storage = keras_internals.variable_storage(variable)
    had_copies = value.ndim > len(variable.shape)
    if not adds_up(storage):
        value = value.sum(axis=0) if had_copies else value
        for part in copies(storage, strategy):
            part.assign(value)
        return
    parts = storage.values
    if not had_copies or len(value) != len(parts):
        total = value.sum(axis=0) if had_copies else value
        value = np.stack([total] + [np.zeros_like(total)] * (len(parts) - 1))
    for part, own in zip(parts, value, strict=True):
        part.assign(own)


def adds_up(storage: tf.Variable) -> bool:
    """Whether each replica has a part of the value, as metrics of an own `train_step` do."""
    return (
        isinstance(storage, tf.distribute.DistributedValues)
        and storage.synchronization == tf.VariableSynchronization.ON_READ
    )
