"""The only door to names that Keras and TensorFlow do not document.

Everything here was checked on Keras 3.10 to 3.15 with TensorFlow 2.19 to 2.21. Each entry
says why no public name will do; `tests/test_keras_internals.py` fails with a clear sentence
when a later version changes one of them.
"""

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export, backend
from keras.src.backend.common import global_state
from keras.src.losses.loss import squeeze_or_expand_to_same_rank
from keras.src.models.functional import Functional
from keras.src.random import seed_generator
from keras.src.saving import object_registration
from keras.src.trainers import data_adapters
from keras.src.trainers.data_adapters import array_slicing, data_adapter_utils
from keras.src.trainers.data_adapters.tf_dataset_adapter import make_class_weight_map_fn
from tensorflow.core.protobuf import config_pb2, device_properties_pb2, meta_graph_pb2
from tensorflow.python.eager import context
from tensorflow.python.framework import op_def_library
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.grappler.cluster import Cluster

NEWEST_TESTED = {"Keras": "3.15", "TensorFlow": "2.21"}
"""The newest versions that the tests have run on; the oldest are those of `pyproject.toml`."""


def newer_than_tested(installed: dict[str, str] | None = None) -> str:
    """A sentence for the log where an installed version is newer than the tested ones, else none.

    Args:
        installed: Versions by name; those that are imported if left out.
    """
    installed = installed or {"Keras": keras.version(), "TensorFlow": tf.__version__}
    newer = [
        f"{name} {version} (tested up to {NEWEST_TESTED[name]})"
        for name, version in installed.items()
        if minor(version) > minor(NEWEST_TESTED[name])
    ]
    if not newer:
        return ""
    return (
        f"{' and '.join(newer)}: newer than this package knows. `keras_multigpu.verify` tells "
        "whether the numbers are still those of one device."
    )


def minor(version: str) -> tuple[int, ...]:
    """The first two numbers of a version."""
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


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


def add_function(definition: Any) -> None:
    """Let TensorFlow know a function by its definition, a `FunctionDef`."""
    # The public ways to it, `tf.function` and `wrap_function`, make every operation anew in Python,
    # which takes seconds for a large model.
    context.context().add_function_def(definition)


def remove_function(name: str) -> None:
    """Let TensorFlow forget a function."""
    context.context().remove_function(name)


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
        # TensorFlow too goes on with a graph that its optimizer does not take.
        return functions
    known = {function.signature.name: function for function in optimized.library.function}
    if not known.keys() <= {function.signature.name for function in library.function}:
        # They may call what TensorFlow has made now, and nobody would find it.
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


# Variables. A `keras.Variable` owns one `tf.Variable`, its storage. Moving a model to a
# strategy means to exchange the storage; Keras offers that only at construction.


def variable_storage(variable: keras.Variable) -> Any:
    """The `tf.Variable` behind a Keras variable, None when not yet initialised."""
    return variable._value


def storages_of(variables: Sequence[keras.Variable]) -> list[Any]:
    return [variable._value for variable in variables]


def set_storages(variables: list[keras.Variable], storages: list[tf.Variable]) -> None:
    """Let each Keras variable keep its value in another `tf.Variable`."""
    for variable, storage in zip(variables, storages, strict=True):
        variable._value = storage


def make_usual(storages: list[tf.Variable]) -> None:
    """Let storages do what Keras and optimizers expect of any `tf.Variable`."""
    # They take `float()` and `int()` of a scalar. Keras offers both on its variables and hands them
    # on to the storage; TensorFlow's mirrored variables lack them, so that
    # `float(model.optimizer.learning_rate)` would fail.
    for storage in storages:
        for name, kind in (("__float__", float), ("__int__", int)):
            if not hasattr(type(storage), name):
                setattr(type(storage), name, lambda self, kind=kind: kind(self.numpy()))
        if isinstance(storage, tf.distribute.DistributedValues):
            updated_by_others(storage)


class EveryCopy:
    """A variable whose copies are read as one, and of which all are assigned to."""

    def __init__(self, copies: tuple[tf.Variable, ...]) -> None:
        self._copies = copies

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self._copies[0], dtype, name=name)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("assign", "scatter")):
            return getattr(self._copies[0], name)
        return lambda *args, **kwargs: [
            getattr(copy, name)(*args, **kwargs) for copy in self._copies
        ][0]


