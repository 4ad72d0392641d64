"""Models: their layers, how they are wired and called, and what a call leaves behind."""

from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export, backend
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.models.functional import Functional
from keras.src.saving import object_registration

FunctionalModel = Functional
"""The class of functional models."""


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """The model and all layers inside it, however deep."""
    return list(model._flatten_layers())


def wiring(model: keras.Model) -> list[Any]:
    """The operations of a functional model and their inputs, as numbers; empty for other models."""
    # The public `get_config` has names, which Keras numbers, and fails for a layer without config.
    operations = model.operations if isinstance(model, Functional) else []
    numbers = {id(operation): number for number, operation in enumerate(operations)}

    def place(tensor: Any) -> list[int]:
        operation, node, output = tensor._keras_history
        before = nodes_of(operation).index(operation._inbound_nodes[node])
        return [numbers[id(operation)], before, output]

    def nodes_of(operation: Any) -> list[Any]:
        # A layer that is also used elsewhere has more nodes.
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

    # Layers are identified elsewhere.
    plain = [None if isinstance(each, keras.Layer) else each for each in operations]
    inner = [
        [operation, *map(of_node, nodes_of(each))]
        for operation, each in zip(plain, operations, strict=True)
    ]
    if not operations:
        return []
    return [inner, *([place(tensor) for tensor in ends] for ends in (model.inputs, model.outputs))]


def arguments_of_function(value: Any) -> dict[str, Any]:
    """The arguments that one of Keras's losses or metrics passes to its function."""
    # `get_config` omits some: the delta of `Huber`, the axis of `CosineSimilarity`.
    is_wrapper = isinstance(value, (LossFunctionWrapper, keras.metrics.MeanMetricWrapper))
    return dict(value._fn_kwargs) if is_wrapper else {}


# The argument with which `fit` lets `evaluate` use the batches that it has prepared. A user's
# `evaluate` passes it on; it has no public name.
VALIDATES = "_use_cached_eval_dataset"


def initial_epoch(model: keras.Model) -> int | None:
    """The epoch at which `BackupAndRestore` resumes training."""
    return model._initial_epoch


def called(model: keras.Model, x: Any, training: bool) -> Any:
    """`model(x)`, with the `training` argument where its `call` takes one."""
    return model(x, training=training) if model._call_has_training_arg else model(x)


def register_like(made: type, original: type) -> None:
    """Save objects of class `made` under the name of class `original`."""
    for names in (object_registration.GLOBAL_CUSTOM_NAMES, api_export.REGISTERED_OBJS_TO_NAMES):
        if original in names:
            names[made] = names[original]


def own_training_state(model: keras.Model) -> None:
    """Let Keras treat the model as one on a single device."""
    # Keras remembers the scope in which a model was made, then avoids XLA and distributes data.
    model._distribute_strategy = None


def symbolic_call(function: Any, *arguments: Any) -> Any:
    """Call a function on shapes alone, which builds its layers; return the shapes of its result.

    The arguments are structures of `keras.KerasTensor`s, and of `tf.RaggedTensorSpec`s, which Keras
    would pass on as dense tensors.
    """

    def stand_in(leaf: Any) -> Any:
        if not isinstance(leaf, tf.RaggedTensorSpec):
            return leaf
        inner = leaf.shape[leaf.ragged_rank + 1 :]
        return tf.compat.v1.ragged.placeholder(leaf.dtype, leaf.ragged_rank, inner)

    return backend.compute_output_spec(
        lambda *given: function(*keras.tree.map_structure(stand_in, given)), *arguments
    )


get_mask = get_keras_mask
"""Returns the Keras mask that travels with a tensor."""


def attached(tensors: list[Any]) -> list[Any]:
    """The mask and the logits that Keras has attached to each tensor, for losses to use."""
    return [
        attachment
        for tensor in tensors
        for attachment in (get_mask(tensor), getattr(tensor, "_keras_logits", None))
    ]


def attach(tensors: list[Any], attachments: list[Any]) -> None:
    """Attach the masks and logits that `attached` found on other tensors."""
    for tensor, mask, logits in zip(tensors, attachments[::2], attachments[1::2], strict=True):
        if mask is not None:
            set_keras_mask(tensor, mask)
        if logits is not None:
            tensor._keras_logits = logits


def end_of_epoch(model: keras.Model, logs: Any) -> Any:
    """The logs of an epoch: the metrics, unless a user's step returned other names."""
    return model._get_metrics_result_or_logs(logs)


def overridden(model: keras.Model, *methods: str) -> list[str]:
    """Which of these methods a user's class overrides."""

    def is_own(method: str) -> bool:
        defined_in = next(cls for cls in type(model).__mro__ if method in vars(cls))
        # Keras's own models override some too, such as `keras.distillation.Distiller`.
        ours = defined_in.__module__.startswith("keras_multigpu.")
        return not ours and defined_in not in keras.Model.__mro__

    return list(filter(is_own, methods))
