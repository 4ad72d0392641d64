"""`explain`: says how replicas share a model's step, before they do."""

import collections
from typing import Any

import keras

from keras_multigpu.checks import require_positive_integer, value_error
from keras_multigpu.explanation.explanation import Explanation, explanation_of
from keras_multigpu.training.distributed_model import DistributedModel, require_compiled
from keras_multigpu.training.planning import expected_batches, last_step, planned_step
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.steps.split_step import BATCH, SplitStep

OPEN_LENGTH = 128
"""Of an axis that a model's inputs leave open: enough for every network of `keras.applications`."""


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

    A step is split wherever each replica can do its part. What needs all rows of the batch is
    gathered first, and then every replica computes it whole: the table names the lines that cause
    this, and its cost.

    No devices are needed: `replicas=8` works on a laptop. Variables are created as `fit` creates
    them.

    Args:
        model: A compiled model from `keras_multigpu.distribute`.
        x: The `x` of `fit`. By default what the model has trained on, else batches that fit its
            inputs and outputs, with 128 for open lengths.
        y: Targets, if `x` does not include them.
        sample_weight: Sample weights, if `x` does not include them.
        batch_size: The global batch size, if `x` does not have one; 32 by default, as in Keras.
        replicas: How many replicas. By default the model's, or 2 if it has one.

    Returns:
        An `Explanation`, with the table as its text.

    Raises:
        ValueError: If the model is not distributed or not compiled, or `x` is needed.

    Example:

    ```python
    model = kmg.distribute(model, devices=4)
    model.compile("adam", "sparse_categorical_crossentropy")
    kmg.explain(model)
    ```
    """
    if not isinstance(model, DistributedModel):
        raise value_error(
            "`model` is not distributed.",
            "Expected a model that `kmg.distribute` returned.",
            "Call `kmg.distribute(model)` first; it works with one device as well.",
            model=model,
        )
    require_compiled(model)
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
    found = described(planned_step(model, spec, size, count), count, size)
    # Printing the table is what the function is for.
    print(found)  # noqa: T201
    return found


def of_trained(model: DistributedModel, size: int) -> Explanation | None:
    """How replicas shared the step that a model was last trained with, if they did.

    Args:
        model: The model.
        size: How many examples its batches had.
    """
    step = last_step(model)
    return None if step is None else described(step, replication_of(model).group.count, size)


def described(step: SplitStep, replicas: int, size: int) -> Explanation:
    """What a number of replicas do in a step for batches of a given size."""
    reason = None if step.alone is None else str(step.alone)
    numbers = collections.defaultdict(lambda: 1, {BATCH: size})
    return explanation_of(step.cost, "train_step", replicas, size, numbers, reason)
