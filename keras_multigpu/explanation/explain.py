"""`explain`: says how replicas share a model's step, before they do."""

import collections
import functools
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import require_positive_integer, value_error
from keras_multigpu.explanation.explanation import Explanation, explanation_of
from keras_multigpu.explanation.planned_step import PlannedStep
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.training.distributed_model import DistributedModel, require_compiled
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.feed.sources import PythonSource
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.shares import Batch, batch_size_of, specs_of
from keras_multigpu.training.steps.one_device import traced_for_one_device
from keras_multigpu.training.steps.split_step import BATCH, SplitStep

KERAS_BATCH_SIZE = 32

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
    replication = replication_of(model)
    count = replicas or max(replication.shares_of_batch, 2)
    spec, size = batches_of(model, x, y, sample_weight, batch_size)
    if model.run_eagerly:
        raise value_error(
            "The model's step is not split.",
            "Expected a step with a graph.",
            "Compile the model without `run_eagerly=True`.",
            run_eagerly=True,
        )
    replication.placement.prepare(model, spec, "train_step")
    trace = functools.partial(traced_for_one_device, model, model.train_step, spec)
    replication.placement.make_ready(model, spec, trace)
    request = replication.request(model, model.train_step)._replace(spec=spec, pieces=1)
    step = PlannedStep(request, count)
    found = described(step, count, size)
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


def last_step(model: DistributedModel) -> SplitStep | None:
    """The step that a model was last trained with, if replicas shared it."""
    functions = replication_of(model).steps_of("train_step")
    steps = [getattr(step, "step", None) for made in functions.values() for step in made.steps]
    return steps[-1] if steps and isinstance(steps[-1], SplitStep) else None


def described(step: SplitStep, replicas: int, size: int) -> Explanation:
    """What a number of replicas do in a step for batches of a given size."""
    reason = None if step.alone is None else str(step.alone)
    numbers = collections.defaultdict(lambda: 1, {BATCH: size})
    return explanation_of(step.account, "train_step", replicas, size, numbers, reason)


def batches_of(
    model: DistributedModel, x: Any, y: Any, sample_weight: Any, batch_size: int | None
) -> tuple[Batch, int]:
    """The specs of a model's batches, and how many examples they have."""
    if x is None:
        size = batch_size or KERAS_BATCH_SIZE
        step = last_step(model)
        if step is None:
            return guessed(model), size
        own = batch_size_of(step.spec)
        return step.spec, own if isinstance(own, int) else size
    feed = Feed(replication_of(model).cutter, x, y, sample_weight, batch_size)
    spec, known = feed.source.spec, feed.source.batch_size
    if spec is not None and known is not None:
        return spec, known
    if isinstance(feed.source, PythonSource):
        raise value_error(
            "`x` is a generator, and reading a batch would consume it.",
            "Expected arrays, or anything else that can be read again.",
            "Pass one of its batches: `kmg.explain(model, *next(batches))`.",
            x=x,
        )
    first = next(iter(feed.source.first_batches(None)))
    rows: Any = batch_size_of(first)
    return spec or specs_of(first), int(rows)


def guessed(model: DistributedModel) -> Batch:
    """Specs of batches that fit a model's inputs, outputs and loss."""
    if not getattr(model, "inputs", None):
        raise value_error(
            "`x` is missing, and the model does not know what its inputs look like.",
            "Expected a batch, or anything that `fit` takes, for a model that is not functional.",
            "Call `kmg.explain(model, x, y)`.",
            model=model.name,
        )

    def spec_of(tensor: keras.KerasTensor) -> tf.TensorSpec:
        shape = [OPEN_LENGTH if length is None else length for length in tensor.shape[1:]]
        # As `fit` takes arrays, of which the last batch is smaller.
        return tf.TensorSpec([None, *shape], tensor.dtype)

    def label_of(tensor: keras.KerasTensor) -> tf.TensorSpec:
        spec = spec_of(tensor)
        if "sparse" in str(getattr(model.loss, "name", model.loss)).lower():
            return tf.TensorSpec(spec.shape[:-1], tf.int32)
        return spec

    functional = isinstance(model, model_internals.FunctionalModel)
    inputs, outputs = (
        (model.input, model.output) if functional else (model.inputs[0], model.outputs[0])
    )
    structure = keras.tree.map_structure(spec_of, inputs)
    return structure, keras.tree.map_structure(label_of, outputs), None
