"""Training with parameter servers, which hold values, and workers, which compute.

In a synchronous step the workers compute the stages for their shares:

    chief      rows ──> stage 0 ──────────────────> sum ──> what is the same for ──> ...
                             │                       ↑      all rows, such as the update
    workers                  └──> stage 0 of each ───┘
                                        ↑
    servers                      values of variables

The chief handles the workers' shares like micro-batches; see `stages`. An asynchronous worker
computes a whole step while others compute theirs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.keras_internals import cluster_internals, variable_internals
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.training.exchange.exchange import Exchange
from keras_multigpu.training.exchange.stage import Stage
from keras_multigpu.training.exchange.sums import Sums
from keras_multigpu.training.replica_group import Copies, copies_of
from keras_multigpu.training.runners.elsewhere import PROBES, Elsewhere
from keras_multigpu.training.runners.replica_runner import ReplicaRunner
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.runners.whole_step import WholeStep
from keras_multigpu.training.shares import Rows, present_leaves
from keras_multigpu.training.steps.one_device import known_variables
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.steps.passes import split
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.results import ReplicaResult, after
from keras_multigpu.training.steps.traced_step import TracedStep
from keras_multigpu.training.variables.placement import optimizers_of

# Asynchronous steps scheduled for each worker: one runs while the next one waits.
AHEAD = 2
WORKERS_WAIT = (
    "Workers sum values in the middle of this model's step, as BatchNormalization needs: whatever "
    "they need after that travels to the chief and back."
)
PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


class Servers(Elsewhere):
    """The workers and parameter servers of one model."""

    def __init__(self, strategy: tf.distribute.Strategy, asynchronous: bool) -> None:
        workers = cluster_internals.workers_of_servers(strategy)
        super().__init__(strategy, "workers of parameter servers", workers, asynchronous)
        self.asynchronous = asynchronous
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._under_way: deque[tuple[Any, Callable[[Any], dict[str, Any]]]] = deque()
        self._logs: dict[str, Any] = {}
        self._has_logs = False
        self.steps = 0

    def make_runner(self, request: StepRequest) -> Runner:
        if not self.asynchronous:
            return served_step(request, self)
        if request.probes:
            raise self.refusal(PROBES, "Leave `asynchronous` out")
        return AsynchronousStep(request, self)

    def results(self, function: Any, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        """Let the workers call a function with each list of arguments, and return the results."""
        remote = [self._coordinator.schedule(function, args=each) for each in arguments]
        self._coordinator.join()
        return [value.get() for value in remote]

    def schedule(
        self, function: Any, arguments: Sequence[Any], done: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Schedule a function for the next free worker; the logs of the last finished step.

        Args:
            done: Turns the function's result into logs.
        """
        self.steps += 1
        remote = self._coordinator.schedule(function, args=arguments)
        self._under_way.append((remote, done))
        # Wait for the first step of an epoch, because callbacks expect logs.
        if len(self._under_way) > AHEAD * self.workers or not self._has_logs:
            self._finish_one()
        return self._logs

    def settle(self) -> dict[str, Any]:
        """Wait for all scheduled steps, and copy the servers' values to the model."""
        while self._under_way:
            self._finish_one()
        self._has_logs = False
        self.copy_back()
        return self._logs

    def _finish_one(self) -> None:
        remote, done = self._under_way.popleft()
        self._logs, self._has_logs = done(remote.get()), True


def served_step(request: StepRequest, servers: Servers) -> ReplicaRunner | WholeStep:
    """What runs a synchronous training step, whose stages the workers compute."""
    # A whole batch would run on the chief, so a single worker gets it in two parts.
    pieces = request.pieces * max(servers.workers, 2)
    traced = TracedStep(request)
    reason = None
    if what := bound_to_this_process(traced.whole, traced.copies):
        reason, pieces = CannotSplit(f"workers do not have {what}"), 1
        request.warn_of_one_replica(reason)
    step = split(traced, 1, pieces, reason)
    if step.local is None:
        return WholeStep(request, step)
    if step.pieces_wait:
        request.warn(WORKERS_WAIT)
    return ReplicaRunner(step, ServedStages(step, servers), servers.copy_there)


