"""`Elsewhere`: workers or cores that compute training steps on copies of a model's values.

This process keeps the model, evaluates and predicts.
"""

import logging
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.training.replica_group import scope_of
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.steps.request import StepRequest

logger = logging.getLogger("keras_multigpu")

PROBES = "a callback that looks into steps"


class Elsewhere:
    """Workers or cores that compute training steps under a strategy of their own.

    Args:
        strategy: That strategy.
        name: What messages call them.
        workers: How many there are.
        updated_there: Whether steps change the copies instead of the model's own values.
    """

    asynchronous = False

    def __init__(
        self, strategy: tf.distribute.Strategy, name: str, workers: int, updated_there: bool
    ) -> None:
        self.strategy = strategy
        self.name = name
        self.workers = workers
        self._updated_there = updated_there
        self._is_ahead = False
        self._copies: dict[int, tuple[tf.Variable, tf.Variable]] = {}

    def make_runner(self, request: StepRequest) -> Runner:
        """What runs a training step there; a `ValueError` if nothing can."""
        raise NotImplementedError

    def leave_out(self) -> None:
        """Let this process train alone, which can run the user's Python."""
        logger.info("`run_eagerly=True`: this process trains alone, without %s.", self.name)
        self.settle()

    def copies(self, variables: Sequence[tf.Variable]) -> list[tf.Variable]:
        """The copies of variables, made when first needed."""
        for variable in variables:
            if id(variable) not in self._copies:
                # TensorFlow spreads these variables over the parameter servers.
                with scope_of(self.strategy):
                    copy = tf.Variable(variable.read_value(), trainable=False)
                self._copies[id(variable)] = variable, copy
        return [self._copies[id(variable)][1] for variable in variables]

    def copy_there(self) -> None:
        """Copy the model's values to the copies, unless those are newer."""
        if not self._is_ahead:
            for variable, copy in self._copies.values():
                copy.assign(variable.read_value())
        self._is_ahead = self._updated_there

    def copy_back(self) -> None:
        """Copy the values of updated copies to the model."""
        if self._is_ahead:
            for variable, copy in self._copies.values():
                variable.assign(copy.read_value())
        self._is_ahead = False

    def settle(self) -> dict[str, Any]:
        """Wait for all steps and copy the values to the model; the last logs, if still to come."""
        self.copy_back()
        return {}

    def refusal(self, what: str, fix: str) -> ValueError:
        """The error for a training with something unsupported."""
        return value_error(
            f"{self.name[0].upper()}{self.name[1:]} cannot train with {what}.",
            "Expected a training without it.",
            f"{fix}, or train with the kind 'mirrored' or 'multi_worker'.",
            strategy=type(self.strategy).__name__,
        )
