"""Private names of TensorFlow that handle functions and their graphs."""

import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import tensorflow as tf

from keras_multigpu.keras_internals import graph_internals


def test_a_strategy_scope_can_be_suspended():
    """TensorFlow still keeps open strategies in `_distribution_strategy_stack`."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:1")
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        with graph_internals.single_device():
            assert not tf.distribute.has_strategy()
        assert tf.distribute.get_strategy() is strategy


def test_the_seed_of_tensorflow_is_known():
    """`context.global_seed` returns what `tf.random.set_seed` was given."""
    before = graph_internals.seed_of_tensorflow()
    tf.random.set_seed(5)
    assert graph_internals.seed_of_tensorflow() == 5
    tf.random.set_seed(before)


def test_functions_can_be_registered_and_removed():
    """TensorFlow's context still has `add_function_def` and `remove_function`."""
    double = tf.function(lambda x: 2.0 * x, autograph=False)
    definition = double.get_concrete_function(tf.TensorSpec(())).function_def
    copy = type(definition).FromString(definition.SerializeToString())
    copy.signature.name = "kmg_test_double"
    graph_internals.add_function(copy)
    call = functools.partial(tf.raw_ops.PartitionedCall, Tout=[tf.float32], f="kmg_test_double")
    assert float(tf.function(lambda: call(args=[3.0])[0], autograph=False)()) == 6.0
    graph_internals.remove_function("kmg_test_double")
    with pytest.raises(tf.errors.OpError):
        tf.function(lambda: call(args=[3.0])[0], autograph=False)()


def test_tensorflow_optimizes_the_functions_of_a_library():
    """The optimizer keeps stateful operations and calls."""
    count = tf.Variable(0.0)

    @tf.function(autograph=False)
    def function(x):
        count.assign_add(1.0)
        return tf.cond(x > 0.0, lambda: tf.exp(x), lambda: x) + (tf.exp(x) - tf.exp(x))

    whole = function.get_concrete_function(tf.TensorSpec(()))
    (smaller,) = graph_internals.optimized_functions(
        [whole.function_def], whole.graph.as_graph_def()
    )
    operations = [node.op for node in smaller.node_def]
    assert operations.count("Exp") == 1, "The two equal ones are not merged."
    assert {"AssignAddVariableOp", "StatelessIf"} <= set(operations)
    assert smaller.signature == whole.function_def.signature
    known = {function.signature.name for function in whole.graph.as_graph_def().library.function}
    (branching,) = [node for node in smaller.node_def if node.op == "StatelessIf"]
    assert {branching.attr[name].func.name for name in ("then_branch", "else_branch")} <= known


def test_a_function_that_the_optimizer_rejects_stays_unchanged():
    """Here because it has an unknown operation."""
    whole = tf.function(lambda x: x, autograph=False).get_concrete_function(tf.TensorSpec(()))
    broken = type(whole.function_def).FromString(whole.function_def.SerializeToString())
    broken.node_def.add(name="unknown", op="NoSuchOperation")
    assert graph_internals.optimized_functions([broken], tf.Graph().as_graph_def()) == [broken]


def test_a_function_without_effects_keeps_no_order():
    """TensorFlow still has the attribute `_disable_acd`."""

    def show(x):
        tf.print(x, output_stream="file:///dev/null")
        return x

    spec = tf.TensorSpec(())
    kept, free = (
        tf.function(show, experimental_attributes=each).get_concrete_function(spec).graph
        for each in ({}, graph_internals.WITHOUT_ORDER)
    )
    assert (len(kept.control_outputs), len(free.control_outputs)) == (1, 0)
    assert free.outputs[0] is free.inputs[0]


def test_an_operation_is_copied_from_another_graph():
    """With its attributes and its lists of inputs, inside what the default graph waits for."""
    spec = tf.TensorSpec([None, 2])
    whole = tf.function(lambda x: tf.concat([x, x], 1)).get_concrete_function(spec)
    (joined,) = [op for op in whole.graph.get_operations() if op.type == "ConcatV2"]

    def again(x):
        inputs = [x, tf.fill([3, 1], 2.0), tf.constant(1)]
        with tf.control_dependencies([tf.print(x, output_stream="file:///dev/null")]):
            return graph_internals.copy_operation(joined, inputs)[0]

    graph = tf.function(again, autograph=False).get_concrete_function(spec)
    assert graph(tf.ones([3, 2])).numpy().tolist() == [[1.0, 1.0, 2.0]] * 3
    (copy,) = [op for op in graph.graph.get_operations() if op.type == "ConcatV2"]
    assert [op.type for op in copy.control_inputs] == ["PrintV2"]
    assert copy.outputs[0].shape.as_list() == [3, 3]