def updated_by_others(storage: tf.Variable) -> None:
    """Let optimizers that know nothing of the strategy update a variable."""
    # A plain model around a layer of a distributed one has such an optimizer. TensorFlow then asks
    # the variable for the copy of a replica whose number is the variable itself.
    one_copy = storage._get_replica
    every = EveryCopy(storage.values)
    storage._get_replica = lambda replica: (
        every if isinstance(replica, tf.distribute.DistributedValues) else one_copy(replica)
    )


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """The states of all seed generators in a model, each once."""
    states = {}
    for layer in layers_of(model):
        for generator in layer._seed_generators:
            states[id(generator.state)] = generator.state
    return list(states.values())


def is_seed_state(variable: keras.Variable) -> bool:
    """Whether a variable is the state of a seed generator, which nothing but its name tells."""
    return variable.name == "seed_generator_state"


GLOBAL_SEED_GENERATOR = "global_seed_generator"
"""Where Keras keeps the generator; Keras itself has a name for that since 3.13."""


def global_seed_state() -> keras.Variable:
    """The state that Keras's random functions use when they are given no seed."""
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    if generator is None:
        generator = UndrawnGenerator()
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    return generator.state


class UndrawnGenerator(keras.random.SeedGenerator):
    """Keras's global seed generator, there before it is needed."""

    def __init__(self) -> None:
        # Keras makes it when a random function is first called without a seed, and draws its seed
        # from Python's random numbers then. Here they move on at that moment too, and not before:
        # otherwise a model that is made after `fit` would start with other weights.
        before = random.getstate()
        # The seed that Keras would draw next; `next` draws it for good.
        super().__init__(seed_generator.make_default_seed(), name="global_seed_generator")
        random.setstate(before)
        self._is_drawn = False

    def next(self, ordered: bool = True) -> Any:
        if not self._is_drawn:
            seed_generator.make_default_seed()
            self._is_drawn = True
        return super().next(ordered)


# The model.

FunctionalModel = Functional
"""The class of functional models."""


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """The model and all layers inside it, however deep."""
    return list(model._flatten_layers())


@contextlib.contextmanager
def kept_by_layers(model: keras.Model) -> Iterator[None]:
    """Give layers back afterwards what they hold now of a call: losses, tensors in attributes."""
    held = []
    for layer in layers_of(model):
        attributes = vars(layer)
        for name, value in attributes.items():
            if isinstance(value, tf.Tensor):
                held.append((attributes, name, value))
            elif name == "_losses" or (
                isinstance(value, list) and any(isinstance(each, tf.Tensor) for each in value)
            ):
                held.append((attributes, name, value[:]))
    yield
    for attributes, name, value in held:
        if isinstance(value, list):
            attributes[name][:] = value  # Keras's own list, whose items it looks at.
        else:
            attributes[name] = value


def wiring(model: keras.Model) -> list[Any]:
    """The operations of a functional model, and what comes into each, by numbers.

    It is empty for other models.
    """
    # The public `get_config` has it by names, which Keras counts, and fails where a layer has no
    # config.
    operations = model.operations if isinstance(model, Functional) else []
    numbers = {id(operation): number for number, operation in enumerate(operations)}

    def place(tensor: Any) -> list[int]:
        operation, node, output = tensor._keras_history
        before = nodes_of(operation).index(operation._inbound_nodes[node])
        return [numbers[id(operation)], before, output]

    def nodes_of(operation: Any) -> list[Any]:
        # A layer that is used elsewhere, too, has more nodes.
        return [
            node
            for node in operation._inbound_nodes
            if all(id(tensor._keras_history.operation) in numbers for tensor in node.input_tensors)
        ]

    def of_node(node: Any) -> Any:
        arguments = node.arguments.args, node.arguments.kwargs
        return keras.tree.map_structure(
            lambda leaf: place(leaf) if isinstance(leaf, keras.KerasTensor) else leaf, arguments
        )

    # A layer says more about itself elsewhere.
    plain = [None if isinstance(each, keras.Layer) else each for each in operations]
    inner = [
        [operation, *map(of_node, nodes_of(each))]
        for operation, each in zip(plain, operations, strict=True)
    ]
    if not operations:
        return []
    return [inner, *([place(tensor) for tensor in ends] for ends in (model.inputs, model.outputs))]


def compile_loss(model: keras.Model) -> Any:
    """The object that `compile(loss=...)` made, None without a loss."""
    return model._compile_loss


def loss_tracker(model: keras.Model) -> Any:
    """The running mean that is logged as `loss`."""
    return model._loss_tracker


def compute_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, training: bool
) -> Any:
    """`model.compute_loss`, also where an override lacks the `training` argument."""
    return model._compute_loss(x, y, y_pred, sample_weight, training=training)


# What Keras's `fit` calls `evaluate` with, so that it takes the batches which `fit` has prepared.
# One that a user has written hands it on, and there is no public name for it.
VALIDATES = "_use_cached_eval_dataset"


