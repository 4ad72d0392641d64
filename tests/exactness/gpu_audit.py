"""Tells from the graph of a training step what GPUs would do with it, without a GPU.

TensorFlow registers the kernels of GPUs on every machine, and says of each which tensors it takes
and gives in the host's memory. So of a step that has run on logical CPU devices one can tell for
each operation whether a GPU has a kernel for it, and which tensors a GPU would have to copy to the
host, which waits for everything that the GPU was told to do before.

    CPU:0    the host
    CPU:1    stands for GPU:0, where TensorFlow places what has no device
    CPU:2    stands for GPU:1
"""

import collections
import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import tensorflow as tf
from tensorflow.python.eager import context  # noqa: TID251 (which graphs run)
from tensorflow.python.framework import kernels, op_def_registry  # noqa: TID251 (what runs them)

from keras_multigpu.training.feed import cutter
from keras_multigpu.training.steps import passes

HOST = "CPU:0"
FIRST, SECOND = DEVICES = ("CPU:1", "CPU:2")
# With these TensorFlow puts several operations into one of which only CPUs have a kernel.
FOR_CPUS = ("remapping", "layout_optimizer", "arithmetic_optimization")
INT32 = tf.int32.as_datatype_enum


class Audit(NamedTuple):
    """What a step would do on GPUs.

    Attributes:
        without_kernel: The operations for which a GPU has no kernel, with their types.
        on_host: Those that the step itself has placed on the host.
        trips: The tensors that go from a GPU to the host, by who makes and who takes them.
        whole_numbers: The variables of int32, which TensorFlow keeps on the host, and XLA refuses.
    """

    without_kernel: collections.Counter[str]
    on_host: collections.Counter[str]
    trips: collections.Counter[str]
    whole_numbers: collections.Counter[str]


@contextlib.contextmanager
def as_on_gpus() -> Iterator[None]:
    """Let the package take all devices but the host for GPUs; TensorFlow optimizes its graphs."""
    before = tf.config.optimizer.get_experimental_options()
    names = ("disable_meta_optimizer", *FOR_CPUS)
    tf.config.optimizer.set_experimental_options(dict.fromkeys(names, False))
    try:
        with pytest.MonkeyPatch.context() as patch, tf.device(FIRST):
            for module in (cutter, passes):
                patch.setattr(module, "has_own_memory", lambda device: not device.endswith(HOST))
            yield
    finally:
        kept = {name: before.get(name, name in FOR_CPUS) for name in names}
        tf.config.optimizer.set_experimental_options(kept)


def audit(train: Callable[[], Any], reads_on_host: bool = False) -> Audit:
    """What the largest graph that runs in a training would do on GPUs.

    Args:
        train: Trains.
        reads_on_host: Whether its batches come to the host, as in plain Keras.
    """
    here = context.context()
    here.enable_graph_collection()
    here.enable_run_metadata()
    try:
        train()
        found = here.export_run_metadata().function_graphs
    finally:
        here.disable_run_metadata()
        here.disable_graph_collection()
    graph = max((each.post_optimization_graph for each in found), key=weight)
    for node in graph.node:
        if reads_on_host and node.op.startswith("IteratorGetNext"):
            node.device = f"/device:{HOST}"
    return audited(graph)


def weight(graph: Any) -> tuple[int, int]:
    """On how many devices a graph has more than a few operations, and how many it has in all."""
    numbers = collections.Counter(node.device for node in graph.node)
    return sum(number > 20 for number in numbers.values()), len(graph.node)


def audited(graph: Any) -> Audit:
    """What a graph would do, whose operations are placed."""
    nodes = {node.name: node for node in graph.node}
    without, on_host, whole_numbers = (collections.Counter[str]() for _ in range(3))
    trips: dict[str, str] = {}
    for node in graph.node:
        if gpu_kernel(node) is None:
            found = on_host if is_host(node) else without
            found[f"{node.op} of {', '.join(types_of(node))}"] += 1
        if node.op in ("ReadVariableOp", "AssignVariableOp") and node.attr["dtype"].type == INT32:
            whole_numbers[node.name] += 1
        for number, tensor in enumerate(node.input):
            name, _, place = tensor.strip("^").partition(":")
            source = nodes[name]
            if tensor.startswith("^"):
                # The host waits: for that a GPU sends it a tensor without entries.
                goes = is_host(node) and not is_host(source) and not is_returned(node)
            else:
                # Constants are on both sides.
                goes = source.op != "Const" and is_on_host(node, number, "input_arg")
                goes = goes and not is_on_host(source, int(place or 0), "output_arg")
            if goes:
                kind = "before" if tensor.startswith("^") else "->"
                trips[tensor] = f"{source.op} {kind} {node.op}"
    return Audit(without, on_host, collections.Counter(trips.values()), whole_numbers)


def is_host(node: Any) -> bool:
    return bool(node.device.endswith(HOST))


def is_returned(node: Any) -> bool:
    """Whether a node only marks the end of the graph."""
    return node.op in ("NoOp", "_Retval")


def types_of(node: Any) -> list[str]:
    numbers = {value.type for value in node.attr.values() if value.type}
    return sorted(tf.as_dtype(number).name for number in numbers)


def is_on_host(node: Any, number: int, kind: str) -> bool:
    """Whether an operation takes ("input_arg") or gives a tensor in the host's memory."""
    kernel = None if is_host(node) else gpu_kernel(node)
    return kernel is None or arguments(node, kind)[number] in set(kernel.host_memory_arg)


def arguments(node: Any, kind: str) -> list[str]:
    """The names of an operation's inputs or outputs, one for each tensor."""
    found = []
    for argument in getattr(op_def_registry.get(node.op), kind):
        count = 1
        if argument.number_attr:
            count = node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        found += [argument.name] * count
    return found


@functools.cache
def gpu_kernels(kind: str) -> list[Any]:
    found = kernels.get_registered_kernels_for_op(kind).kernel
    return [each for each in found if each.device_type in ("GPU", "DEFAULT")]


def gpu_kernel(node: Any) -> Any:
    """The kernel that a GPU has for an operation; None if it has none."""
    for kernel in gpu_kernels(node.op):
        if all(
            {*node.attr[each.name].list.type, node.attr[each.name].type} - {0}
            <= set(each.allowed_values.list.type)
            for each in kernel.constraint
        ):
            return kernel
    return None
