"""What a `DistributedModel` knows about its replicas: where they are and how they step."""

import contextlib
import logging
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import keras_internals
from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals.versions import newer_than_tested
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.replica_group import HOST
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replica_pass.additive_metrics import AdditiveMetrics
from keras_multigpu.training.replica_pass.loss_reduction import NeedsWholeBatch
from keras_multigpu.training.replica_pass.passes import EvaluationPass
from keras_multigpu.training.replica_pass.passes import TrainingPass
from keras_multigpu.training.replica_pass.sync_batch_norm import said_of_batch_norm
from keras_multigpu.training.replica_pass.sync_batch_norm import synchronized
from keras_multigpu.training.replica_pass.sync_batch_norm import synchronized_layers
from keras_multigpu.training.shares import Batch
from keras_multigpu.training.shares import Rows
from keras_multigpu.training.shares import Shares
from keras_multigpu.training.steps.custom_step import CustomPrediction
from keras_multigpu.training.steps.custom_step import CustomStep
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.steps.step import EvaluationStep
from keras_multigpu.training.steps.step import TrainStep
from keras_multigpu.training.steps.step_functions import MakeStep
from keras_multigpu.training.steps.step_functions import RunStep
from keras_multigpu.training.steps.step_functions import StepFunctions
from keras_multigpu.training.steps.whole_batch_step import WholeBatchTrainStep
from keras_multigpu.training.tracing import symbolic
from keras_multigpu.training.tracing import traced
from keras_multigpu.training.update.adjusted_schedule import adjustments
from keras_multigpu.training.variables.placement import MetricStorages
from keras_multigpu.training.variables.placement import Untracked
from keras_multigpu.training.variables.placement import build_optimizer
from keras_multigpu.training.variables.placement import idle_optimizers
from keras_multigpu.training.variables.placement import place_model

logger = logging.getLogger("keras_multigpu")