def test_one_operation_reads_several_variables():
    """`_ReadVariablesOp` still exists, and a graph still lists the variables it read."""
    variables = [tf.Variable(1.0), tf.Variable([2, 3]), tf.Variable(True)]
    graph = tf.function(
        lambda: graph_internals.read_together(variables), autograph=False
    ).get_concrete_function()
    assert [value.numpy().tolist() for value in graph()] == [1.0, [2, 3], True]
    assert [tensor.shape.rank for tensor in graph.outputs] == [0, 1, 0]
    types = [operation.type for operation in graph.graph.get_operations()]
    assert types.count("_ReadVariablesOp") == 1 and "ReadVariableOp" not in types
    assert {id(v) for v in graph.variables} == {id(v) for v in variables}


def test_the_graph_of_a_called_function_is_found():
    """The body of a loop is the graph that Python traced, with its operations."""

    def double(x):
        return tf.while_loop(lambda n, y: n < 3, lambda n, y: (n + 1, y * 2.0), (0, x))[1]

    graph = tf.function(double).get_concrete_function(tf.TensorSpec([None])).graph
    (loop,) = [op for op in graph.get_operations() if "While" in op.type]
    shapes = [tf.TensorShape(shape) for shape in loop.get_attr("output_shapes")]
    body = graph_internals.called_graph(loop, loop.get_attr("body").name, shapes)
    assert "Mul" in {op.type for op in body.get_operations()}


def test_a_handle_shows_the_shape_of_its_variable():
    """Handles of other resources have none."""
    variable = tf.Variable(tf.zeros([2, 3]))
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    graph = tf.function(lambda: (variable + 1.0, table.size())).get_concrete_function().graph
    shapes = [graph_internals.held_shape(handle) for handle in graph.inputs]
    assert shapes == [[2, 3], None]


def test_an_operation_that_is_a_function_call_is_recognized():
    """TensorFlow's CTC loss calls functions in this old way: their name is the type."""
    lengths = tf.TensorSpec((2,), tf.int32)
    loss = tf.function(tf.nn.ctc_loss, autograph=False).get_concrete_function(
        tf.TensorSpec((2, 1), tf.int32), tf.TensorSpec((3, 2, 4)), lengths, lengths
    )
    loops = [op for op in loss.graph.get_operations() if "While" in op.type]
    bodies = [
        graph_internals.called_graph(
            loop, loop.get_attr("body").name, [tensor.shape for tensor in loop.inputs]
        )
        for loop in loops
    ]
    assert any(graph_internals.is_function(op) for body in bodies for op in body.get_operations())
    assert not any(graph_internals.is_function(op) for op in loops)


def test_xla_compiles_the_gradient_of_a_loop():
    """Although the number of rows is unknown when it is traced."""

    def double(step, found):
        return step + 1, found * found + found[:1]

    def slope(x):
        with graph_internals.written_for_xla(), tf.GradientTape() as tape:
            tape.watch(x)
            found = tf.while_loop(lambda n, _: n < 2, double, (0, x), maximum_iterations=2)[1]
            return tape.gradient(found, x)

    traced = tf.function(slope).get_concrete_function(tf.TensorSpec([None], tf.float32))
    compiled = tf.function(lambda x: traced(x), jit_compile=True)
    # At 1 the slope of x * x + x is 3 and its value 2; at 2 the slope is 5.
    assert compiled(tf.constant([1.0])) == [15.0]


def test_xla_has_a_barrier_that_returns_its_inputs():
    function = tf.function(graph_internals.barrier_for_xla, jit_compile=True)
    assert [float(each) for each in function([tf.constant(1.0), tf.constant(2.0)])] == [1.0, 2.0]


def test_one_thread_alone_runs_graphs_unoptimized():
    """TensorFlow's own switch is one of the process."""

    def off():
        options = graph_internals.context.context().function_call_options
        config = graph_internals.config_pb2.ConfigProto.FromString(options.config_proto_serialized)
        return config.graph_options.rewrite_options.disable_meta_optimizer

    before = tf.config.optimizer.get_experimental_options(), off()
    with ThreadPoolExecutor(1) as other:
        with graph_internals.unoptimized():
            assert off()
            assert other.submit(off).result() == before[1]
            assert tf.config.optimizer.get_experimental_options() == before[0]
            assert tf.function(lambda x: x + 1)(2.0) == 3
    assert off() == before[1]


def test_optimized_parts_are_optimized_as_a_whole_by_few_passes():
    """Switches of the user hold, too, and other threads see nothing."""

    def options():
        own = graph_internals.context.context().function_call_options
        config = graph_internals.config_pb2.ConfigProto.FromString(own.config_proto_serialized)
        return config.graph_options.rewrite_options

    before = options()
    with ThreadPoolExecutor(1) as other, graph_internals.optimized_before():
        assert options().meta_optimizer_iterations == before.ONE
        assert options().constant_folding == before.OFF
        assert options().disable_meta_optimizer == before.disable_meta_optimizer
        assert other.submit(options).result() == before
        assert tf.function(lambda x: x + 1)(2.0) == 3
    assert options() == before
