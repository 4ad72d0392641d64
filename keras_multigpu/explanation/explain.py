"""`explain`: says how replicas share a model's training step, before they do."""

from typing import Any

import keras

from keras_multigpu.checks import require_positive_integer, value_error
from keras_multigpu.explanation.explanation import Explanation, explanation_of
from keras_multigpu.explanation.planning import (
    expected_batches,
    last_step,
    planned,
    require_distributed,
)
from keras_multigpu.training.distributed_model import DistributedModel
from keras_multigpu.training.replication import replication_of

# The length of axes that a model leaves open, enough for all networks of `keras.applications`.
OPEN_LENGTH = 128


def explain(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    replicas: int | None = None,
) -> Explanation:
    """Print how replicas share a model's training step, without training.

    Replicas share every operation of which each can do its own rows. Operations that need all rows
    of the batch gather them first, and then every replica computes them whole. The table names the
    lines that cause this, and the cost.

    It needs no devices: `replicas=8` works on a laptop. It creates the model's variables as `fit`
    does.

    Args:
        model: A compiled model from `keras_multigpu.distribute`.
        x: The `x` of `fit`, or a tuple `(x, y)`. By default the data that the model was trained
            on, or else batches that fit its inputs and outputs, with 128 for open lengths.
        y: Targets, if `x` does not include them.
        sample_weight: Sample weights, if `x` does not include them.
        batch_size: The global batch size, if `x` does not have one; 32 by default, as in Keras.
        replicas: How many replicas. By default the model's, or 2 if it has one.

    Returns:
        An `Explanation`; its `text` is the table.

    Raises:
        ValueError: If the model is not distributed or not compiled, or `x` is needed.

    Example:

    ```python
    model = kmg.distribute(model, devices=4)
    model.compile("adam", "sparse_categorical_crossentropy")
    kmg.explain(model)
    ```
    """
    require_distributed(model)
    if replicas is not None:
        require_positive_integer("replicas", replicas)
    count = replicas or max(replication_of(model).shares_of_batch, 2)
    spec, size = expected_batches(
        model, x, y, sample_weight, batch_size, "kmg.explain(model, ", open_length=OPEN_LENGTH
    )
    if model.run_eagerly:
        raise value_error(
            "The model's step is not split.",
            "Expected a step with a graph.",
            "Compile the model without `run_eagerly=True`.",
            run_eagerly=True,
        )
    found = explanation_of(planned(model, spec, size, count), count, size)
    # Printing the table is what the function is for.
    print(found.text)  # noqa: T201
    return found


def explain_trained(model: DistributedModel, batch_size: int) -> Explanation | None:
    """How replicas shared the step that a model was last trained with, if they did."""
    step = last_step(model)
    if step is None:
        return None
    return explanation_of(step, replication_of(model).group.count, batch_size)
