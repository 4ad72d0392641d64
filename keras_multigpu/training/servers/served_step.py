"""A training step whose stages are computed by workers that wait for each other.

    chief      rows ──> stage 0 ──────────────────> sum ──> what is the same for all ──> ...
                             │                       ↑      rows: the update, say
    workers                  └──> stage 0 of each ───┘
                                        ↑
    servers                      values of variables

To the chief the workers' shares are pieces of its own one; see `stages`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.partition.planner import CannotSplit
from keras_multigpu.training.exchange.stages import Part
from keras_multigpu.training.replica_group import Copies
from keras_multigpu.training.servers.parameter_servers import Servers
from keras_multigpu.training.shares import Batch
from keras_multigpu.training.steps.setting import Setting
from keras_multigpu.training.steps.split_step import OfReplica
from keras_multigpu.training.steps.split_train_step import SplitTrainStep

PYTHON = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


class ServedTrainStep(SplitTrainStep):
    """A training step on workers that a coordinator schedules.

    Args:
        model: The model, whose variables are on the host.
        setting: Its only replica, with the probes.
        spec: The specs of a global batch.
        function: The model's step.
        servers: The workers, and the servers that hold the values.
    """

    def __init__(
        self,
        model: keras.Model,
        setting: Setting,
        spec: Batch,
        function: Callable[[Any], Any],
        servers: Servers,
    ) -> None:
        # Of what is not cut nothing is a worker's, so a single one takes two parts.
        self._servers, self._workers = servers, max(servers.workers, 2)
        self._functions: dict[Part, Any] = {}
        super().__init__(model, setting, spec, function)
        stored = servers.copies([copies[0] for copies in self._copies])
        # The chief trains alone with what cannot be split at all.
        names = self._names_of_values if self._unsplit is None else []
        self._stored = dict(zip(names, stored, strict=bool(names)))

    def _split(self, replicas: int) -> None:
        if self._pieces > 1 and (what := bound_to_this_process(self._whole, self._copies)):
            raise CannotSplit(f"workers do not have {what}")
        super()._split(replicas)

    def _said_of_waiting_pieces(self) -> str:
        return (
            "Workers sum values in the middle of this model's step, as BatchNormalization needs: "
            "whatever they need after that travels to the chief and back."
        )

    def _results(self, shares: Any) -> list[OfReplica]:
        self._servers.push()
        return super()._results(shares)

    def _run_in_pieces(self, pieces: list[Any]) -> list[Any]:
        found: list[Any] = self._local.in_pieces(pieces, self._on_workers)
        return found

    def _on_workers(self, part: Part, known: list[dict[str, tf.Tensor]]) -> dict[str, tf.Tensor]:
        """Let workers run a part of the step, each for its share; see `Part.run`."""
        if not part.of_piece or not part.operations:
            return part.run(known)
        if part not in self._functions:
            self._functions[part] = self._reading(part)
        sent = [name for name in part.inputs if name not in self._stored]
        given = [[each[name] for name in sent] for each in known]
        found = self._servers.results(self._functions[part], given)
        names = [tensor.name for tensor in part.outputs]
        for each, tensors in zip(known, found, strict=True):
            each |= dict(zip(names, tensors, strict=True))
        return {name: tf.add_n([each[name] for each in known]) for name in part.summands}

    def _reading(self, part: Part) -> Any:
        """A function of what the chief sends, which reads what the servers hold."""
        specs = [
            tf.TensorSpec(tensor.shape, tensor.dtype)
            for name, tensor in part.inputs.items()
            if name not in self._stored
        ]

        def function(*sent: tf.Tensor) -> Any:
            rest = iter(sent)
            return part.call(
                *(
                    self._stored[name].read_value() if name in self._stored else next(rest)
                    for name in part.inputs
                )
            )

        return tf.function(function, autograph=False, input_signature=specs)


def bound_to_this_process(whole: Any, known: Sequence[Copies]) -> str | None:
    """What a graph uses besides variables that no other process has, if there is anything."""
    variables = {id(copies[0].handle) for copies in known}
    for tensor in whole.captured_inputs:
        if tensor.dtype in (tf.resource, tf.variant) and id(tensor) not in variables:
            return "its table for look-ups"
    functions = whole.graph.as_graph_def().library.function
    kinds = {node.op for function in functions for node in function.node_def}
    kinds |= {operation.type for operation in whole.graph.get_operations()}
    return "the Python functions that it calls" if kinds & PYTHON else None