class Replication:
    """The strategy of one model and the steps compiled for it.

    Args:
        strategy: The model's strategy.
        sync_batch_norm: Whether BatchNorm takes its moments over all replicas.
        half_sums: Whether gradients are summed in bfloat16.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        sync_batch_norm: bool = False,
        half_sums: bool = False,
    ) -> None:
        self.group = ReplicaGroup(strategy, half_sums)
        self.strategy = strategy = self.group.strategy
        # Of several processes each keeps the rows of all replicas on the host: what one process
        # computes of the whole batch needs no exchange then.
        self.cutter = Cutter(
            self.group.count, None if self.group.is_spread else self.group.replicas
        )
        self.sync_batch_norm = sync_batch_norm
        self.half_sums = half_sums
        self.micro_batches: int | str = 1
        self.pieces = 1
        self._probes: tuple[Probe, ...] = ()
        self._data_wait: tf.Variable | None = None
        self._functions: dict[Any, StepFunctions] = {}
        self._announced = False
        self._metrics_in_parts: bool | None = None
        self._metric_storages = MetricStorages(strategy)
        self.untracked = Untracked(strategy, self._metric_storages)

    def announce(self, model: keras.Model) -> None:
        """Log once where the model trains, and what becomes of its BatchNormalization layers."""
        if self._announced:
            return
        self._announced = True
        devices = [tf.DeviceSpec.from_string(replica.device) for replica in self.group.replicas]
        names = ", ".join(f"{device.device_type}:{device.device_index}" for device in devices)
        count = self.group.count
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        if self.group.is_spread:
            names = f"{names} on each of {count // len(devices)} workers"
        batch_norm = said_of_batch_norm(model, self.sync_batch_norm) if count > 1 else ""
        logger.info("Training on %s: %s.%s", replicas, names, batch_norm)
        if untested := newer_than_tested():
            logger.info(untested)

    def agree_on_seeds(self) -> int | None:
        """Take Keras's global seed from the chief; a seed that all workers have in common.

        Returns:
            None where there is one process.
        """
        if not self.group.is_spread:
            return None
        state = keras_internals.global_seed_state()
        own = tf.random.uniform((), maxval=2**31 - 1, dtype=tf.int32)
        seed, *of_chief = self.group.of_processes([int(own), *map(int, state.numpy())])[0]
        state.assign(of_chief)
        return seed

    def forget_steps(self) -> None:
        """Drop the compiled steps, because the model has changed."""
        self._functions = {}
        self._metrics_in_parts = None
        self._metric_storages = MetricStorages(self.strategy)
        self.untracked = Untracked(self.strategy, self._metric_storages)

    def watch(self, probe: Probe) -> None:
        """Let a probe into every training step.

        The steps stay compiled for the next `fit` with the same probes, and for one without.
        """
        with tf.init_scope(), keras_internals.single_device():
            probe.build(self.strategy)
        self._probes += (probe,)

    def watch_nothing(self) -> None:
        """Take all probes out of the training step."""
        self._probes = ()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Steps without probes."""
        probes, self._probes = self._probes, ()
        try:
            yield
        finally:
            self._probes = probes

    def waited_in_graph(self) -> float:
        """For how many seconds graphs of training steps have waited for data."""
        return 0.0 if self._data_wait is None else float(self._data_wait.numpy())

    def training(self, model: keras.Model) -> StepFunctions:
        """The compiled training steps; others where a schedule is adjusted, see `Rate`."""
        self._arrange_metrics(model, "train_step")
        adjusted = adjustments(getattr(model, "optimizer", None))
        return self._of(
            ("train", self.pieces, self._probes, tuple(map(id, adjusted))),
            lambda spec, batch: self._training_step(model, spec, batch),
            model,
        )

    def evaluation(self, model: keras.Model) -> StepFunctions:
        """The compiled evaluation steps."""
        self._arrange_metrics(model, "test_step")
        return self._of(
            ("test",), lambda spec, batch: self._evaluation_step(model, spec, batch), model
        )

    def prediction(self, model: keras.Model) -> StepFunctions:
        """The compiled prediction steps."""
        self._arrange_metrics(model, "predict_step")
        return self._of(
            ("predict",), lambda spec, batch: self._prediction_step(model, spec, batch), model
        )

    def train_in_memory(self, model: keras.Model, shares: Shares, spec: Batch | None) -> Any:
        """Train on a batch; where memory runs out, again in twice as many pieces.

        A step changes no variable before all replicas have their new values, so a step
        that failed has left nothing behind.
        """
        while True:
            try:
                return self.training(model).run_one(shares, spec)
            except tf.errors.ResourceExhaustedError:
                # The others are in the middle of the step.
                if self.group.is_spread or self.pieces >= largest_share(shares):
                    raise
                self.pieces *= 2
                logger.warning(
                    "Out of memory: every replica now takes its share in %d micro-batches. "
                    "Pass `micro_batches=%d` to `compile` to start with that.",
                    self.pieces,
                    self.pieces,
                )

    def train_in_pieces(self, model: keras.Model, batch: Batch, pieces: int) -> Any:
        """Train on a batch in so many pieces, this once."""
        before, self.pieces = self.pieces, pieces
        try:
            return self.training(model).run_one(self.cutter(batch))
        finally:
            self.pieces = before

    def _of(self, kind: Any, make: MakeStep, model: keras.Model) -> StepFunctions:
        key = (kind, bool(model.run_eagerly))
        if key not in self._functions:
            if self._probes:
                self._forget_other_probes()
            self._functions[key] = StepFunctions(
                make,
                (self.group.count, len(self.cutter.devices)),
                bool(model.run_eagerly),
                self._timer() if kind[0] == "train" else None,
            )
        return self._functions[key]

    def _timer(self) -> tf.Variable:
        """Where the seconds add up that graphs of training steps wait for data."""
        if self._data_wait is None:
            with tf.init_scope(), keras_internals.single_device(), tf.device(HOST):
                self._data_wait = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        return self._data_wait

    def _forget_other_probes(self) -> None:
        """Drop steps with probes that are gone, so that repeated `fit`s do not grow."""
        self._functions = {
            key: functions
            for key, functions in self._functions.items()
            if key[0][0] != "train" or key[0][2] in ((), self._probes)
        }

    def _arrange_metrics(self, model: keras.Model, method: str) -> None:
        """Let metrics live where the step that comes next updates them."""
        in_parts = is_overridden(model, method)
        if in_parts != self._metrics_in_parts:
            self._metrics_in_parts = in_parts
            self._place_metrics(model)

    def _place_metrics(self, model: keras.Model) -> None:
        given = [v for metric in keras_internals.given_metrics(model) for v in metric.variables]
        variables = [*model.metrics_variables, *given, *self.untracked.metric_states]
        self._metric_storages.use(variables, bool(self._metrics_in_parts))

    def prepare(self, model: keras.Model, spec: Batch | None, batch: Batch | None = None) -> None:
        """Build what is not built, and put all variables where they belong.

        Args:
            model: The model.
            spec: The specs of a batch, if they are known.
            batch: A batch, which a model that runs eagerly needs: it may read the numbers.
        """
        refuse_own_loops(model)
        if self.group.count > 1:
            refuse_stateful(model)
        unbuilt = called = has_call(model) and not is_built(model)
        if unbuilt:
            with keras_internals.single_device():
                if batch is not None and model.run_eagerly:
                    keras_internals.real_call(model, batch[0])
                elif spec is not None and not model.run_eagerly:
                    keras_internals.symbolic_call(model, symbolic(spec[0]))
                else:
                    called = False
        place_model(model, self.strategy)
        self._place_metrics(model)
        # A layer that the call leaves out is never built.
        if unbuilt and not called:
            return
        # As in Keras: where the model was built before, a step of the user's builds its
        # optimizers itself, each for the variables that it updates.
        if unbuilt or not is_overridden(model, "train_step"):
            optimizer = getattr(model, "optimizer", None)
            build_optimizer(optimizer, model.trainable_variables, self.strategy)

    def _training_step(self, model: keras.Model, spec: Batch, batch: Batch | None) -> RunStep:
        self.prepare(model, spec, batch)
        layers = synchronized_layers(model, self.sync_batch_norm)
        if is_overridden(model, "train_step"):
            refuse_pieces(self.pieces)
            return self._custom_step(model, (spec, batch), model.train_step, layers, self._probes)
        context = (lambda rows: synchronized(layers, rows)) if layers else None
        watched = bool(self._probes)

        def sum_of_examples() -> TrainStep:
            by_piece = any(probe.by_piece for probe in self._probes)
            replica_pass = TrainingPass(
                model, metrics_of(model, spec), watched, self.pieces, context, by_piece
            )
            return TrainStep(model, self.group, spec, replica_pass, self._probes)

        def whole_batch() -> WholeBatchTrainStep:
            refuse_pieces(self.pieces)
            replica_pass = TrainingPass(model, metrics_of(model, spec), watched, 1, context)
            return WholeBatchTrainStep(model, self.group, spec, replica_pass, self._probes)

        if is_overridden(model, "compute_loss"):
            return whole_batch()
        return FirstThatFits([sum_of_examples, whole_batch])

    def _evaluation_step(self, model: keras.Model, spec: Batch, batch: Batch | None) -> RunStep:
        self.prepare(model, spec, batch)
        if is_overridden(model, "test_step"):
            return self._custom_step(model, (spec, batch), model.test_step)

        def step(whole: bool) -> EvaluationStep:
            replica_pass = EvaluationPass(model, metrics_of(model, spec), has_loss=not whole)
            return EvaluationStep(model, self.group, spec, replica_pass, whole)

        if is_overridden(model, "compute_loss"):
            return step(whole=True)
        return FirstThatFits([lambda: step(whole=False), lambda: step(whole=True)])

    def _prediction_step(self, model: keras.Model, spec: Batch, batch: Batch | None) -> RunStep:
        self.prepare(model, spec, batch)
        if is_overridden(model, "predict_step"):
            return CustomPrediction(model, self.group, model.predict_step, spec)
        return EvaluationStep(model, self.group, spec, EvaluationPass(model)).predict

    def _custom_step(
        self,
        model: keras.Model,
        example: tuple[Batch, Batch | None],
        function: Callable[[Any], dict[str, Any]],
        layers: Sequence[keras.layers.BatchNormalization] = (),
        probes: Sequence[Probe] = (),
    ) -> CustomStep:
        spec, batch = example
        if not has_call(model) and not is_built(model):
            with idle_optimizers(model):
                traced(
                    lambda *parts: function(keras.utils.pack_x_y_sample_weight(*parts)), spec, False
                )
            place_model(model, self.strategy)
        elif has_call(model):
            with keras_internals.single_device():
                if batch is not None and model.run_eagerly:
                    keras_internals.build_model(model, batch, keras_internals.real_call)
                else:
                    keras_internals.build_model(model, symbolic(spec))
        self._place_metrics(model)
        return CustomStep(model, self.group, function, layers, probes)


