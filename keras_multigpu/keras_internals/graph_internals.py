"""TensorFlow's graphs: functions, reads of variables, the scope of a strategy."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_library, ops
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.grappler.cluster import Cluster
from tensorflow.python.ops import control_flow_ops, control_flow_util_v2, handle_data_util

from keras_multigpu.keras_internals.replacing import replaced

# What TensorFlow's optimizer need not do again.
DONE_BEFORE = ("constant_folding", "arithmetic_optimization", "shape_optimization")

WITHOUT_ORDER = {"_disable_acd": True}
"""Attributes of a `tf.function` without effects.

TensorFlow would look at each operation for the variables that it touches, which takes a third as
long as to copy it. It documents no attribute for that.
"""


@contextlib.contextmanager
def single_device() -> Iterator[None]:
    """Leave the scope of a strategy, so that Keras and TensorFlow see a single device."""
    # TensorFlow has no public way to do so. Inside the scope Keras would divide losses by
    # `num_replicas_in_sync`, and variables would be distributed.
    graph = tf.compat.v1.get_default_graph()
    with (
        replaced(graph, "_distribution_strategy_stack", []),
        replaced(graph, "_variable_creator_stack", []),
    ):
        yield


@contextlib.contextmanager
def written_for_xla() -> Iterator[None]:
    """Make operations as in a `tf.function` with `jit_compile=True`."""
    # That argument would always compile the whole function.
    context_of_xla = control_flow_ops.XLAControlFlowContext()
    context_of_xla.Enter()
    try:
        yield
    finally:
        context_of_xla.Exit()


def seed_of_tensorflow() -> int | None:
    """The seed of `tf.random.set_seed`; None if there is none."""
    # The public `get_seed` also draws the seed of an operation, and so moves the user's generator.
    seed: int | None = context.global_seed()
    return seed


def add_function(definition: Any) -> None:
    """Register a function by its definition, a `FunctionDef`."""
    # The public ways, `tf.function` and `wrap_function`, make each operation again in Python, which
    # takes seconds for a large model.
    context.context().add_function_def(definition)


def call_function(name: str, inputs: list[tf.Tensor], outputs: int) -> list[tf.Tensor]:
    """Call a registered function without a graph."""
    # Outside a graph, `PartitionedCall` takes no integers on GPUs.
    made = context.context().call_function(name.encode(), inputs, outputs)
    return list(made) if outputs else []


def unoptimized() -> contextlib.AbstractContextManager[None]:
    """Let this thread run graphs as they are: TensorFlow's optimizer takes longer than one run."""
    return _optimizing(without_optimizer)


def optimized_before() -> contextlib.AbstractContextManager[None]:
    """Let this thread run graphs whose parts `optimized_functions` has optimized.

    TensorFlow's optimizer would run all its passes twice over all replicas. With them MobileNetV2
    took 4.6 s of a first step of 18 s on two replicas, with these few 1.3 s.
    """
    return _optimizing(without_repetition)


def _optimizing(
    derive: Callable[[Any, bytes], Any],
) -> contextlib.AbstractContextManager[None]:
    # The public switches are those of the whole process, where other threads may compile steps.
    own = context.context()
    before = own.function_call_options
    options = derive(before.executor_type, before.config_proto_serialized)
    return replaced(own, "function_call_options", options)


@functools.lru_cache
def without_optimizer(executor: Any, serialized: bytes) -> Any:
    config = config_pb2.ConfigProto.FromString(serialized)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return context.FunctionCallOptions(executor, config)


@functools.lru_cache
def without_repetition(executor: Any, serialized: bytes) -> Any:
    config = config_pb2.ConfigProto.FromString(serialized)
    # The pass for layouts looks at every operation, and leaves those of CPUs as they are.
    idle = () if tf.config.list_physical_devices("GPU") else ("layout_optimizer",)
    optimize_once(config, *DONE_BEFORE, *idle)
    return context.FunctionCallOptions(executor, config)


def optimize_once(config: Any, *without: str) -> None:
    """Let TensorFlow's optimizer run its passes once, without some of them."""
    options = config.graph_options.rewrite_options
    options.meta_optimizer_iterations = options.ONE
    options.memory_optimization = options.NO_MEM_OPT
    # It would turn branches of conditions into new functions.
    options.disable_tfg_optimizer = True
    for name in without:
        setattr(options, name, options.OFF)


