"""Copies of a model's values with those who compute for it, while the model stays where it is.

`Servers` are the workers that compute and the servers that hold values, as their coordinator sees
them. Whatever is not a pass over a batch stays on the coordinator.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import cluster_internals
from keras_multigpu.training.replica_group import scope_of

# So many asynchronous steps are scheduled for each worker: one runs, and the next is there when it
# ends.
AHEAD = 2

NO_SUM = "a loss that is not a sum over examples"
ASSIGNS = "a layer or a loss that assigns a trainable weight"
WHOLE_BATCH = "a metric that needs all predictions of a batch at once"
"""Reasons to refuse a model."""


class Elsewhere:
    """Who computes under a strategy that is not the model's, with copies of its variables.

    Args:
        strategy: That strategy.
        name: Who they are.
        workers: How many.
        updated_there: Whether steps change the copies, and not the model's own values.
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
        self._copies: dict[int, tuple[keras.Variable, tf.Variable]] = {}

    def copies(self, variables: Sequence[keras.Variable]) -> list[tf.Variable]:
        """The copies of variables, made when they are first asked for."""
        for variable in variables:
            if id(variable) not in self._copies:
                # In the scope of parameter servers variables go to these in turn.
                with scope_of(self.strategy):
                    copy = tf.Variable(tf.convert_to_tensor(variable), trainable=False)
                self._copies[id(variable)] = variable, copy
        return [self._copies[id(variable)][1] for variable in variables]

    def push(self) -> None:
        """Give the copies the model's values, before a step that needs them."""
        if not self._is_ahead:
            for variable, copy in self._copies.values():
                copy.assign(tf.convert_to_tensor(variable))
        self._is_ahead = self._updated_there

    def pull(self) -> None:
        """Give the model the values of its copies, where these were updated."""
        if self._is_ahead:
            for variable, copy in self._copies.values():
                variable.assign(copy.read_value())
        self._is_ahead = False

    def settle(self) -> dict[str, Any]:
        """Give the model all values; the logs of the last step, where they are other ones now."""
        self.pull()
        return {}

    def refusal(self, model: keras.Model, what: str) -> ValueError:
        """The error for a model with something that they cannot train."""
        return value_error(
            f"A model with {what} cannot be trained by {self.name}.",
            "Expected Keras's own training step, with losses and metrics that are sums over "
            "examples.",
            "Change the model, or train it with the kind 'mirrored' or 'multi_worker'.",
            model=type(model).__name__,
        )


class Servers(Elsewhere):
    """The workers and parameter servers of one model; asynchronous ones wait for nobody."""

    def __init__(self, strategy: tf.distribute.Strategy, asynchronous: bool) -> None:
        workers = cluster_internals.workers_of_servers(strategy)
        super().__init__(strategy, "workers of parameter servers", workers, asynchronous)
        self.asynchronous = asynchronous
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._under_way: deque[tuple[Any, Callable[[Any], dict[str, Any]]]] = deque()
        self._logs: dict[str, Any] = {}
        self._has_logs = False
        self.steps = 0

    def results(self, function: Any, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What a function returns for each tuple of arguments, computed by the workers."""
        remote = [self._coordinator.schedule(function, args=each) for each in arguments]
        self._coordinator.join()
        return [value.fetch() for value in remote]

    def schedule(
        self, function: Any, arguments: tuple[Any, ...], done: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Let a worker call a function, when it has time; the logs of what is done by now.

        Args:
            function: A `tf.function`.
            arguments: What it is called with.
            done: Makes logs of what it returned.
        """
        self.steps += 1
        remote = self._coordinator.schedule(function, args=arguments)
        self._under_way.append((remote, done))
        # The first step of an epoch is waited for, because callbacks expect logs.
        if len(self._under_way) > AHEAD * self.workers or not self._has_logs:
            self._finish_one()
        return self._logs

    def settle(self) -> dict[str, Any]:
        """Wait for all that is under way, and give the coordinator the servers' values."""
        while self._under_way:
            self._finish_one()
        self._has_logs = False
        self.pull()
        return self._logs

    def _finish_one(self) -> None:
        remote, done = self._under_way.popleft()
        self._logs, self._has_logs = done(remote.fetch()), True
