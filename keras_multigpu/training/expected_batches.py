"""What batches a model is going to train on, as far as it or the user can say."""

from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.feed.sources import PythonSource
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.shares import Batch, batch_size_of, specs_of
from keras_multigpu.training.steps.split_step import SplitStep

KERAS_BATCH_SIZE = 32


def last_step(model: keras.Model) -> SplitStep | None:
    """The step that a model was last trained with, if replicas shared it."""
    functions = replication_of(model).steps_of("train_step")
    steps = [getattr(step, "step", None) for made in functions.values() for step in made.steps]
    return steps[-1] if steps and isinstance(steps[-1], SplitStep) else None


def expected_batches(
    model: keras.Model,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    call: str,
    open_length: int | None = None,
) -> tuple[Batch, int]:
    """The specs of a model's batches, and how many examples they have.

    Args:
        call: What the user has called, up to where `x` comes.
        open_length: How long axes are that the inputs leave open; None if they stay open.
    """
    if x is None:
        size = batch_size or KERAS_BATCH_SIZE
        step = last_step(model)
        if step is None:
            return guessed(model, call, open_length), size
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
            f"Pass one of its batches: `{call}*next(batches))`.",
            x=x,
        )
    first = next(iter(feed.source.first_batches(None)))
    rows: Any = batch_size_of(first)
    return spec or specs_of(first), int(rows)


def guessed(model: keras.Model, call: str, open_length: int | None) -> Batch:
    """Specs of batches that fit a model's inputs, outputs and loss."""
    if not getattr(model, "inputs", None):
        raise value_error(
            "`x` is missing, and the model does not know what its inputs look like.",
            "Expected a batch, or anything that `fit` takes, for a model that is not functional.",
            f"Call `{call}x, y)`.",
            model=model.name,
        )

    def spec_of(tensor: keras.KerasTensor) -> tf.TensorSpec:
        shape = [open_length if length is None else length for length in tensor.shape[1:]]
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