def remove_function(name: str) -> None:
    """Unregister a function."""
    context.context().remove_function(name)


def called_graph(op: tf.Operation, name: str, shapes: list[tf.TensorShape]) -> Any:
    """The graph of a function that an operation calls, with inputs of these shapes."""
    # As Python traced it: a graph made from the function's definition has lost the contents of
    # resources and lists, and with them the shapes of what is read from there.
    return control_flow_util_v2.get_func_graph(op, shapes, name)


def is_function(op: tf.Operation) -> bool:
    """Whether an operation calls a function that its type names, as in TensorFlow's CTC loss."""
    graph = op.graph
    while graph is not None and not hasattr(tf.raw_ops, op.type):
        if graph._get_function(op.type) is not None:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def held_shape(handle: tf.Tensor) -> list[int | None] | None:
    """The shape of the variable that a handle refers to; None if unknown."""
    # The handle itself is a scalar.
    data = handle_data_util.get_resource_handle_data(handle)
    if data is None or not data.is_set or len(data.shape_and_type) != 1:
        return None
    shape = tf.TensorShape(data.shape_and_type[0].shape)
    return None if shape.rank is None else shape.as_list()


def held_dtype(handle: tf.Tensor) -> tf.DType:
    """The dtype of the variable that a handle refers to."""
    data = handle_data_util.get_resource_handle_data(handle)
    return tf.as_dtype(data.shape_and_type[0].dtype)


def optimized_functions(functions: list[Any], graph: Any) -> list[Any]:
    """Functions, each optimized once by TensorFlow's graph optimizer.

    TensorFlow itself would first inline every call, and optimize the result for each replica.
    `graph` has the functions that these call.
    """
    rewriting = config_pb2.ConfigProto()
    # Leave to TensorFlow whatever depends on a device, as the layout of images does. On a virtual
    # GPU its own pass makes of the stages what it makes of plain Keras's step: NCHW, and
    # convolutions fused with bias and ReLU.
    optimize_once(
        rewriting,
        "layout_optimizer",
        "remapping",
        "function_optimization",
        "loop_optimization",
        "implementation_selector",
    )
    whole = meta_graph_pb2.MetaGraphDef()
    library = whole.graph_def.library
    library.CopyFrom(graph.library)
    library.function.extend(functions)
    # The optimizer keeps the nodes in this collection and whatever they need.
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
        # TensorFlow, too, runs a graph unoptimized if its optimizer fails.
        return functions
    known = {function.signature.name: function for function in optimized.library.function}
    if not known.keys() <= {function.signature.name for function in library.function}:
        # They may call functions that the optimizer has made, which would not be found.
        return functions
    return [known[function.signature.name] for function in functions]


def copy_operation(op: tf.Operation, inputs: Sequence[Any]) -> list[tf.Tensor]:
    """Add an operation of another graph to the default graph, with these inputs."""
    # The public `create_op` takes five times as long, half of it for a deprecated argument that
    # nobody passes, and keeps a call stack: this one's, where messages name the user's line.
    graph, node = tf.compat.v1.get_default_graph(), op.node_def
    given = [graph.capture(tf.convert_to_tensor(tensor)) for tensor in inputs]
    node.name, node.device = graph.unique_name(op.name), ""
    # Attributes with an underscore belong to the other graph: its devices, its call stack.
    for name in [name for name in node.attr if name.startswith("_")]:
        del node.attr[name]
    waits = graph._control_dependencies_for_inputs({tensor.op for tensor in given})
    made = ops._create_c_op(graph, node, given, waits, op.op_def, extract_traceback=False)
    return list(graph._create_op_from_tf_operation(made).outputs)


def read_together(variables: list[tf.Variable]) -> list[tf.Tensor]:
    """Read variables of one device by a single operation of a graph."""
    graph = tf.compat.v1.get_default_graph()
    for variable in variables:
        graph.watch_variable(variable)
    # A step of a MobileNet on 8 replicas reads 4,600 variables. Publicly each read is two
    # operations, which would be half of the graph.
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
    """The same tensors, behind a barrier that keeps XLA from merging equal computations."""
    # XLA looks through `IdentityN`.
    return list(gen_xla_ops.xla_optimization_barrier(input=tensors))
