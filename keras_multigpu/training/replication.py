"""Where one model trains, how, and the steps that were compiled for it."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals, versions
from keras_multigpu.keras_internals.model_internals import overridden
from keras_multigpu.replicas import obtained
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.feed import Group
from keras_multigpu.training.lengths import refuse_unequal_known
from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.servers.parameter_servers import Servers
from keras_multigpu.training.servers.tpus import TPUs
from keras_multigpu.training.shares import Batch, Shares
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.steps.steps_of_model import (
    StepFunctions,
    evaluation_step,
    prediction_step,
    training_step,
)
from keras_multigpu.training.update import adjustments
from keras_multigpu.training.variables.placement import Placement

logger = logging.getLogger("keras_multigpu")


class Replication:
    """The replicas of one model, and the steps compiled for them.

    Args:
        strategy: The model's strategy.
        half_sums: Whether gradients are summed in bfloat16.
        micro_batches: In how many pieces replicas take their shares; "auto" finds out.
        pieces: How many these are now.
        asynchronous: Whether workers of parameter servers wait for nobody.
        as_tpus: Whether the strategy is used as one of TPUs, which the tests do with another one.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        half_sums: bool = False,
        micro_batches: int | str = 1,
        pieces: int = 1,
        *,
        asynchronous: bool = False,
        as_tpus: bool = False,
    ) -> None:
        self.elsewhere: Servers | TPUs | None = None
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            self.elsewhere = Servers(strategy, asynchronous)
        elif asynchronous:
            raise value_error(
                "`asynchronous` came without parameter servers.",
                "Expected a strategy of the kind 'parameter_server' with it.",
                "Leave it out: replicas that exchange sums wait for each other.",
                strategy=type(strategy).__name__,
            )
        elif as_tpus or isinstance(strategy, tf.distribute.TPUStrategy):
            self.elsewhere = TPUs(strategy)
        if self.elsewhere is not None:
            if half_sums:
                raise value_error(
                    f"`sum_dtype='bfloat16'` came with {self.elsewhere.name}.",
                    "Expected sums in float32 with them.",
                    "Leave `sum_dtype` out.",
                    strategy=type(strategy).__name__,
                )
            # The host evaluates and predicts by itself, and keeps the model.
            with graph_internals.single_device():
                strategy = obtained("one_device")
        self.group = ReplicaGroup(strategy, half_sums)
        self.shares_of_batch = self.group.count
        # An asynchronous worker takes a batch whole.
        if self.elsewhere is not None and not asynchronous:
            self.shares_of_batch = self.elsewhere.workers
        self.strategy = self.group.strategy
        # Of several processes each keeps the rows of all replicas on the host, where it has read
        # them: what one process computes of the whole batch needs no exchange then.
        local, spread = self.group.replicas, self.group.is_spread
        here = range(local[0].id, local[-1].id + 1) if spread else None
        self.cutter = Cutter(
            self.group.count, None if spread else local, here, lambda: self.pieces > 1
        )
        self.half_sums = half_sums
        self.micro_batches = micro_batches
        self.pieces = pieces
        self.probes: tuple[Probe, ...] = ()
        self.gathers_named: set[str] = set()
        """The places of which a warning has said that they make steps slow."""
        self._data_wait: tf.Variable | None = None
        self._announced = False
        self.forget_steps()

    @property
    def settings(self) -> tuple[Any, ...]:
        """What a copy of the model needs besides a strategy."""
        return self.half_sums, self.micro_batches, self.pieces

    def forget_steps(self) -> None:
        """Drop the compiled steps, because the model has changed."""
        self._functions: dict[tuple[Any, ...], StepFunctions] = {}
        self._on_variables: set[str] = set()
        self.placement = Placement(self.strategy, self.shares_of_batch > 1)

    def steps_of(self, method: str) -> tuple[dict[Any, StepFunctions], set[str]]:
        """The compiled steps for one method of the model, and that it runs on variables, if so."""
        own = {key: made for key, made in self._functions.items() if key[0] == method}
        return own, self._on_variables & {method}

    def forget(self, method: str) -> None:
        """Drop the compiled steps for one method of the model."""
        own, on_variables = self.steps_of(method)
        self._functions = {key: f for key, f in self._functions.items() if key not in own}
        self._on_variables -= on_variables

    def take_back(self, functions: dict[Any, StepFunctions], on_variables: set[str]) -> None:
        """What `steps_of` gave, after `forget`."""
        self._functions |= functions
        self._on_variables |= on_variables

    def announce(self, model: keras.Model, verbose: Any = 0) -> None:
        """Say once where the model trains.

        Where nobody has asked for the log the first of these is printed, as Keras prints progress.
        """
        if self._announced or not self.group.is_chief:
            return
        self._announced = True
        devices = [tf.DeviceSpec.from_string(replica.device) for replica in self.group.replicas]
        names = ", ".join(f"{device.device_type}:{device.device_index}" for device in devices)
        count = self.shares_of_batch
        if self.elsewhere is not None:
            names = self.elsewhere.name
        replicas = "1 replica" if count == 1 else f"{count} replicas"
        if self.group.is_spread:
            names = f"{names} on each of {count // len(devices)} workers"
        logger.info("Training on %s: %s.", replicas, names)
        shows = verbose != 0 and keras.config.is_interactive_logging_enabled()
        if shows and not logger.isEnabledFor(logging.INFO):
            print(f"Training on {replicas}: {names}.", flush=True)  # noqa: T201 (as Keras does)
        if untested := versions.newer_than_tested():
            logger.info(untested)

    def watch(self, probe: Probe) -> None:
        """Let a probe into every training step.

        The steps stay compiled for the next `fit` with the same probes, and for one without.
        """
        with tf.init_scope(), graph_internals.single_device():
            probe.build(self.strategy)
        self.probes += (probe,)

    def watch_nothing(self) -> None:
        """Take all probes out of the training step."""
        self.probes = ()

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
        """Steps without probes."""
        probes, self.probes = self.probes, ()
        try:
            yield
        finally:
            self.probes = probes

    def waited_in_graph(self) -> float:
        """For how many seconds graphs of training steps have waited for data."""
        return 0.0 if self._data_wait is None else float(self._data_wait.numpy())

    def training(self, model: keras.Model) -> StepFunctions:
        """The compiled training steps; others where a schedule is adjusted, see `Rate`."""
        adjusted = tuple(map(id, adjustments(getattr(model, "optimizer", None))))
        if self._data_wait is None:
            with tf.init_scope(), graph_internals.single_device(), tf.device(HOST):
                # In float32 a microsecond would add nothing after half a minute.
                self._data_wait = tf.Variable(0.0, dtype=tf.float64, trainable=False)
        key = self.pieces, self.probes, adjusted, self.group.pretends
        return self._of(model, "train_step", training_step, key, self._data_wait)

    def trains_on_variables(self, model: keras.Model) -> None:
        """Note that training runs as a step of the user's own does: metrics live in parts."""
        self._on_variables.add("train_step")
        self.placement.arrange_metrics(model, True)

    def evaluation(self, model: keras.Model) -> StepFunctions:
        return self._of(model, "test_step", evaluation_step)

    def prediction(self, model: keras.Model) -> StepFunctions:
        return self._of(model, "predict_step", prediction_step)

    def _of(
        self,
        model: keras.Model,
        method: str,
        make: Callable[..., Any],
        more: tuple[Any, ...] = (),
        data_wait: tf.Variable | None = None,
    ) -> StepFunctions:
        # Metrics live where the step that comes next updates them.
        in_parts = bool(overridden(model, method)) or method in self._on_variables
        in_parts = in_parts and not self.splits(model)
        self.placement.arrange_metrics(model, in_parts)
        eager = bool(model.run_eagerly)
        # Without a graph Keras asks in each step what is frozen.
        key = (method, eager, *more, *(map(id, model.trainable_variables) if eager else ()))
        if key not in self._functions:
            if self.probes:
                # Steps with probes that are gone go, so that repeated `fit`s do not grow.
                self._functions = {
                    known: functions
                    for known, functions in self._functions.items()
                    if known[0] != "train_step" or known[3] in ((), self.probes)
                }
            replicas = self.group.count, len(self.cutter.devices)
            step = functools.partial(make, model, self)
            # A coordinator does not compute what workers do.
            direct = eager or (self.elsewhere is not None and method == "train_step")
            self._functions[key] = StepFunctions(step, replicas, direct, data_wait)
        return self._functions[key]

    def splits(self, model: keras.Model) -> bool:
        """Whether the step of one device is split; a private switch until all steps are."""
        return self.elsewhere is not None or os.environ.get("KMG_SPLIT") == "1"

    def reads_in_graph(self, model: keras.Model) -> bool:
        """Whether a graph of steps may read the batches itself."""
        # With "auto" a batch may be taken again, in more pieces; from a graph's iterator it is
        # gone.
        own = model.run_eagerly or self.micro_batches == "auto" or self.elsewhere is not None
        return not own

    def settle(self) -> dict[str, Any]:
        """Wait for what workers still do; the logs then, if there are other ones."""
        return self.elsewhere.settle() if self.elsewhere is not None else {}

    def show(self) -> None:
        """Let the model have the values that TPUs have, for somebody may look at them now."""
        if isinstance(self.elsewhere, TPUs):
            self.elsewhere.pull()

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Show the values in the end, also of a training that was interrupted."""
        try:
            yield
        finally:
            self.show()

    def run(
        self, model: keras.Model, mode: str, group: Group, spec: Batch | None
    ) -> dict[str, Any]:
        """Run steps of training ("train") or evaluation ("test"); the logs of the last one."""
        logs: dict[str, Any] = {}
        if mode == "test" or self.micro_batches != "auto":
            steps = self.evaluation(model) if mode == "test" else self.training(model)
            logs = steps.run(group, spec)
            return logs
        for shares in group.shares:
            logs = self._train_in_memory(model, shares, spec)
        return logs

    def train_on(
        self, model: keras.Model, batch: Batch, pieces: int | None = None
    ) -> dict[str, Any]:
        """Run one training step on a global batch, in so many pieces, this once."""
        group = Group(1, 1, [self.cutter(batch)], None)
        with self.shown():
            if pieces is None:
                return self.run(model, "train", group, None)
            before, self.pieces = self.pieces, pieces
            try:
                logs: dict[str, Any] = self.training(model).run(group, None)
                return logs
            finally:
                self.pieces = before

    def _train_in_memory(self, model: keras.Model, shares: Shares, spec: Batch | None) -> Any:
        """Train on a batch; where memory runs out, again in twice as many pieces."""
        # A step changes no variable before all replicas have their new values, so a step that
        # failed has left nothing behind.
        while True:
            try:
                return self.training(model).run_one(shares, spec)
            except tf.errors.ResourceExhaustedError:
                # The others are in the middle of the step.
                largest = max(int(rows.examples) for rows in shares.rows)
                if self.group.is_spread or self.pieces >= largest:
                    raise
                refuse_unequal_known(shares.rows[0].data)
                self.pieces *= 2
                logger.warning(
                    "Out of memory: every replica now takes its share in %d micro-batches. "
                    "Pass `micro_batches=%d` to `compile` to start with that.",
                    self.pieces,
                    self.pieces,
                )
