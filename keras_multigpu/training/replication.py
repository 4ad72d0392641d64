"""Where one model trains, how, and the steps that were compiled for it."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals, versions
from keras_multigpu.replicas import default_strategy, obtained
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.feed import Group
from keras_multigpu.training.replica_group import HOST, ReplicaGroup
from keras_multigpu.training.servers.parameter_servers import Servers
from keras_multigpu.training.servers.tpus import TPUs
from keras_multigpu.training.shares import Batch, Shares, normalized
from keras_multigpu.training.steps.eager_step import EagerStep, EagerTrainStep
from keras_multigpu.training.steps.probes import Probe
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.split_step import SplitStep
from keras_multigpu.training.steps.split_train_step import SplitTrainStep
from keras_multigpu.training.steps.steps_of_model import StepFunctions, made_step
from keras_multigpu.training.variables.adjusted_schedule import adjustments
from keras_multigpu.training.variables.placement import Placement

logger = logging.getLogger("keras_multigpu")


# Not an attribute for Keras to track or save.
KEPT_AS = "_replication"


def require_strategy_or_devices(strategy: object, devices: object) -> None:
    """Raise a `ValueError` where both were given, or no strategy as `strategy`."""
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise value_error(
            "`strategy` is not a strategy.",
            "Expected a `tf.distribute.Strategy`.",
            "Pass `devices=2`, or `kmg.strategy(devices=2)`, or leave it out.",
            strategy=strategy,
        )
    if strategy is not None and devices is not None:
        raise value_error(
            "Both `strategy` and `devices` were given.",
            "Expected one of them: a strategy already has its devices.",
            "Leave out `devices`, or make the strategy with `kmg.strategy(devices=...)`.",
            strategy=strategy,
            devices=devices,
        )


def known_replication(model: keras.Model) -> "Replication | None":
    """The replicas of a model, where these are decided."""
    known: Replication | None = vars(model).get(KEPT_AS)
    return known


def replicate(model: keras.Model, replication: "Replication") -> None:
    """Let a model run on other replicas from now on; its values are kept."""
    vars(model)[KEPT_AS] = replication


def replication_of(model: keras.Model) -> "Replication":
    """The replicas of a model; those of the default strategy, where none were chosen."""
    known = known_replication(model)
    if known is None:
        known = Replication(default_strategy())
        replicate(model, known)
    return known


class Replication:
    """The replicas of one model, and the steps compiled for them.

    Args:
        micro_batches: In how many pieces replicas take their shares; "auto" finds out.
        pieces: How many these are now.
        on_inexact: What happens where a split step does not give the numbers of one device.
        self_check: Whether it is tried before its first batch.
        shard_optimizer: Whether each replica of a process keeps a part of the optimizer's state.
        as_tpus: Whether the strategy is used as one of TPUs, which the tests do with another one.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        half_sums: bool = False,
        micro_batches: int | str = 1,
        pieces: int = 1,
        on_inexact: str = "one_device",
        self_check: bool = True,
        shard_optimizer: bool = False,
        *,
        asynchronous: bool = False,
        as_tpus: bool = False,
    ) -> None:
        self.elsewhere: Servers | TPUs | None = None
        if isinstance(strategy, tf.distribute.ParameterServerStrategy):
            self.elsewhere = Servers(strategy, asynchronous)
        elif asynchronous:
            raise value_error(
                "`asynchronous=True` needs parameter servers.",
                "Expected a strategy of the kind 'parameter_server'.",
                "Leave it out: replicas that exchange sums wait for each other.",
                strategy=type(strategy).__name__,
            )
        elif as_tpus or isinstance(strategy, tf.distribute.TPUStrategy):
            self.elsewhere = TPUs(strategy)
        if self.elsewhere is not None:
            for name, given, expected in (
                ("sum_dtype='bfloat16'", half_sums, "sums in float32"),
                ("shard_optimizer=True", shard_optimizer, "the optimizer's state in one place"),
            ):
                if given:
                    raise value_error(
                        f"`{name}` is not supported on {self.elsewhere.name}.",
                        f"Expected {expected}.",
                        f"Leave `{name.partition('=')[0]}` out.",
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
        devices = None if spread else [replica.device for replica in local]
        self.cutter = Cutter(self.group.count, devices, here)
        self.half_sums = half_sums
        self.micro_batches = micro_batches
        self.pieces = pieces
        self.on_inexact, self.self_check = on_inexact, self_check
        self.shard_optimizer = shard_optimizer
        self.probes: tuple[Probe, ...] = ()
        self.warned_of: set[str] = set()
        self._data_wait: tf.Variable | None = None
        self._announced = False
        self.forget_steps()

    @property
    def options(self) -> tuple[Any, ...]:
        """What a copy of the model needs besides a strategy."""
        how = self.on_inexact, self.self_check, self.shard_optimizer
        return self.half_sums, self.micro_batches, self.pieces, *how

    def forget_steps(self) -> None:
        """Drop the compiled steps, because the model has changed."""
        self._functions: dict[tuple[Any, ...], StepFunctions] = {}
        self.placement = Placement(self.strategy)

    def steps_of(self, method: str) -> dict[Any, StepFunctions]:
        return {key: steps for key, steps in self._functions.items() if key[0] == method}

    def set_steps(self, method: str, steps: dict[Any, StepFunctions]) -> None:
        """Replace the compiled steps of a method by others that `steps_of` has returned."""
        others = {key: made for key, made in self._functions.items() if key[0] != method}
        self._functions = others | steps

    def announce(self, model: keras.Model, verbose: Any = 0) -> None:
        """Say once where the model trains.

        Without logging, the first line is printed, as Keras prints progress.
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

    @contextlib.contextmanager
    def unwatched(self) -> Iterator[None]:
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
        return self._of(model, "train_step", key, self._data_wait)

    def evaluation(self, model: keras.Model) -> StepFunctions:
        return self._of(model, "test_step")

    def prediction(self, model: keras.Model) -> StepFunctions:
        return self._of(model, "predict_step")

    def _of(
        self,
        model: keras.Model,
        method: str,
        more: tuple[Any, ...] = (),
        data_wait: tf.Variable | None = None,
        function: Callable[[Any], Any] | None = None,
    ) -> StepFunctions:
        eager = bool(model.run_eagerly)
        # Without a graph Keras asks in each step what is frozen.
        frozen = map(id, model.trainable_variables) if eager else ()
        key = (method, eager, *more, function is None, *frozen)
        if key not in self._functions:
            if self.probes:
                # Steps with probes that are gone go, so that repeated `fit`s do not grow.
                self._functions = {
                    known: functions
                    for known, functions in self._functions.items()
                    if known[0] != "train_step" or known[3] in ((), self.probes)
                }
            kind: Callable[..., Any] = EagerStep if eager else SplitStep
            elsewhere = self.elsewhere if method == "train_step" else None
            if elsewhere is not None:
                kind = elsewhere.train_step
            elif method == "train_step":
                kind = EagerTrainStep if eager else SplitTrainStep
            request = self.request(model, function or getattr(model, method), method)
            if self.group.is_spread and function is None and method != "predict_step":
                # Of a batch that may be taken again, others must not know that it is dropped.
                may_stop = self.micro_batches != "auto" and not (self.probes or self.group.pretends)
                request = request._replace(may_stop=may_stop)
            make = functools.partial(made_step, kind, request, method)
            # A coordinator does not compute what workers do.
            direct = eager or elsewhere is not None
            self._functions[key] = StepFunctions(make, self.cutter, direct, data_wait)
        return self._functions[key]

    def request(
        self, model: Any, function: Callable[[Any], Any], method: str = "train_step"
    ) -> StepRequest:
        """A step that runs here, for batches that are still to be described."""
        trains = method == "train_step"
        return StepRequest(
            model,
            function,
            self.group,
            self.placement,
            self.probes,
            self.pieces if trains else 1,
            self.warned_of,
            self.on_inexact,
            # What changes nothing shows its numbers, and costs no training.
            self.self_check and trains,
            shards=self.shard_optimizer and trains and len(self.group.replicas) > 1,
        )

    def run_directly(
        self, model: keras.Model, method: str, function: Callable[[Any], Any], data: Any
    ) -> Any:
        """Run Keras's step of this name on a global batch, outside of any loop of the model's.

        Args:
            function: What Keras has for it, whatever the user's is.
        """
        with self.unwatched():
            more = (self.pieces, ()) if method == "train_step" else ()
            steps = self._of(model, method, more, function=function)
            return steps.run_one(self.cutter(normalized(data)))

    def reads_in_graph(self, model: keras.Model) -> bool:
        """Whether a graph of steps may read the batches itself."""
        # With "auto" a batch may be taken again, in more pieces; from a graph's iterator it is
        # gone.
        own = model.run_eagerly or self.micro_batches == "auto" or self.elsewhere is not None
        return not own

    def may_drop(self, model: keras.Model, mode: str) -> bool:
        """Whether steps of a mode change nothing where a worker wants to stop."""
        return (self.evaluation if mode == "test" else self.training)(model).may_drop

    def settle(self) -> dict[str, Any]:
        """Wait for what workers still do; the logs then, if there are other ones."""
        return self.elsewhere.settle() if self.elsewhere is not None else {}

    def show(self) -> None:
        """Copy the values from the TPUs to the model, where they may be read now."""
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

    def train_on(self, model: keras.Model, batch: Batch, pieces: int | None = None) -> Any:
        """Run one training step on a global batch, this once in `pieces` pieces."""
        shares = self.cutter(batch)
        with self.shown():
            if pieces is None and self.micro_batches == "auto":
                return self._train_in_memory(model, shares, None)
            before, self.pieces = self.pieces, pieces or self.pieces
            try:
                return self.training(model).run_one(shares)
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
                if self.group.is_spread or self.pieces >= largest or self.training(model).alone:
                    raise
                self.pieces *= 2
                logger.warning(
                    "Out of memory: each replica now splits its part of a batch into %d "
                    "micro-batches. Pass `micro_batches=%d` to `compile` to start with that.",
                    self.pieces,
                    self.pieces,
                )
