"""The door to TensorFlow's graphs: functions, reads of variables, the scope of a strategy."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_library
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.grappler.cluster import Cluster
from tensorflow.python.ops import control_flow_ops, control_flow_util_v2, handle_data_util


@contextlib.contextmanager
def single_device() -> Iterator[None]:
    """Make Keras and TensorFlow see one device although a strategy is in scope."""
    # TensorFlow has no public way to leave a strategy's scope.
    graph = tf.compat.v1.get_default_graph()
    # Keras divides losses by `tf.distribute.get_strategy().num_replicas_in_sync`. The forward pass
    # and the metrics of this package follow one device's arithmetic, so that division must not
    # happen, and variables made here are ordinary ones.
    saved = graph._distribution_strategy_stack, graph._variable_creator_stack
    graph._distribution_strategy_stack, graph._variable_creator_stack = [], []
    try:
        yield
    finally:
        graph._distribution_strategy_stack, graph._variable_creator_stack = saved


@contextlib.contextmanager
def written_for_xla() -> Iterator[None]:
    """Let operations be made as in a `tf.function` with `jit_compile=True`."""
    # There it is around the whole function, which then is always compiled.
    context_of_xla = control_flow_ops.XLAControlFlowContext()
    context_of_xla.Enter()
    try:
        yield
    finally:
        context_of_xla.Exit()


def add_function(definition: Any) -> None:
    """Let TensorFlow know a function by its definition, a `FunctionDef`."""
    # The public ways to it, `tf.function` and `wrap_function`, make every operation anew in Python,
    # which takes seconds for a large model.
    context.context().add_function_def(definition)


def call_function(name: str, inputs: list[tf.Tensor], outputs: int) -> list[tf.Tensor]:
    """The results of a function that TensorFlow knows by its name, called without a graph."""
    # `PartitionedCall` takes no integers on GPUs outside of a graph.
    made = context.context().call_function(name.encode(), inputs, outputs)
    return list(made) if outputs else []


def remove_function(name: str) -> None:
    """Let TensorFlow forget a function."""
    context.context().remove_function(name)


def called_graph(op: tf.Operation, name: str, shapes: list[tf.TensorShape]) -> Any:
    """The graph of a function that an operation calls, with inputs of these shapes."""
    # The graph as Python traced it: one that is made from the function's definition has lost what
    # resources and lists hold, and with it the shapes of whatever is read from them.
    return control_flow_util_v2.get_func_graph(op, shapes, name)


def is_function(op: tf.Operation) -> bool:
    """Whether an operation's type is the name of a function, which it calls."""
    # TensorFlow's own CTC loss consists of such; nothing public distinguishes them from others.
    graph = op.graph
    while graph is not None and not hasattr(tf.raw_ops, op.type):
        if graph._get_function(op.type) is not None:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def held_shape(handle: tf.Tensor) -> list[int | None] | None:
    """The shape of the variable that a handle refers to; None if unknown."""
    # The handle's own shape says nothing, and no public function gives the variable's.
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    shape = tf.TensorShape(data.shape_and_type[0].shape)
    return None if shape.rank is None else shape.as_list()


def optimized_functions(functions: list[Any], graph: Any) -> list[Any]:
    """Functions without what TensorFlow's optimizer finds superfluous.

    Args:
        functions: Their definitions.
        graph: A `GraphDef` with the functions that these call.
    """
    # TensorFlow does that by itself, but to a graph in which each call is replaced by what it
    # calls, so for every replica anew. There is no public way to the optimizer.
    rewriting = config_pb2.ConfigProto()
    options = rewriting.graph_options.rewrite_options
    options.meta_optimizer_iterations = options.ONE
    options.memory_optimization = options.NO_MEM_OPT
    # It would make functions of its own of the branches of conditions.
    options.disable_tfg_optimizer = True
    # What depends on a device, as the layout of images, is left to TensorFlow.
    for left in (
        "layout_optimizer",
        "remapping",
        "function_optimization",
        "loop_optimization",
        "implementation_selector",
    ):
        setattr(options, left, options.OFF)
    whole = meta_graph_pb2.MetaGraphDef()
    library = whole.graph_def.library
    library.CopyFrom(graph.library)
    library.function.extend(functions)
    # The optimizer keeps what this collection names, and what that needs.
    kept = whole.collection_def["train_op"].node_list.value
    for function in functions:
        name = function.signature.name
        kept.append(f"call_{name}")
        inputs = function.signature.input_arg
        for place, argument in enumerate(inputs):
            node = whole.graph_def.node.add(name=f"{name}_{place}", op="Placeholder")
            node.attr["dtype"].type = argument.type
            node.attr["shape"].shape.unknown_rank = True
        call = whole.graph_def.node.add(name=kept[-1], op="StatefulPartitionedCall")
        call.input.extend(f"{name}_{place}" for place in range(len(inputs)))
        call.attr["f"].func.name = name
        call.attr["Tin"].list.type.extend(argument.type for argument in inputs)
        call.attr["Tout"].list.type.extend(each.type for each in function.signature.output_arg)
    device = device_properties_pb2.NamedDevice(name="/job:localhost/replica:0/task:0/device:CPU:0")
    device.properties.type = "CPU"
    try:
        optimized = tf_optimizer.OptimizeGraph(rewriting, whole, cluster=Cluster(devices=[device]))
    except (ValueError, tf.errors.OpError):
        # TensorFlow, too, runs a graph that its optimizer cannot handle.
        return functions
    known = {function.signature.name: function for function in optimized.library.function}
    if not known.keys() <= {function.signature.name for function in library.function}:
        # They may call what TensorFlow has made now, which would not be found.
        return functions
    return [known[function.signature.name] for function in functions]


def read_together(variables: list[tf.Variable]) -> list[tf.Tensor]:
    """The values of variables of one device, by a single operation of a graph."""
    graph = tf.compat.v1.get_default_graph()
    for variable in variables:
        graph.watch_variable(variable)
    # A step on 8 replicas of a MobileNet reads 4,600 variables; two operations for each of them, as
    # the public way takes, are half of its graph.
    values: list[tf.Tensor] = op_def_library.apply_op(
        "_ReadVariablesOp",
        name="read",
        resources=[variable.handle for variable in variables],
        dtypes=[variable.dtype for variable in variables],
    )
    for variable, value in zip(variables, values, strict=True):
        value.set_shape(variable.shape)
    return values


def barrier_for_xla(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """The same tensors, which XLA computes nothing of before all of them are there."""
    # It looks through `IdentityN`; nothing public stops it from merging what is alike.
    return list(gen_xla_ops.xla_optimization_barrier(input=tensors))
