"""The workers that compute and the servers that hold values, as their coordinator sees them."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from keras_multigpu.keras_internals import cluster_internals, graph_internals
from keras_multigpu.training.servers.connection import Elsewhere

# Asynchronous steps scheduled for each worker: one runs, and the next is there when it
# ends.
AHEAD = 2


class Servers(Elsewhere):
    """The workers and parameter servers of one model; asynchronous ones do not wait."""

    def __init__(self, strategy: tf.distribute.Strategy, asynchronous: bool) -> None:
        workers = cluster_internals.workers_of_servers(strategy)
        super().__init__(strategy, "workers of parameter servers", workers, asynchronous)
        self.asynchronous = asynchronous
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._under_way: deque[tuple[Any, Callable[[Any], dict[str, Any]]]] = deque()
        self._logs: dict[str, Any] = {}
        self._has_logs = False
        self.steps = 0

    def results(self, function: Any, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """What a function returns for each list of arguments, computed by the workers."""
        # Called in a replica of the host.
        with graph_internals.single_device():
            remote = [self._coordinator.schedule(function, args=each) for each in arguments]
            self._coordinator.join()
            return [value.get() for value in remote]

    def schedule(
        self, function: Any, arguments: Sequence[Any], done: Callable[[Any], dict[str, Any]]
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
        self._logs, self._has_logs = done(remote.get()), True