def initial_epoch(model: keras.Model) -> int | None:
    """The epoch that `BackupAndRestore` wants training to go on with."""
    return model._initial_epoch


def called(model: keras.Model, x: Any, training: bool) -> Any:
    """`model(x)`, with the `training` argument where its `call` takes one."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def register_like(made: type, original: type) -> None:
    """Save objects of class `made` under the name that `original` has in Keras or is given."""
    for names in (object_registration.GLOBAL_CUSTOM_NAMES, api_export.REGISTERED_OBJS_TO_NAMES):
        if original in names:
            names[made] = names[original]


def own_training_state(model: keras.Model) -> None:
    """Let Keras's own methods take the model for one that lives on one device."""
    # Keras remembers the scope a model was made in and then avoids XLA and distributes data.
    model._distribute_strategy = None


def after_quantizing(model: keras.Model, act: Callable[[], None]) -> None:
    """Call `act` whenever `quantize` has changed the model's layers."""
    quantize = model.quantize

    @functools.wraps(quantize)
    def quantize_and_act(*args: Any, **kwargs: Any) -> None:
        quantize(*args, **kwargs)
        act()

    # Keras puts a `quantize` into each layer when it is made, so a later class cannot override it.
    vars(model)["quantize"] = quantize_and_act


def owned_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """Metrics that belong to the model or its layers and not to `compile`."""
    compiled = [model._loss_tracker, model._compile_metrics]
    compiled += model._compile_loss.metrics if model._compile_loss is not None else []
    known = {id(metric) for metric in compiled}
    return [metric for metric in model.metrics if id(metric) not in known]


def given_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metric objects given to `compile`, which Keras names only once they were used."""
    compiled = model._compile_metrics
    if compiled is None:
        return []
    given = keras.tree.flatten([compiled._user_metrics, compiled._user_weighted_metrics])
    return [metric for metric in given if isinstance(metric, keras.metrics.Metric)]


def losses_of(model: keras.Model) -> list[keras.losses.Loss]:
    return [entry.loss for entry in model._compile_loss._flat_losses]


@contextlib.contextmanager
def losses_exchanged(model: keras.Model, losses: list[Any]) -> Iterator[None]:
    """Let the compiled losses be others while the context lasts, in the order of `losses_of`."""
    # Keras matches losses with outputs, weights and nested structures in `CompileLoss`; exchanging
    # its list of losses keeps that logic in one place.
    compiled = model._compile_loss
    saved = compiled._flat_losses
    compiled._flat_losses = [
        entry._replace(loss=loss) for entry, loss in zip(saved, losses, strict=True)
    ]
    try:
        yield
    finally:
        compiled._flat_losses = saved


def flatten_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Logs as Keras returns them from `evaluate`: a number or a list in its order."""
    return model._flatten_metrics_in_order(logs)


def symbolic_call(function: Any, *arguments: Any) -> Any:
    """Run a function on shapes alone, which builds what is not built yet; what it would return.

    Args:
        function: The function.
        *arguments: Structures of `keras.KerasTensor`s; ragged ones as `tf.RaggedTensorSpec`s,
            which Keras hands to layers as if they were dense.
    """

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, tf.RaggedTensorSpec):
            return leaf
        inner = leaf.shape[leaf.ragged_rank + 1 :]
        return tf.compat.v1.ragged.placeholder(leaf.dtype, leaf.ragged_rank, inner)

    return backend.compute_output_spec(
        lambda *given: function(*keras.tree.map_structure(stand_in, given)), *arguments
    )


def real_call(function: Any, *arguments: Any) -> Any:
    """Run a function on tensors, which builds what is not built yet; nothing else is kept."""
    # For code that cannot run on shapes, because it reads the numbers.
    with keras.StatelessScope():
        return function(*arguments)


def build_model(model: keras.Model, batch: Any, call: Any = symbolic_call) -> None:
    """Build the model, its compiled losses and metrics.

    Args:
        model: The model.
        batch: `(x, y, sample_weight)`.
        call: `symbolic_call` where the batch is symbolic, `real_call` where it is tensors.
    """
    x, y, sample_weight = batch
    losses, metrics = model._compile_loss, model._compile_metrics
    if all(part is None or part.built for part in (*layers_of(model), losses, metrics)):
        return
    y_pred = call(lambda x: called(model, x, training=False), x)
    build_metrics(model, x, y, y_pred, sample_weight, call)
    if losses is not None and not losses.built:
        call(losses, y, y_pred, sample_weight)


