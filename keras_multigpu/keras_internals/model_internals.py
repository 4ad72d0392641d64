"""The door to a model: its layers, how they are wired and called, what a call leaves behind."""

from typing import Any

import keras
import tensorflow as tf
from keras.src import api_export, backend
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.models.functional import Functional
from keras.src.saving import object_registration

FunctionalModel = Functional
"""The class of functional models."""


def layers_of(model: keras.Model) -> list[keras.Layer]:
    """The model and all layers inside it, however deep."""
    return list(model._flatten_layers())


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


def arguments_of_function(value: Any) -> dict[str, Any]:
    """What a loss or metric of Keras calls its function with; nothing for anything else."""
    # `get_config` leaves some out: the delta of `Huber`, the axis of `CosineSimilarity`.
    is_wrapper = isinstance(value, (LossFunctionWrapper, keras.metrics.MeanMetricWrapper))
    return dict(value._fn_kwargs) if is_wrapper else {}


# What Keras's `fit` calls `evaluate` with, so that it takes the batches which `fit` has prepared.
# One that a user has written hands it on, and there is no public name for it.
VALIDATES = "_use_cached_eval_dataset"


def initial_epoch(model: keras.Model) -> int | None:
    """The epoch at which `BackupAndRestore` resumes training."""
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


def end_of_epoch(model: keras.Model, logs: Any) -> Any:
    """What `fit` and `evaluate` report of an epoch: the metrics, if the last step's logs are these.

    A step of the user's may return other values under their names, and hooks of batches have those.
    """
    # Keras asks the same private method.
    return model._get_metrics_result_or_logs(logs)


def overridden(model: keras.Model, *methods: str) -> list[str]:
    """Which of these methods of the model are others than `keras.Model` has."""

    def is_own(method: str) -> bool:
        defined_in = next(cls for cls in type(model).__mro__ if method in vars(cls))
        # Keras has models of its own that do it, such as `keras.distillation.Distiller`.
        ours = defined_in.__module__.startswith("keras_multigpu.")
        return not ours and defined_in not in keras.Model.__mro__

    return list(filter(is_own, methods))
