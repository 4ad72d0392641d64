"""`Servers`: workers that compute, and servers that hold values, as the coordinator sees them.

The model itself, and all that is not a pass over a batch, stays on the coordinator.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import cluster_internals

# So many asynchronous steps are scheduled for each worker: one runs, and the next is there when it
# ends.
AHEAD = 2


class Servers:
    """The workers and parameter servers of one model; asynchronous ones wait for nobody."""

    def __init__(self, strategy: tf.distribute.Strategy, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.workers = cluster_internals.workers_of_servers(strategy)
        self._strategy = strategy
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._stored: dict[int, tuple[keras.Variable, tf.Variable]] = {}
        self._under_way: deque[tuple[Any, Callable[[Any], dict[str, Any]]]] = deque()
        self._logs: dict[str, Any] = {}
        self._has_logs = False
        self._pushed = False
        self.steps = 0

    def stored(self, variables: Sequence[keras.Variable]) -> list[tf.Variable]:
        """The parameter servers' copies of variables."""
        for variable in variables:
            if id(variable) not in self._stored:
                # In its scope variables go to the parameter servers in turn.
                with self._strategy.scope():
                    copy = tf.Variable(tf.convert_to_tensor(variable), trainable=False)
                self._stored[id(variable)] = variable, copy
        return [self._stored[id(variable)][1] for variable in variables]

    def push(self) -> None:
        """Give the parameter servers the coordinator's values, before a step that needs them."""
        # From then on the servers have the newer values.
        if self.asynchronous and self._pushed:
            return
        self._pushed = True
        for variable, copy in self._stored.values():
            copy.assign(tf.convert_to_tensor(variable))

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
        if self.asynchronous and self._pushed:
            self._pushed = False
            for variable, copy in self._stored.values():
                variable.assign(copy.read_value())
        return self._logs

    def _finish_one(self) -> None:
        remote, done = self._under_way.popleft()
        self._logs, self._has_logs = done(remote.fetch()), True