def build_metrics(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, call: Any = symbolic_call
) -> None:
    """Create the variables of `compile(metrics=...)`; see `build_model`."""
    metrics = model._compile_metrics
    if metrics is not None and not metrics.built:
        call(model.compute_metrics, x, y, y_pred, sample_weight)


def update_metrics(
    model: keras.Model, update: Any, y: Any, y_pred: Any, sample_weight: Any
) -> None:
    """Call `update(metric, y_true, y_pred)` for every compiled metric, with what belongs to it.

    A weighted one gets its weights as well.
    """
    compiled = model._compile_metrics
    if compiled is None:
        return
    # Keras matches metrics with outputs and weights in `CompileMetrics`; giving it stand-ins for
    # its metrics keeps that logic in one place.
    names = "_flat_metrics", "_flat_weighted_metrics"
    saved = {name: getattr(compiled, name) for name in names}
    for name, entries in saved.items():
        # Not by setting an attribute, which Keras would track.
        vars(compiled)[name] = [entry and EachMetric(entry.metrics, update) for entry in entries]
    try:
        compiled.update_state(y, y_pred, sample_weight)
    finally:
        vars(compiled).update(saved)


class EachMetric:
    """Stands in for the metrics of one output, of which each is updated, see `update_metrics`."""

    def __init__(self, metrics: list[keras.metrics.Metric], update: Any) -> None:
        self._metrics = metrics
        self._update = update

    def update_state(self, *data: Any) -> None:
        """What Keras calls with the output's targets, predictions and perhaps weights."""
        for metric in self._metrics:
            self._update(metric, *data)


def has_metrics(model: keras.Model) -> bool:
    """Whether `compile` was given metrics."""
    return model._compile_metrics is not None


def compiled_metrics(model: keras.Model) -> list[keras.metrics.Metric]:
    """The metrics of `compile`, once Keras has resolved and built them."""
    return [] if model._compile_metrics is None else list(model._compile_metrics.metrics)


def activity_regularized_layers(model: keras.Model) -> list[keras.Layer]:
    """Layers that add the penalty of an activity regularizer in every call."""
    return [layer for layer in layers_of(model) if layer.activity_regularizer is not None]


stateless_scope = backend.get_stateless_scope
"""Returns the innermost stateless scope, None outside of any."""


def tracked_losses(model: keras.Model, tensors: list[Any]) -> None:
    """Let `model.losses` report these tensors inside the present stateless scope."""
    scope = stateless_scope()
    for tensor in tensors:
        scope.add_loss(tensor)
        model._loss_ids.add(id(tensor))


get_mask = backend.get_keras_mask
"""Returns the Keras mask that travels with a tensor."""


def attached(tensors: list[Any]) -> list[Any]:
    """What Keras attaches to predictions for losses to use: for each its mask and logits."""
    return [
        attachment
        for tensor in tensors
        for attachment in (get_mask(tensor), getattr(tensor, "_keras_logits", None))
    ]


def attach(tensors: list[Any], attachments: list[Any]) -> None:
    """Attach to tensors what `attached` has found on others."""
    for tensor, mask, logits in zip(tensors, attachments[::2], attachments[1::2], strict=True):
        if mask is not None:
            backend.set_keras_mask(tensor, mask)
        if logits is not None:
            tensor._keras_logits = logits


same_rank = squeeze_or_expand_to_same_rank
"""Squeezes or expands two tensors whose ranks differ by one, as losses do."""

# Data. Keras turns every kind of input into a dataset; there is no public name for it.


data_adapter = data_adapters.get_data_adapter
"""Returns Keras's adapter for arrays, datasets, `PyDataset`s and generators."""


def split_validation(arrays: Any, fraction: float) -> Any:
    """Cut the validation split off the end of arrays, as `fit` does."""
    return array_slicing.train_validation_split(arrays, validation_split=fraction)


class_weights_of_labels = data_adapter_utils.class_weight_to_sample_weights
"""Returns the sample weights of an array of labels."""

class_weights_of_batch = make_class_weight_map_fn
"""Returns a function that turns class weights into sample weights in a graph."""


def batch_norm_moments(
    layer: keras.layers.BatchNormalization, inputs: Any, mask: Any
) -> tuple[Any, Any]:
    """The mean and variance that a BatchNorm layer takes by itself."""
    return type(layer)._moments(layer, inputs, mask)


def take_moments(layer: keras.layers.BatchNormalization, function: Any) -> None:
    """Let a BatchNorm layer normalise with the mean and variance that a function returns."""
    # Keras lets a layer choose between its own replica's moments and those of all replicas, which
    # it takes in a way that loses digits and fails on an empty share.
    vars(layer)["_moments"] = function