class FirstThatFits:
    """The first of several steps that the model's losses allow.

    Args:
        candidates: Make the steps, the fastest first. One that does not fit raises
            `NeedsWholeBatch`, when it is made or when it is first run.
    """

    def __init__(self, candidates: list[Callable[[], RunStep]]) -> None:
        self._candidates = candidates
        self._step = self._next()

    def __call__(self, shares: Sequence[Rows]) -> Any:
        """Run the step."""
        while True:
            try:
                return self._step(shares)
            except NeedsWholeBatch:
                self._step = self._next()

    def _next(self) -> RunStep:
        while True:
            make = self._candidates.pop(0)
            try:
                return make()
            except NeedsWholeBatch:
                continue


def largest_share(shares: Shares) -> int:
    """The number of examples of the replica that has the most."""
    return max(int(rows.examples) for rows in shares.rows)


def metrics_of(model: keras.Model, spec: Batch) -> AdditiveMetrics:
    """The compiled metrics, for a pass."""
    return AdditiveMetrics(model, spec, is_overridden(model, "compute_metrics"))


def has_call(model: keras.Model) -> bool:
    """Whether the model itself can be called; one with only a `train_step` cannot."""
    return type(model).call is not keras.Model.call


def is_built(model: keras.Model) -> bool:
    """Whether all layers have their variables."""
    return all(layer.built for layer in keras_internals.layers_of(model))


