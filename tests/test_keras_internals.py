"""Each private name of Keras and TensorFlow still means what this package relies on.

When one of these fails after an upgrade, the sentence in its docstring says what has
changed; `keras_multigpu/keras_internals` is the only folder to mend.
"""

import functools
import inspect
import random

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_multigpu.keras_internals import (
    cluster_internals,
    compile_internals,
    dataset_internals,
    graph_internals,
    model_internals,
    optimizer_internals,
    step_hooks,
    variable_internals,
)
from keras_multigpu.keras_internals.versions import minor, newer_than_tested


def compiled_model(**options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.compile(**{"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **options})
    return model


def test_the_wiring_of_a_functional_model_is_known_by_numbers():
    """Keras still keeps it in `_inbound_nodes`, and where a tensor comes from."""
    x = keras.Input((3,))
    first, second = keras.layers.Dense(3), keras.layers.Dense(3)
    first(keras.Input((3,)))  # Of no concern to the model.
    model = keras.Model(x, first(x) + second(first(x)))
    operations, *ends = model_internals.wiring(model)
    assert operations[:3] == [
        [None, ((), {})],
        [None, (([0, 0, 0],), {}), (([0, 0, 0],), {})],
        [None, (([1, 1, 0],), {})],
    ]
    assert type(operations[3][0]).__name__ == "Add"
    assert operations[3][1] == (([1, 0, 0], [2, 0, 0]), {})
    assert ends == [[[0, 0, 0]], [[3, 0, 0]]]
    assert model_internals.wiring(keras.Sequential([keras.layers.Dense(1)])) == []


def test_how_a_dataset_shuffles_can_be_told():
    """TensorFlow still keeps the seeds of a shuffle, and whether it shuffles anew."""
    seeded = tf.data.Dataset.range(9).shuffle(9, seed=5).batch(2)
    _, _, (batch, (kind, seeds, size), source) = dataset_internals.recipe(seeded)
    assert (batch, kind, seeds[1], size) == (["_BatchDataset"], "_ShuffleDataset", 5, 9)
    assert source == ["_RangeDataset"]
    tf.random.set_seed(None)
    _, _, (step, _) = dataset_internals.recipe(tf.data.Dataset.range(9).shuffle(9))
    assert step[:2] == dataset_internals.UNSEEDED
    once = tf.data.Dataset.range(9).shuffle(9, reshuffle_each_iteration=False)
    kept = seeded.cache()
    assert [dataset_internals.reshuffles(each) for each in (seeded, once, kept)] == [1, 0, 0]
    assert [dataset_internals.caches(each) for each in (seeded, kept.take(1))] == [0, 1]


def test_metrics_get_what_belongs_to_them_from_keras():
    """Keras still keeps compiled metrics in `_flat_metrics`, one entry for each output."""
    model = compiled_model(weighted_metrics=["mse"])
    data = tf.ones((2, 2)), tf.zeros((2, 2)), tf.ones(2)
    compile_internals.build_metrics(model, None, *data, call=lambda f, *args: f(*args))
    model.reset_metrics()
    seen = []
    compile_internals.update_metrics(model, lambda *given: seen.append(given), *data)
    assert [(metric.name, len(given)) for metric, *given in seen] == [("mae", 2), ("mse", 3)]
    assert [m.name for m in compile_internals.compiled_metrics(model)] == ["mae", "mse"]
    assert float(model.get_metrics_result()["mae"]) == 0.0


def test_fit_says_where_it_calls_evaluate():
    """Then Keras takes the batches that `fit` has prepared."""
    said = []

    class Evaluates(keras.Sequential):
        def evaluate(self, *args, **kwargs):
            said.append(kwargs[model_internals.VALIDATES])
            return {}

    model = Evaluates([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((2, 1))
    model.fit(x, x, validation_data=(x, x), verbose=0)
    assert said == [True]


def test_layers_get_back_what_they_held():
    """A layer still has its losses in `_losses`, which is emptied when it is called anew."""

    class Adds(keras.layers.Layer):
        def call(self, x):
            self.kept = x
            self.add_loss(keras.ops.sum(x))
            return x

    model = keras.Sequential([Adds()])
    model(tf.ones((1, 1)))
    losses, kept = model.losses, model.layers[0].kept
    with model_internals.kept_by_layers(model):
        model(tf.zeros((1, 1)))
        assert model.losses[0] is not losses[0]
    assert model.losses[0] is losses[0] and model.layers[0].kept is kept


def test_a_strategy_can_be_left_for_a_while():
    """TensorFlow still keeps open strategies in `_distribution_strategy_stack`."""
    strategy = tf.distribute.OneDeviceStrategy("CPU:1")
    with strategy.scope():
        assert tf.distribute.get_strategy() is strategy
        with graph_internals.single_device():
            assert not tf.distribute.has_strategy()
        assert tf.distribute.get_strategy() is strategy


def test_a_variable_can_change_its_storage():
    """A Keras variable still keeps its value in `_value` and reads it from there."""
    variable = keras.Variable(np.zeros(2, "float32"))
    variable_internals.set_storages([variable], [tf.Variable([1.0, 2.0])])
    np.testing.assert_array_equal(variable.numpy(), [1, 2])
    variable.assign([3.0, 4.0])
    np.testing.assert_array_equal(variable_internals.variable_storage(variable).numpy(), [3, 4])


def test_an_optimizer_outside_a_strategy_updates_all_copies():
    """TensorFlow still asks a variable for its own copy where no strategy's optimizer runs."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        storage = tf.Variable([1.0, 2.0])
    variable_internals.updated_by_others(storage)
    tf.distribute.get_strategy().extended.update(
        storage, lambda variable: variable.assign_sub(variable * 0.5), group=False
    )
    for copy in storage.values:
        np.testing.assert_array_equal(copy, [0.5, 1])


def test_a_made_class_has_the_public_name_of_its_original():
    """Keras still keeps public names of classes in `REGISTERED_OBJS_TO_NAMES`."""
    made = type("Sequential", (keras.Sequential,), {})
    model_internals.register_like(made, keras.Sequential)
    assert keras.saving.serialize_keras_object(made())["module"] == "keras"


def test_seeds_are_found():
    """Layers still list their seed generators, and unseeded draws share one state."""
    model = compiled_model()
    (state,) = variable_internals.seed_states(model)
    assert state is model.layers[-1].seed_generator.state
    before = variable_internals.global_seed_state().numpy()
    keras.random.normal((1,))
    assert not np.array_equal(before, variable_internals.global_seed_state().numpy())


def test_states_of_seed_generators_are_known_by_their_name():
    """A seed generator still names its state so."""
    assert variable_internals.is_seed_state(keras.random.SeedGenerator(1).state)
    assert not variable_internals.is_seed_state(keras.Variable(0.0))


def test_metrics_given_to_compile_are_found_before_they_are_used():
    """`compile` still keeps metric objects in `_user_metrics` and `_user_weighted_metrics`."""
    given = [keras.metrics.MeanIoU(2), keras.metrics.Mean()]
    model = compiled_model(metrics=["mae", given[0]], weighted_metrics=[[given[1]]])
    assert compile_internals.given_metrics(model) == given
    assert compile_internals.given_metrics(compiled_model(metrics=None)) == []


def test_the_present_stateless_scope_is_found():
    """The innermost one, None outside of any."""
    assert model_internals.stateless_scope() is None
    with keras.StatelessScope() as scope:
        assert model_internals.stateless_scope() is scope


def with_seed(seed):
    """Begin again. Keras 3.10 keeps its global generator when it is given another seed."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)


def test_the_global_seed_is_drawn_when_it_is_first_used():
    """Keras still makes its global generator late, with a seed of Python's random numbers."""
    found = []
    for early in (False, True):
        with_seed(3)
        if early:
            variable_internals.global_seed_state()
        first = random.random()
        found.append([first, keras.random.normal((2,)).numpy().tolist(), random.random()])
    assert found[0][0] == found[1][0] and found[0][2] == found[1][2]
    with_seed(3)
    expected = keras.random.normal((2,)).numpy()
    with_seed(3)
    variable_internals.global_seed_state()
    np.testing.assert_array_equal(keras.random.normal((2,)), expected)


def test_functions_run_on_shapes_of_every_kind():
    """`compute_output_spec` still makes placeholders of dense and sparse shapes, not of ragged."""
    specs = [
        keras.KerasTensor((None, 3)),
        keras.KerasTensor((None, 3), sparse=True),
        tf.RaggedTensorSpec([None, None], tf.int32),
    ]
    kinds = []
    result = model_internals.symbolic_call(
        lambda *given: kinds.extend(type(one).__name__ for one in given) or given[0] * 2.0, *specs
    )
    assert result.shape == (None, 3)
    assert kinds[1:] == ["SparseTensor", "RaggedTensor"]


def test_compiled_parts_are_found():
    """`compile` still keeps losses, metrics and the running mean under the same names."""
    model = compiled_model()
    model.evaluate(np.zeros((2, 3)), np.zeros((2, 2)), verbose=0)
    assert compile_internals.loss_tracker(model).name == "loss"
    assert compile_internals.owned_metrics(model) == []
    compile_internals.compile_loss(model)(tf.zeros((2, 2)), tf.zeros((2, 2)))
    (loss,) = compile_internals.losses_of(model)
    assert loss.name == "mse"
    with compile_internals.losses_exchanged(model, [lambda *data: tf.constant(7.0)]):
        compiled = compile_internals.compile_loss(model)
        assert float(compiled(tf.ones((2, 2)), tf.zeros((2, 2)))) == 7.0
    assert compile_internals.losses_of(model) == [loss]


def test_losses_can_be_reported_in_a_stateless_scope():
    """`model.losses` still lists the tensors of the scope that carry the model's mark."""
    model = compiled_model()
    with keras.StatelessScope(collect_losses=True):
        model_internals.tracked_losses(model, [tf.constant(4.0)])
        assert [float(loss) for loss in model.losses] == [4.0]


def test_masks_and_logits_travel_with_tensors():
    """Keras still attaches a mask, and the logits behind a softmax, to tensors."""
    probabilities = keras.activations.softmax(tf.constant([[1.0, 2.0]]))
    mask, logits = model_internals.attached([probabilities])
    assert mask is None and logits.numpy().tolist() == [[1, 2]]
    copy = tf.identity(probabilities)
    assert model_internals.attached([copy]) == [None, None]
    model_internals.attach([copy], [tf.constant([True]), logits])
    mask, logits = model_internals.attached([copy])
    assert mask.numpy().tolist() == [True] and logits.numpy().tolist() == [[1, 2]]


# Before Keras 3.13 Muon fails on TensorFlow.
@pytest.mark.parametrize(
    "name",
    ["SGD", "Adam", "Nadam", "Lamb", *(["Muon"] if minor(keras.version()) >= (3, 13) else [])],
)
def test_an_optimizer_can_be_a_pure_function(name):
    """`apply` inside a stateless scope yields what it would have assigned."""
    trained, pure = (keras.Variable(np.ones((2, 2), "float32"), name="kernel") for _ in range(2))
    gradient = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    ordinary = getattr(keras.optimizers, name)(learning_rate=0.1)
    ordinary.build([trained])
    ordinary.apply([gradient], [trained])
    functional = getattr(keras.optimizers, name)(learning_rate=0.1)
    functional.build([pure])
    optimizer_internals.remember_variables([functional])
    values = [(v, tf.convert_to_tensor(v)) for v in [pure, *functional.variables]]
    with keras.StatelessScope(values) as scope:
        optimizer_internals.apply_functionally(functional, [gradient], [pure])
    np.testing.assert_array_equal(pure.numpy(), np.ones((2, 2)))
    np.testing.assert_allclose(scope.get_current_value(pure), trained.numpy(), rtol=1e-6)
    assert type(functional).__name__ == name and functional.iterations.numpy() == 0


def test_weight_decay_exclusions_survive():
    """An optimizer still notes excluded variables by their key."""
    first, second = (keras.Variable(np.ones(2, "float32"), name=name) for name in "ab")
    optimizer = keras.optimizers.AdamW(learning_rate=0.1, weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_list=[first])
    optimizer.build([first, second])
    optimizer_internals.remember_variables([optimizer])
    values = [(v, tf.convert_to_tensor(v)) for v in [first, second, *optimizer.variables]]
    with keras.StatelessScope(values) as scope:
        zeros = [tf.zeros(2), tf.zeros(2)]
        optimizer_internals.apply_functionally(optimizer, zeros, [first, second])
    np.testing.assert_allclose(scope.get_current_value(first), [1, 1])
    np.testing.assert_allclose(scope.get_current_value(second), [0.95, 0.95])


def test_an_optimizer_says_what_its_rate_comes_from():
    """`_learning_rate` is still the variable or the schedule, `_iterations` counts all steps."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
    assert optimizer_internals.compiled_rate(keras.optimizers.SGD(schedule)) is schedule
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
    rate = optimizer_internals.compiled_rate(optimizer)
    assert isinstance(rate, keras.Variable) and rate is optimizer.learning_rate
    variable = keras.Variable(np.ones(2, "float32"))
    optimizer.apply([tf.ones(2)], [variable])
    assert int(optimizer_internals.step_counter(optimizer)) == 1
    assert int(optimizer.iterations) == 0


def test_optimizers_can_be_built_for_variables_of_any_strategy():
    """Keras still checks where variables were made in `add_variable_from_reference`."""
    strategy = tf.distribute.MirroredStrategy(
        ["CPU:0", "CPU:1"], cross_device_ops=tf.distribute.ReductionToOneDevice()
    )
    variable = keras.Variable(np.ones(2, "float32"))
    with strategy.scope():
        refused, optimizer = (keras.optimizers.SGD(momentum=0.9) for _ in range(2))
    with pytest.raises(RuntimeError, match="inside"):
        refused.build([variable])
    with optimizer_internals.variables_anywhere():
        optimizer.build([variable])
    assert len(optimizer.variables) == 3


def test_batch_norm_takes_its_moments_in_one_method():
    """`BatchNormalization._moments(inputs, mask)` still returns mean and variance."""
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    mean, variance = model_internals.batch_norm_moments(
        layer, tf.constant([[1.0, 2.0], [3.0, 6.0]]), None
    )
    np.testing.assert_allclose(mean, [2, 4])
    np.testing.assert_allclose(variance, [1, 4])


def test_batch_norm_takes_its_moments_from_a_function():
    """`BatchNormalization` still asks `_moments` for what it normalises with."""
    layer = keras.layers.BatchNormalization(epsilon=0.0)
    model_internals.take_moments(
        layer, lambda inputs, mask: (tf.constant([1.0]), tf.constant([4.0]))
    )
    np.testing.assert_allclose(layer(tf.constant([[1.0], [5.0]]), training=True), [[0], [2]])


def test_data_adapters():
    """Keras still turns arrays into a dataset of global batches."""
    adapter = dataset_internals.data_adapter(x=np.zeros((5, 2)), y=np.zeros(5), batch_size=2)
    assert adapter.num_batches == 3
    assert [len(x) for x, _ in adapter.get_tf_dataset()] == [2, 2, 1]
    (x, _, _), (x_val, _, _) = dataset_internals.split_validation((np.arange(4), None, None), 0.25)
    assert x.tolist() == [0, 1, 2] and x_val.tolist() == [3]
    weights = dataset_internals.class_weights_of_labels(np.array([0, 1, 1]), {0: 2.0, 1: 3.0})
    assert weights.tolist() == [2, 3, 3]


@pytest.mark.parametrize(
    ("change", "batched", "size", "count"),
    [
        (lambda d: d, False, None, None),
        (lambda d: d.shuffle(3).cache().take(5), False, None, None),
        (lambda d: d.batch(4), True, 4, 10),
        (lambda d: d.batch(4, num_parallel_calls=2), True, 4, 10),
        (lambda d: d.padded_batch(4), True, 4, 10),
        (lambda d: d.ragged_batch(4), True, 4, 10),
        (lambda d: d.batch(5, drop_remainder=True), True, 5, 10),
        # Two examples are lost: their number is not the number that went in.
        (lambda d: d.batch(4, drop_remainder=True), True, 4, None),
        (lambda d: d.batch(4).map(lambda x: x).prefetch(1), True, 4, 10),
        (lambda d: d.batch(4).map(lambda x: x, num_parallel_calls=2).shuffle(2), True, 4, 10),
        (lambda d: d.batch(4).with_options(tf.data.Options()).cache(), True, 4, 10),
        (lambda d: d.batch(4).apply(tf.data.experimental.assert_cardinality(3)), True, 4, 10),
        (lambda d: d.batch(4).take(1), True, 4, None),
        (lambda d: d.batch(4).skip(1).repeat().shard(2, 0), True, 4, None),
        (lambda d: d.batch(4).filter(lambda x: True).ignore_errors(), True, 4, None),
        (lambda d: d.batch(4).concatenate(d.batch(4)), True, None, None),
        (lambda d: d.rebatch(4), True, None, None),
        (lambda d: d.batch(4).unbatch(), False, None, None),
        (lambda d: tf.data.Dataset.zip(d.batch(4), d.batch(4)), True, None, None),
        (lambda d: tf.data.Dataset.zip(d.batch(4), d), None, None, None),
        (lambda d: d.flat_map(tf.data.Dataset.from_tensors), None, None, None),
    ],
)
def test_datasets_tell_how_they_were_made(change, batched, size, count):
    """Datasets are still named after what made them, and keep `_inputs()` and `_batch_size`."""
    dataset = change(tf.data.Dataset.from_tensor_slices(np.zeros((10, 3))))
    assert dataset_internals.gives_batches(dataset) is batched
    assert dataset_internals.batching_of(dataset) == (size, count)


@pytest.mark.parametrize(
    "dataset",
    [
        tf.data.Dataset.range(3),
        tf.data.TFRecordDataset(["file"]),
        tf.data.TextLineDataset(["file"]),
        tf.data.FixedLengthRecordDataset(["file"], 4),
    ],
)
def test_datasets_of_single_examples(dataset):
    """Datasets that read files or count are still known by their names."""
    assert dataset_internals.gives_batches(dataset) is False


def test_compile_still_tells_what_it_was_given_and_makes_metrics_of_names():
    """`_compile_config` keeps the arguments as they came; `get_metric` looks at the shapes."""
    loss = keras.losses.MeanSquaredError()
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile("sgd", loss, loss_weights=[2.0])
    arguments = compile_internals.compile_arguments(model)
    assert arguments["loss"] is loss
    assert arguments["loss_weights"] == [2.0]
    labels, scores = tf.zeros((4,), tf.int32), tf.zeros((4, 3))
    metric = compile_internals.compiled_metric("accuracy", labels, scores)
    assert isinstance(metric, keras.metrics.SparseCategoricalAccuracy)
    assert metric.name == "accuracy"
    metric = compile_internals.compiled_metric("accuracy", tf.zeros((4, 1)), tf.zeros((4, 1)))
    assert isinstance(metric, keras.metrics.BinaryAccuracy)


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


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have a `quantize` method")
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
def test_it_is_told_that_a_model_was_quantized():
    """Where Keras drops the functions of its loops."""
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    told = []
    model_internals.after_quantizing(model, lambda: told.append(model.layers[0].quantization_mode))
    model.quantize("int8")
    assert told == ["int8"]


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
    assert step_hooks.user_line(own).startswith("test_keras_internals.py:")
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


def test_newer_versions_than_tested_are_told():
    """A version is compared by its first two numbers, as numbers."""
    assert newer_than_tested({"Keras": "3.9.2", "TensorFlow": "2.21.7"}) == ""
    text = newer_than_tested({"Keras": "3.100.0", "TensorFlow": "2.21.0"})
    assert text.startswith("Keras 3.100.0 (tested up to 3.15): newer than this package knows.")
    assert "TensorFlow" in newer_than_tested({"Keras": "3.15.1", "TensorFlow": "3.0.0rc1"})


def test_tensorflow_takes_a_function_by_its_definition_and_forgets_it():
    """Its context still has `add_function_def` and `remove_function`."""
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


def test_tensorflow_optimizes_functions():
    """Its optimizer still takes a library, and leaves what is stateful, or called."""
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
    assert operations.count("Exp") == 1, "of two"
    assert {"AssignAddVariableOp", "StatelessIf"} <= set(operations)
    assert smaller.signature == whole.function_def.signature
    known = {function.signature.name for function in whole.graph.as_graph_def().library.function}
    (branching,) = [node for node in smaller.node_def if node.op == "StatelessIf"]
    assert {branching.attr[name].func.name for name in ("then_branch", "else_branch")} <= known


def test_functions_that_the_optimizer_does_not_take_stay_as_they_are():
    """One that calls a function which nobody knows."""
    whole = tf.function(lambda x: x, autograph=False).get_concrete_function(tf.TensorSpec(()))
    broken = type(whole.function_def).FromString(whole.function_def.SerializeToString())
    broken.node_def.add(name="unknown", op="NoSuchOperation")
    assert graph_internals.optimized_functions([broken], tf.Graph().as_graph_def()) == [broken]


def test_variables_are_read_together():
    """`_ReadVariablesOp` still exists, and a graph still knows the variables that it has read."""
    variables = [tf.Variable(1.0), tf.Variable([2, 3]), tf.Variable(True)]
    graph = tf.function(
        lambda: graph_internals.read_together(variables), autograph=False
    ).get_concrete_function()
    assert [value.numpy().tolist() for value in graph()] == [1.0, [2, 3], True]
    assert [tensor.shape.rank for tensor in graph.outputs] == [0, 1, 0]
    types = [operation.type for operation in graph.graph.get_operations()]
    assert types.count("_ReadVariablesOp") == 1 and "ReadVariableOp" not in types
    assert {id(v) for v in graph.variables} == {id(v) for v in variables}


def test_elements_are_dealt_out_to_devices():
    """TensorFlow still has its iterator over several devices, with these arguments."""
    devices = ["/device:CPU:1", "/device:CPU:2"]
    data = tf.data.Dataset.range(4)
    found = list(dataset_internals.multi_device_iterator(data, devices, "/device:CPU:0", 2))
    assert [list(map(int, elements)) for elements in found] == [[0, 1], [2, 3]]
    assert [element.device[-5:] for element in found[0]] == ["CPU:1", "CPU:2"]


def test_arrays_can_be_shuffled_by_another_function():
    """Keras's adapter takes `tf.random.shuffle` by its public name while it makes the dataset."""
    with dataset_internals.shuffled_by(lambda values: tf.reverse(values, [0])):
        adapter = dataset_internals.data_adapter(np.arange(4), batch_size=4, shuffle=True)
        dataset = adapter.get_tf_dataset()
    (batch,) = tf.nest.flatten(next(iter(dataset)))
    assert batch.numpy().tolist() == [3, 2, 1, 0], "workers would shuffle apart"


def test_parameter_servers_know_their_workers():
    """`ParameterServerStrategy` counts them when it is made, and shows them nowhere."""
    strategy = object.__new__(tf.distribute.ParameterServerStrategy)
    strategy._num_workers = 3
    assert cluster_internals.workers_of_servers(strategy) == 3
    made = inspect.getsource(inspect.getmodule(tf.distribute.ParameterServerStrategy))
    assert "self._num_workers =" in made


def test_a_worker_may_have_several_cpus():
    """`MultiWorkerMirroredStrategy` asks this method for its devices, and has a service to set."""
    local_devices = cluster_internals.Extended._initialize_local_devices
    with cluster_internals.cpu_devices(2):
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}))
        devices, kind = cluster_internals.Extended._initialize_local_devices(None, resolver, "")
    assert (kind, list(devices)) == ("CPU", ["/device:CPU:0", "/device:CPU:1"])
    assert cluster_internals.Extended._initialize_local_devices is local_devices
    assert cluster_internals.has_started()
    for name in (
        "configure_coordination_service",
        "report_error_to_cluster",
        "set_config_key_value",
        "get_config_key_value",
    ):
        assert hasattr(cluster_internals.context.context(), name)
