"""What is exchanged around a step is still what Keras and TensorFlow call by these names."""

import keras
import pytest
import tensorflow as tf

from keras_multigpu.keras_internals import step_hooks


def test_functions_are_exchanged_for_a_while():
    """`keras.ops.mean` and `sum` still call `tf.reduce_mean` and `tf.reduce_sum` by these names."""
    called = []

    def noting(original, *args, **kwargs):
        called.append((original.__name__, step_hooks.called_by_library()))
        return original(*args, **kwargs)

    exchanges = [(step_hooks.MEANS, noting), (step_hooks.SUMS, noting)]
    with step_hooks.exchanged(exchanges), step_hooks.exchanged(exchanges):
        keras.ops.mean(tf.ones(2))
        keras.ops.sum(tf.ones(2))
        keras.metrics.Mean().update_state(tf.ones(2))
    assert called[:2] == [("reduce_mean", False), ("reduce_sum", False)]
    assert len(called) > 2 and {by_library for _, by_library in called[2:]} == {True}
    tf.reduce_mean(tf.ones(2))
    assert called[-1][1] is True


@pytest.mark.parametrize("eager", [True, False])
def test_functions_with_a_gradient_are_called_in_one_place(eager):
    """What is added to a list among their arguments while they run, is an input with a gradient."""

    def with_weight(original, function, args, kwargs):
        def more(weights, *own):
            weights.append(weight_of[0])
            result, _ = function(*own)
            return result * weights[0], lambda arriving: [7.0 * arriving, 11.0 * arriving]

        return original(more, ([], *args), kwargs)

    @tf.custom_gradient
    def same(x):
        return x, lambda arriving: arriving

    weight_of = []

    def gradients():
        x, weight = tf.constant(5.0), tf.constant(3.0)
        weight_of[:] = [weight]
        with step_hooks.exchanged([(step_hooks.CUSTOM_GRADIENTS, with_weight)]):
            with tf.GradientTape() as tape:
                tape.watch([x, weight])
                y = same(x)
            return y, *tape.gradient(y, [weight, x])

    found = gradients() if eager else tf.function(gradients)()
    assert [float(each) for each in found] == [15.0, 7.0, 11.0]


def test_calls_of_layers_are_noticed():
    """Keras still keeps the outermost call under `current_call_ctx`."""
    seen = []
    layer = keras.layers.Lambda(lambda x: seen.append(step_hooks.inside_a_layer()) or x)
    layer(tf.ones(2))
    assert seen == [True] and not step_hooks.inside_a_layer()


def test_loss_objects_are_called_in_one_method():
    """The classes of `keras.losses` still share `Loss.__call__`."""
    classes = [c for c in vars(keras.losses).values() if isinstance(c, type)]
    assert len(classes) > 20
    assert {c.__call__ for c in classes} == {keras.losses.Loss.__call__}


def test_assignments_of_variables_are_noticed():
    """Every `tf.Variable` is still assigned by these methods."""
    seen = []

    def noting(original, self, *args, **kwargs):
        seen.append(self)
        return original(self, *args, **kwargs)

    variable = tf.Variable([1.0])
    with step_hooks.exchanged([(step_hooks.ASSIGNMENTS, noting)]):
        variable.assign_add([1.0])
        variable.scatter_add(tf.IndexedSlices([1.0], [0]))
    variable.assign([0.0])
    assert len(seen) == 2 and all(each is variable for each in seen)


def test_operations_that_run_eagerly_are_noted():
    """TensorFlow still tells callbacks the kind, the inputs and the outputs of each operation."""
    noted = []
    one = tf.constant(1.0)
    with step_hooks.noted_operations(lambda *operation: noted.append(operation)):
        two = one + one
        tf.function(lambda: one * one)()
    one * two
    (kind, inputs, attributes, (output,)), *_ = noted
    assert (kind, output is two, inputs[0] is one) == ("AddV2", True, True)
    assert "T" in attributes
    assert "Mul" not in [kind for kind, *_ in noted]


def test_operations_of_one_graph_are_noted():
    """TensorFlow tells callbacks of a graph's operations as well, with the graph."""
    noted = []

    @tf.function
    def twice(x):
        with step_hooks.noted_operations(lambda *operation: noted.append(operation), x.graph):
            y = tf.reduce_sum(x, keepdims=True)
            tf.function(lambda: x * x)()
        return y

    twice.get_concrete_function(tf.TensorSpec([2]))
    kinds = [kind for kind, *_ in noted]
    ((_, inputs, attributes, _),) = [operation for operation in noted if operation[0] == "Sum"]
    assert "Mul" not in kinds and inputs[0].name == "x:0"
    assert attributes[attributes.index("keep_dims") + 1].b


def test_operations_that_are_noted_return_what_they_would():
    """A list where there are several outputs, which Keras's recurrent layers reverse in place."""

    @tf.function
    def last(x):
        with step_hooks.noted_operations(lambda *operation: None, x.graph):
            rows = tf.unstack(x)
            rows.reverse()
        return rows[0]

    assert last(tf.constant([1.0, 2.0])) == 2


def test_calls_of_functions_are_noted_and_can_be_looked_into():
    """A graph still gets such calls in `make_call_op_in_graph`, and knows its functions."""
    kinds = []

    def look(kind, inputs, attributes, outputs):
        kinds.extend((kind, len(body.inputs)) for body in step_hooks.bodies(kind, outputs[0]))

    inner = tf.function(lambda x: x + 1)

    def outer(x):
        with step_hooks.noted_operations(look, x.graph):
            tf.cond(x > 0, lambda: inner(x), lambda: x)
            tf.while_loop(lambda y: y < 3, lambda y: (y + x,), [x])
            return inner(x)

    tf.function(outer, autograph=False).get_concrete_function(tf.TensorSpec(()))
    assert [kind.replace("Stateless", "") for kind, _ in kinds] == ["If", "If", "While"] + [
        "PartitionedCall"
    ]


def test_operations_tell_who_made_them():
    """A graph's operations still have the lines of Python that made them."""

    def made(function):
        spec = tf.TensorSpec((2,))
        return tf.function(function, autograph=False).get_concrete_function(spec).graph

    own, keras_own = (
        made(function).get_operations()[1] for function in (lambda x: -x, keras.layers.ReLU())
    )
    assert step_hooks.user_line(own).startswith("test_step_hooks.py:")
    assert step_hooks.user_line(keras_own) is None


def test_a_caller_reads_variables_for_a_graph():
    """TensorFlow's graphs still take values when they are called, and variables are read so."""
    variable, table = tf.Variable(2.0), tf.Variable([[1.0], [5.0]])

    def read():
        with step_hooks.variables_read_outside():
            rows = tf.nn.embedding_lookup(table, [1]) + tf.gather_nd(table, [[0]])
            return variable * variable.read_value() + tf.squeeze(rows)

    graph = tf.function(read, autograph=False).get_concrete_function()
    assert not any(tensor.dtype == tf.resource for tensor in graph.captured_inputs)
    variable.assign(3.0)
    assert float(graph()) == 15