def is_overridden(model: keras.Model, method: str) -> bool:
    """Whether this method of the model is another than `keras.Model` has."""
    defined_in = next(cls for cls in type(model).__mro__ if method in vars(cls))
    # Keras has models of its own that do it, such as `keras.distillation.Distiller`.
    ours = defined_in.__module__.startswith("keras_multigpu.")
    return not ours and defined_in not in keras.Model.__mro__


def refuse_own_loops(model: keras.Model) -> None:
    """Raise a `ValueError` for a model that makes the functions which Keras's loops call."""
    for step in ("train", "test", "predict"):
        if is_overridden(model, f"make_{step}_function"):
            raise value_error(
                f"The model has a `make_{step}_function` of its own.",
                f"Expected `keras.Model.make_{step}_function`: it reads Keras's iterator, "
                "which knows nothing of shares, so here it would never be called.",
                f"Override `{step}_step` instead, or train the model without `distribute`.",
                model=type(model).__name__,
            )


def refuse_stateful(model: keras.Model) -> None:
    """Raise a `ValueError` for recurrent layers that remember the batch before."""
    for layer in keras_internals.layers_of(model):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise value_error(
                "A recurrent layer keeps its state from one batch to the next.",
                "Expected `stateful=False`: replicas see shares of a batch, whose states "
                "belong to other examples than before.",
                "Train this model on one device: `kmg.strategy('one_device')`.",
                layer=layer.name,
            )


def refuse_pieces(pieces: int) -> None:
    """Raise a `ValueError` where micro-batches meet a loss of the batch as a whole."""
    if pieces > 1:
        raise value_error(
            "`micro_batches` cannot be used with this model's loss or `train_step`.",
            "Expected Keras's own training step and losses that are sums over examples: "
            "Keras losses, or functions that return one value for each example.",
            "Leave out `micro_batches`, or return per-example values from the loss.",
            micro_batches=pieces,
        )
