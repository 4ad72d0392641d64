"""Variables that the user's code uses in a step and the model does not track.

Keras lets a layer or a loss use any variable. A step learns of such a one when it is traced,
asks for it with `NeedsVariables`, and is made anew with it among the variables it knows.
"""

from collections.abc import Iterable

import keras
import tensorflow as tf

from keras_multigpu.training.variables.metric_storages import MetricStorages
from keras_multigpu.training.variables.placement import MadeOutside
from keras_multigpu.training.variables.placement import place_variables


class Untracked:
    """The variables of this kind that the steps of a model have met.

    Args:
        strategy: Where the model lives.
        metrics: Where the values of its metrics live.

    Attributes:
        variables: They, in the order in which they were met.
    """

    def __init__(self, strategy: tf.distribute.Strategy, metrics: MetricStorages) -> None:
        self.variables: list[keras.Variable] = []
        self._strategy = strategy
        self._metrics = metrics

    @property
    def metric_states(self) -> list[keras.Variable]:
        """Those that metrics add up in."""
        return [variable for variable in self.variables if is_metric_state(variable)]

    def take(self, variables: Iterable[keras.Variable]) -> None:
        """Give variables a copy on each replica; those of metrics need one only."""
        known = {id(variable) for variable in self.variables}
        new = [variable for variable in variables if id(variable) not in known]
        metric_state = [v for v in new if is_metric_state(v)]
        self._metrics.use(metric_state, in_parts=False)
        place_variables([v for v in new if not is_metric_state(v)], self._strategy)
        self.variables += new


class NeedsVariables(MadeOutside):
    """A step uses variables that it was made without.

    Args:
        untracked: What the model has met so far.
        variables: The new ones.
    """

    def __init__(self, untracked: Untracked, variables: Iterable[keras.Variable]) -> None:
        self._untracked, self._variables = untracked, list(variables)
        super().__init__(*(variable.path for variable in self._variables))

    def build(self) -> None:
        """Take them up."""
        self._untracked.take(self._variables)


def is_metric_state(variable: keras.Variable) -> bool:
    """Whether a variable was made by `Metric.add_variable`."""
    return variable.synchronization == "on_read"
