"""Plans a training step before it runs: its batches, and how replicas would share it."""

import functools
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.seeded_layers import preserve_random_state
from keras_multigpu.training.distributed_model import DistributedModel, require_compiled
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.feed.sources import PythonSource
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.shares import (
    Batch,
    batch_size_of,
    present_leaves,
    sized_spec,
    specs_of,
)
from keras_multigpu.training.steps.one_device import trace_for_one_device
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.steps.passes import cuts_of
from keras_multigpu.training.steps.traced_step import TracedStep

KERAS_BATCH_SIZE = 32


def require_distributed(model: keras.Model) -> None:
    """Refuse a model whose step is not split, or that has none yet."""
    if not isinstance(model, DistributedModel):
        raise value_error(
            "`model` is not distributed.",
            "Expected a model that `kmg.distribute` returned.",
            "Call `kmg.distribute(model)` first; it works with one device as well.",
            model=model,
        )
    require_compiled(model)


def planned(model: keras.Model, spec: Batch, size: int, replicas: int) -> PartitionedStep:
    """The step for batches of these specs, split over a number of replicas, but not emitted.

    Args:
        size: How many examples a batch has, for user code that needs to know.
    """
    replication = replication_of(model)
    replication.placement.prepare(model, spec, "train_step")

    def plan(spec: Batch) -> PartitionedStep:
        trace = functools.partial(trace_for_one_device, model, model.train_step, spec)
        replication.placement.make_ready(model, spec, trace)
        request = replication.request(model, model.train_step, "train")
        traced = TracedStep(request._replace(spec=spec, pieces=1, probes=()))
        step = PartitionedStep(traced, cuts_of(request, replicas))
        try:
            _ = step.cost
        except CannotSplit as reason:
            step = PartitionedStep(traced, cuts_of(request, 1), unsplit_because=reason)
        return step

    try:
        return plan(spec)
    except Exception:
        if batch_size_of(spec) is not None:
            raise
        return plan(sized_spec(spec, size))


def last_step(model: keras.Model) -> PartitionedStep | None:
    """The step that a model was last trained with, if replicas shared it."""
    functions = replication_of(model).steps_of("train")
    runners = [runner for made in functions for runner in made.runners]
    steps = [runner.step for runner in runners if runner.step is not None]
    return steps[-1] if steps else None


def expected_batches(
    model: keras.Model,
    x: Any,
    y: Any,
    sample_weight: Any,
    batch_size: int | None,
    call: str,
    open_length: int | None = None,
    measures: bool = False,
) -> tuple[Batch, int]:
    """The specs of the batches a model will train on, and how many examples they have.

    Args:
        call: What the user has called, up to the argument `x`.
        open_length: The length of axes that the model's inputs leave open; None leaves them open.
        measures: Whether to read a batch if the specs of `x` leave a length open.
    """
    if x is None:
        size = batch_size or KERAS_BATCH_SIZE
        step = last_step(model)
        if step is None:
            return guessed_spec(model, call, open_length), size
        own = batch_size_of(step.spec)
        return step.spec, own if isinstance(own, int) else size
    if y is None and sample_weight is None and is_whole_batch(model, x):
        # As `verify` takes it, and datasets yield it.
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(x)
    with preserve_random_state():
        feed = Feed(replication_of(model).cutter, x, y, sample_weight, batch_size)
        source = feed.source
        spec, known = source.spec, source.batch_size
        if spec is not None and known is not None and not (measures and leaves_length_open(spec)):
            return spec, known
        if isinstance(source, PythonSource):
            raise value_error(
                "`x` is a generator, and reading a batch would consume it.",
                "Expected arrays, or anything else that can be read again.",
                f"Pass one of its batches: `{call}*next(batches))`.",
                x=x,
            )
        with feed.reading():
            first = next(iter(source.first_batches(None)))
        rows: Any = batch_size_of(first)
        return specs_of(first) if measures or spec is None else spec, int(rows)


def is_whole_batch(model: keras.Model, x: Any) -> bool:
    """Whether `x` is a tuple `(x, y)` or `(x, y, sample_weight)`, and not several inputs."""
    if not isinstance(x, tuple) or len(x) not in (2, 3):
        return False
    return isinstance(x[0], dict) or len(getattr(model, "inputs", None) or [None]) != len(x)


def leaves_length_open(spec: Batch) -> bool:
    """Whether the length of an axis is unknown, besides the number of examples."""
    return any(None in leaf.shape[1:] for leaf in present_leaves(spec))


def guessed_spec(model: keras.Model, call: str, open_length: int | None) -> Batch:
    """Specs of batches that fit the model's inputs, outputs and loss."""
    if not getattr(model, "inputs", None):
        raise value_error(
            "`x` is missing, and the model does not know what its inputs look like.",
            "Expected a batch, or anything that `fit` takes, for a model that is not functional.",
            f"Call `{call}x, y)`.",
            model=model.name,
        )

    def spec_of(tensor: keras.KerasTensor) -> tf.TensorSpec:
        shape = [open_length if length is None else length for length in tensor.shape[1:]]
        # The number of examples is open, as for arrays, whose last batch is smaller.
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
