"""What workers exchange in a step: counted in its graph, while it is traced."""

from typing import Any

import tensorflow as tf

from keras_multigpu.callbacks.timing import StepProbe
from keras_multigpu.devices import short_name
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.steps.probes import StepView


class ExchangeProbe(StepProbe):
    """A `StepProbe` that also counts the exchanges of the step, without that of the probe itself.

    Attributes:
        exchanges: How many the last graph has, and the bytes that a replica gives to them, None
            if not known before a step runs; None without a graph, or with one worker.
    """

    exchanges: list[int | None] | None = None

    def build(self, strategy: tf.distribute.Strategy) -> None:
        super().build(strategy)
        self._is_spread = ReplicaGroup(strategy).is_spread

    def on_replica(self, view: StepView) -> list[tf.Tensor]:
        if self._is_spread and not tf.executing_eagerly():
            device = short_name(tf.zeros(()).device)
            self.exchanges = exchanges_in(tf.compat.v1.get_default_graph(), device)
        return super().on_replica(view)


def exchanges_in(graph: Any, device: str) -> list[int | None] | None:
    """How many exchanges begin on a device, and their bytes, see `ExchangeProbe`."""
    sizes = []
    for operation in graph.get_operations():
        if operation.type.startswith("Collective") and short_name(operation.device) == device:
            given = operation.inputs[0]
            elements = given.shape.num_elements()
            sizes.append(None if elements is None else elements * given.dtype.size)
    whole = None if None in sizes else sum(size for size in sizes if size is not None)
    return [len(sizes), whole] if sizes else None