class ServedStages:
    """Runs the stages of a step on the workers."""

    def __init__(self, step: PartitionedStep, servers: Servers) -> None:
        self._servers = servers
        self._functions: dict[Stage, Any] = {}
        stored = servers.copies([copies[0] for copies in step.traced.copies])
        self._stored = dict(zip(step.names_of_values, stored, strict=True))

    def __call__(self, stage: Stage, known: list[dict[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Run a stage on the workers, each for its share; see `Stage.run`."""
        if not stage.of_piece or not stage.operations:
            return stage.run(known)
        if stage not in self._functions:
            self._functions[stage] = self._reading(stage)
        sent = [name for name in stage.inputs if name not in self._stored]
        given = [[each[name] for name in sent] for each in known]
        found = self._servers.results(self._functions[stage], given)
        names = [tensor.name for tensor in stage.outputs]
        for each, tensors in zip(known, found, strict=True):
            each |= dict(zip(names, tensors, strict=True))
        return {name: tf.add_n([each[name] for each in known]) for name in stage.summands}

    def _reading(self, stage: Stage) -> Any:
        """The stage as a function of what the chief sends; it reads the rest from the servers."""
        specs = [
            tf.TensorSpec(tensor.shape, tensor.dtype)
            for name, tensor in stage.inputs.items()
            if name not in self._stored
        ]

        def function(*sent: tf.Tensor) -> Any:
            rest = iter(sent)
            return stage.call(
                *(
                    self._stored[name].read_value() if name in self._stored else next(rest)
                    for name in stage.inputs
                )
            )

        return tf.function(function, autograph=False, input_signature=specs)


def bound_to_this_process(whole: Any, known: Sequence[Copies]) -> str | None:
    """Something that a graph uses and other processes lack, such as a look-up table, or None."""
    variables = {id(copies[0].handle) for copies in known}
    for tensor in whole.captured_inputs:
        if tensor.dtype in (tf.resource, tf.variant) and id(tensor) not in variables:
            return "its table for look-ups"
    functions = whole.graph.as_graph_def().library.function
    kinds = {node.op for function in functions for node in function.node_def}
    kinds |= {operation.type for operation in whole.graph.get_operations()}
    return "the Python functions that it calls" if kinds & PYTHON else None


class AsynchronousStep(Runner):
    """An asynchronous training step, which adds its changes to the servers' values.

    If it assigned its new values, it would undo the updates of others.
    """

    step: PartitionedStep

    def __init__(self, request: StepRequest, servers: Servers) -> None:
        self.step = step = split(TracedStep(request), 1, request.pieces)
        what = bound_to_this_process(step.traced.whole, step.traced.copies)
        if step.local is None:
            what = what or f"what cannot be handed on ({step.unsplit_because})"
        if what:
            raise servers.refusal(f"a step that needs {what}", "Leave `asynchronous` out")
        self._group = request.group
        self._servers = servers
        self._stored = servers.copies([copies[0] for copies in step.traced.copies])
        places = {id(copies[0]): place for place, copies in enumerate(step.traced.copies)}

        def places_of(variables: Sequence[keras.Variable]) -> set[int]:
            return {places[i] for v in variables if (i := id(copies_of(v)[0])) in places}

        known = known_variables(request.model)
        self._seeds = places_of([v for v in known if variable_internals.is_seed_state(v)])
        # If two workers add their halving of a loss scale, nothing is left of it.
        self._scales = places_of(
            [
                variable
                for optimizer in optimizers_of(request.model)
                if isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
                for variable in (optimizer.dynamic_scale, optimizer.step_counter)
            ]
        )
        numbers = [tf.TensorSpec((), tf.int32)] * 2
        self._function = tf.function(
            self._on_worker, autograph=False, input_signature=[*numbers, *step.inputs.specs]
        )

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Train on one batch; the results are those of an earlier batch."""
        self._servers.copy_there()
        (rows,) = shares
        data = tf.nest.flatten(present_leaves(rows.data), expand_composites=True)
        numbers = tf.constant(self._servers.steps), rows.global_batch_size
        return self._servers.schedule(
            self._function, (*numbers, *data), self.step.traced.with_structure
        )

    def _on_worker(self, step: tf.Tensor, size: tf.Tensor, *data: tf.Tensor) -> list[Any]:
        """Run the step, add its changes to the servers' values, and return its results."""
        values = [copy.read_value() for copy in self._stored]
        for place in self._seeds:
            # Concurrent steps start from the same state, but must draw different numbers.
            seed, count = tf.unstack(values[place])
            values[place] = tf.stack([seed + tf.cast(step, seed.dtype), count])
        rows = Rows(None, size, size)
        arguments = self.step.arguments(0, rows, tf.zeros_like(size), data, values)
        (pieces,) = self.step.local([arguments], Sums(Exchange([""])))
        result = ReplicaResult(pieces)
        with after([result]):
            for place, new in zip(self.step.assigned, result.pieces[0].new, strict=True):
                copy = self._stored[place]
                adds_up = copy.dtype.is_floating or copy.dtype.is_integer
                if adds_up and place not in self._scales:
                    copy.assign_add(new - values[place])
                else:
                    copy.assign(new)
        return self.step.joined(self._group, [result])
