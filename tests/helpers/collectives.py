"""What a compiled step exchanges over TensorFlow's collectives, read from its graph."""

from typing import Any, NamedTuple

import tensorflow as tf

from keras_multigpu.training.replication import replication_of

# What TensorFlow gives NCCL on GPUs, by `kValidDataTypes` in its nccl_manager.cc; not int32, which
# TensorFlow keeps on the host.
CARRIED = {tf.float16, tf.float32, tf.float64, tf.int64}


class Collective(NamedTuple):
    """One collective of one replica."""

    operation: tf.Operation
    kind: str
    dtype: tf.DType
    shape: tuple[int | None, ...]

    @property
    def form(self) -> tuple[Any, ...]:
        """What has to be the same on all replicas."""
        return self.kind, self.dtype, self.shape


def graph_of_step(model: Any) -> Any:
    """The graph that all replicas run in a training step, of its first form of batch."""
    functions = replication_of(model).steps_of("train")[0]
    return next(iter(functions._made.values())).graph.graph


def collectives_in(graph: Any) -> dict[str, list[Collective]]:
    """The collectives of each device in the order in which they run."""
    found: dict[str, list[Collective]] = {}
    for operation in graph.get_operations():
        if operation.type.startswith("Collective"):
            tensor = operation.inputs[0]
            shape = tuple(tensor.shape.as_list()) if tensor.shape.rank is not None else (None,)
            one = Collective(operation, operation.type, tensor.dtype, shape)
            found.setdefault(operation.device, []).append(one)
    return found


def collectives_in_branches(graph: Any) -> dict[str, dict[str, list[Any]]]:
    """The type and dtype of each collective of each device, by the branch of a condition."""
    found: dict[str, dict[str, list[Any]]] = {}
    for function in graph.as_graph_def().library.function:
        for node in function.node_def:
            if node.op.startswith("Collective"):
                on_devices = found.setdefault(function.signature.name, {})
                on_devices.setdefault(node.device, []).append((node.op, node.attr["T"].type))
    return found
