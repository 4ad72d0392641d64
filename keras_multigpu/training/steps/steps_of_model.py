"""Which step a model needs as it is compiled."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error, warn
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.keras_internals.model_internals import overridden
from keras_multigpu.training.replica_pass.loss_reduction import NeedsWholeBatch
from keras_multigpu.training.replica_pass.passes import TrainingPass
from keras_multigpu.training.replica_pass.sync_batch_norm import synchronized
from keras_multigpu.training.servers.connection import ASSIGNS, NO_SUM
from keras_multigpu.training.servers.step import ServedTrainStep
from keras_multigpu.training.servers.tpus import TPUs, TPUTrainStep
from keras_multigpu.training.shares import Batch, present
from keras_multigpu.training.steps.custom_step import CustomPrediction, CustomStep
from keras_multigpu.training.steps.evaluation_step import EvaluationPass, EvaluationStep
from keras_multigpu.training.steps.step import TrainStep
from keras_multigpu.training.steps.step_functions import RunStep
from keras_multigpu.training.steps.whole_batch_step import WholeBatchTrainStep
from keras_multigpu.training.variables.catching_scope import AssignsWeights

if TYPE_CHECKING:
    from keras_multigpu.training.replication import Replication


def training_step(
    model: keras.Model, replication: "Replication", spec: Batch, batch: Batch | None
) -> RunStep:
    """The training step for batches of these specs; with the first of them, if it is at hand."""
    replication.placement.prepare(model, spec, batch, "train_step")
    # One replica has the whole batch: Keras's own moments are those of all.
    several = replication.shares_of_batch > 1
    layers = synchronized_layers(model, replication.sync_batch_norm) if several else []
    context = (lambda rows: synchronized(layers, rows)) if layers else None
    if replication.elsewhere is not None:
        return step_elsewhere(model, replication, spec, context)
    probes, pieces = replication.probes, replication.pieces

    def on_variables() -> RunStep:
        refuse_pieces(pieces)
        replication.trains_on_variables(model)
        replication.placement.make_ready(model, spec, batch, model.train_step)
        return CustomStep(model, replication.group, model.train_step, layers, probes)

    own = overridden(model, "train_step", "compute_loss")
    if "train_step" in own:
        return on_variables()
    if not model.trainable_weights:
        warn("The model does not have any trainable weights.")

    def sum_of_examples() -> RunStep:
        return TrainStep(TrainingPass(model, replication, spec, context), probes)

    def whole_batch() -> RunStep:
        refuse_pieces(pieces)
        return WholeBatchTrainStep(TrainingPass(model, replication, spec, context), probes)

    if not own:
        others = {NeedsWholeBatch: whole_batch, AssignsWeights: on_variables}
        return StepAsNeeded(sum_of_examples, others)
    # On the variables, `compute_loss` would be given a replica's rows.
    return whole_batch() if several else StepAsNeeded(whole_batch, {AssignsWeights: on_variables})


def step_elsewhere(
    model: keras.Model, replication: "Replication", spec: Batch, context: Any
) -> RunStep:
    """The training step of parameter servers or TPUs; a `ValueError` if there is none.

    The context is that of `TrainingPass`.
    """
    elsewhere = replication.elsewhere
    assert elsewhere is not None
    on_tpus, several = isinstance(elsewhere, TPUs), replication.shares_of_batch > 1
    dense = all(
        isinstance(leaf, tf.TensorSpec) and leaf.dtype != tf.string for leaf in present(spec)
    )
    reasons = {
        "a `train_step` of its own": overridden(model, "train_step"),
        "a `compute_loss` of its own": overridden(model, "compute_loss"),
        "`run_eagerly=True`": model.run_eagerly,
        "BatchNormalization that is synchronised (`sync_batch_norm=False` switches it off)": (
            context is not None and not on_tpus
        ),
        "a callback that looks into steps": replication.probes,
        "inputs that are not dense numbers": on_tpus and not dense,
    }
    for reason, applies in reasons.items():
        if applies:
            raise elsewhere.refusal(model, reason)
    apart = several and not on_tpus
    replica_pass = TrainingPass(model, replication, spec, context, apart)
    step: Any = TPUTrainStep if on_tpus else ServedTrainStep
    try:
        made: RunStep = step(replica_pass, elsewhere)
        return made
    except NeedsWholeBatch:
        raise elsewhere.refusal(model, NO_SUM) from None
    except AssignsWeights:
        raise elsewhere.refusal(model, ASSIGNS) from None


def evaluation_step(
    model: keras.Model, replication: "Replication", spec: Batch, batch: Batch | None
) -> RunStep:
    replication.placement.prepare(model, spec, batch, "test_step")
    if overridden(model, "test_step"):
        replication.placement.make_ready(model, spec, batch, model.test_step)
        return CustomStep(model, replication.group, model.test_step)

    def step(whole: bool) -> RunStep:
        return EvaluationStep(EvaluationPass(model, replication, spec, has_loss=not whole), whole)

    if overridden(model, "compute_loss"):
        return step(whole=True)
    return StepAsNeeded(lambda: step(whole=False), {NeedsWholeBatch: lambda: step(whole=True)})


def prediction_step(
    model: keras.Model, replication: "Replication", spec: Batch, batch: Batch | None
) -> RunStep:
    replication.placement.prepare(model, spec, batch)
    if overridden(model, "predict_step"):
        return CustomPrediction(model, replication.group, model.predict_step, spec)
    return EvaluationStep(EvaluationPass(model, replication, spec, predicts=True)).predict


class StepAsNeeded:
    """The plainest step that a model allows, and another one where that finds what it cannot do.

    It finds it when it is made, and without a graph whenever it runs.
    """

    def __init__(
        self, make: Callable[[], RunStep], others: dict[type[Exception], Callable[[], RunStep]]
    ) -> None:
        self._others = others
        self._step = self._first(make)

    def __call__(self, shares: Any) -> Any:
        try:
            return self._step(shares)
        except tuple(self._others) as need:
            self._step = self._first(self._others[type(need)])
            return self(shares)

    def _first(self, make: Callable[[], RunStep]) -> RunStep:
        try:
            return make()
        except tuple(self._others) as need:
            return self._first(self._others[type(need)])


def synchronized_layers(model: keras.Model, every: bool) -> list[keras.layers.BatchNormalization]:
    """The BatchNorm layers to synchronise: all, or those made with `synchronized=True`."""
    return [
        layer
        for layer in model_internals.layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization) and (every or layer.synchronized)
    ]


def said_of_batch_norm(model: keras.Model, every: bool) -> str:
    """A sentence on what several replicas do with the BatchNorm layers, if there are any."""
    layers = synchronized_layers(model, True)
    count, synchronised = len(layers), sum(every or layer.synchronized for layer in layers)
    if not count:
        return ""
    if synchronised == count:
        return (
            " BatchNormalization is synchronised: it normalises over the global batch, as on one "
            "device. `kmg.distribute(model, sync_batch_norm=False)` switches that off."
        )
    which = "is not" if not synchronised else f"of {count - synchronised} layers is not"
    return (
        f" BatchNormalization {which} synchronised: each replica normalises its own share; "
        "`sync_batch_norm=True` makes it the global batch."
    )


def refuse_pieces(pieces: int) -> None:
    """Raise a `ValueError` where micro-batches meet a loss of the batch as a whole."""
    if pieces > 1:
        raise value_error(
            "`micro_batches` cannot be used with this model's loss, layers or `train_step`.",
            "Expected Keras's own training step, layers that assign no trainable weight, and "
            "losses that are sums over examples: Keras losses, or functions that return one value "
            "for each example.",
            "Leave out `micro_batches`, or return per-example values from the loss.",
            micro_batches=pieces,
        )
