"""`Replication`: the replicas that one model trains on, and the steps compiled for them."""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.keras_internals import graph_internals
from keras_multigpu.keras_internals.model_internals import overridden
from keras_multigpu.keras_internals.replacing import replaced
from keras_multigpu.replicas import default_strategy, get_strategy
from keras_multigpu.training.feed.cutter import Cutter
from keras_multigpu.training.feed.feed import Execution
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.runners.servers import Servers
from keras_multigpu.training.runners.tpus import TPUs
from keras_multigpu.training.runners.whole_step import WholeStep
from keras_multigpu.training.shares import Batch, Shares, normalized
from keras_multigpu.training.steps.passes import make_runner, prepared
from keras_multigpu.training.steps.request import Options, StepRequest
from keras_multigpu.training.steps.steps_of_model import StepFunctions
from keras_multigpu.training.variables.adjusted_schedule import adjusted_schedule
from keras_multigpu.training.variables.open_sums import OpenSums
from keras_multigpu.training.variables.placement import Placement
from keras_multigpu.training.watching.probe import P, Probe, equal_one

logger = logging.getLogger("keras_multigpu")

# In the model's `vars`, because Keras would track and save an attribute.
KEPT_AS = "_replication"


def require_strategy_or_devices(strategy: object, devices: object) -> None:
    """Raise a `ValueError` if both were given, or `strategy` is not a strategy."""
    if strategy is not None and not isinstance(strategy, tf.distribute.Strategy):
        raise value_error(
            "`strategy` is not a strategy.",
            "Expected a `tf.distribute.Strategy`, or a `keras.distribution.DataParallel`.",
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
    """The replicas of a model; None before they are chosen."""
    known: Replication | None = vars(model).get(KEPT_AS)
    return known


def replicate(model: keras.Model, replication: "Replication") -> None:
    """Let a model run on these replicas from now on; it keeps its values."""
    vars(model)[KEPT_AS] = replication


def replication_of(model: keras.Model) -> "Replication":
    """The replicas of a model, by default those of the default strategy."""
    known = known_replication(model)
    if known is None:
        known = Replication(default_strategy())
        replicate(model, known)
    return known


def wants_xla(model: keras.Model) -> bool | None:
    """What Keras's `compile` was given as `jit_compile`, as far as the model tells; None if not."""
    # Keras keeps what its "auto" has become, which is True wherever it sees more than CPUs.
    devices = tf.config.list_physical_devices()
    on_cpus = all(device.device_type == "CPU" for device in devices)
    is_clear = model.compiled and on_cpus and keras.Model.jit_compile.fget(model)
    return True if is_clear else None


def accumulates(model: Any) -> bool:
    """Whether the model's optimizer adds up gradients of several steps."""
    return bool(getattr(getattr(model, "optimizer", None), "gradient_accumulation_steps", None))


DEFAULTS = Options()


class Replication:
    """The replicas of one model, and the steps compiled for them.

    Attributes:
        pieces: In how many pieces replicas take their shares now.
        calls: How often a step, or several at once, was called.
        dropped: The modes whose compiled steps are not to be used again.
        elsewhere: Who computes the training steps if this process does not.
    """

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        options: Options = DEFAULTS,
        *,
        asynchronous: bool = False,
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
        elif isinstance(strategy, tf.distribute.TPUStrategy):
            self.elsewhere = TPUs(strategy)
        if self.elsewhere is not None:
            if options.shard is not None:
                raise self.elsewhere.refusal(f"`shard={options.shard!r}`", "Leave `shard` out")
            # The host keeps the model, and evaluates and predicts by itself.
            with graph_internals.single_device():
                strategy = get_strategy("one_device")
        self.group = ReplicaGroup(strategy)
        self.shares_of_batch = self.group.count
        # An asynchronous worker takes whole batches.
        if self.elsewhere is not None and not asynchronous:
            self.shares_of_batch = self.elsewhere.workers
        self.strategy = self.group.strategy
        # Each of several processes keeps the rows of all replicas on the host, where it has read
        # them, so that one process can compute a whole batch without an exchange.
        local, spread = self.group.replicas, self.group.is_spread
        here = range(local[0].id, local[-1].id + 1) if spread else None
        devices = None if spread else [replica.device for replica in local]
        self.cutter = Cutter(self.group.count, devices, here)
        self.use(options)
        self.open_sums = OpenSums(self.group)
        self.calls = 0
        self.probes: tuple[Probe, ...] = ()
        self.warned_of: set[str] = set()
        self.forget_steps()

    def use(self, options: Options) -> None:
        self.options = options
        self.finds_pieces = options.finds_pieces
        self.pieces = 1 if self.finds_pieces else int(options.micro_batches)

    @property
    def is_one_program(self) -> bool:
        """Whether nothing is summed in the middle of a step."""
        return self.shares_of_batch == 1 and self.options.micro_batches == 1

    @property
    def may_use_xla(self) -> bool:
        """Whether XLA may compile the steps, if the model allows it."""
        # Replicas and micro-batches sum between stages, and XLA compiles each stage for each
        # replica and each size of a share: for a convnet with two BatchNormalizations on two
        # replicas 12 programs and not one. Its first step took 5 times as long as without XLA, and
        # one of another size 80 times. Other steps have two stages, and all sums between them.
        if self.options.xla is not None:
            return self.options.xla
        # A TPU computes in no other way.
        return self.is_one_program or isinstance(self.elsewhere, TPUs)

    def forget_steps(self) -> None:
        """Drop the compiled steps, because the model has changed."""
        self._functions: dict[tuple[Any, ...], StepFunctions] = {}
        self.dropped: set[str] = set()
        # Those of the last `fit` that had any: steps are compiled with them.
        self.spare: tuple[Probe, ...] = ()
        several = len(self.group.replicas) > 1
        self.placement = Placement(self.strategy, self.options.shard if several else None)

    def steps_of(self, mode: str) -> list[StepFunctions]:
        return [steps for key, steps in self._functions.items() if key[0] == mode]

    def watch(self, probe: P) -> P:
        """Add a probe to every training step; in place of it, one of an earlier `fit` if equal."""
        probe = equal_one(probe, self.spare)
        self.spare = tuple(each for each in self.spare if each is not probe)
        with tf.init_scope(), graph_internals.single_device():
            probe.build(self.strategy)
        self.probes += (probe,)
        return probe

    def step_functions(
        self, model: keras.Model, mode: str, function: Callable[[Any], Any] | None = None
    ) -> StepFunctions:
        """The compiled steps of a mode: "train", "test" or "predict".

        Args:
            function: Keras's own step, if it is to run in place of the model's.
        """
        self.calls += 1
        if mode in self.dropped:
            self.dropped.discard(mode)
            self._functions = {k: made for k, made in self._functions.items() if k[0] != mode}
        method, eager, trains = f"{mode}_step", bool(model.run_eagerly), mode == "train"
        of_training = (self.probes, self.pieces) if trains else ((), 1)
        key: tuple[Any, ...] = mode, eager, function is None, *of_training
        if trains:
            adjusted = adjusted_schedule(getattr(model, "optimizer", None))
            key += adjusted, self.group.exchange
        # As in Keras, each step looks up what is frozen.
        frozen_or_not = model.trainable_variables if eager else []
        key += tuple(map(id, frozen_or_not))
        if key not in self._functions:
            # Drop the steps for probes of earlier fits, so that memory does not grow.
            kept = {k: made for k, made in self._functions.items() if k[3] in ((), self.probes)}
            self._functions = kept if self.probes else self._functions
            request = self.request(model, function or getattr(model, method), mode)
            elsewhere = self.elsewhere if trains else None
            there: Callable[..., Any] = elsewhere.make_runner if elsewhere else make_runner
            if eager and elsewhere is not None:
                elsewhere.leave_out()
            self._functions[key] = StepFunctions(
                functools.partial(prepared, WholeStep if eager else there, request),
                self.cutter,
                # Steps elsewhere are called from Python, too.
                eager or elsewhere is not None,
                function is None and bool(overridden(model, method)),
            )
            # As long as a key has their numbers, no other variable may get one of these.
            self._functions[key].keeps = frozen_or_not
        return self._functions[key]

    def request(self, model: Any, function: Callable[[Any], Any], mode: str) -> StepRequest:
        """The request for a step that runs here; its specs are still missing."""
        of_training: tuple[Any, ...] = ()
        if mode == "train":
            waits = self.elsewhere is None and accumulates(model)
            of_training = self.probes, self.pieces, self.open_sums if waits else None
        known = self.group, self.placement, self.options, self.warned_of
        return StepRequest(model, function, mode, *known, *of_training)

    def run_keras_step(
        self, model: keras.Model, mode: str, function: Callable[[Any], Any], data: Any
    ) -> Any:
        """Run Keras's own step on a global batch, outside the loops."""
        with replaced(self, "probes", ()):
            return self.step_functions(model, mode, function)(self.cutter(normalized(data)))

    def settle(self) -> dict[str, Any]:
        """Let variables have their values, as of the last step, on all workers.

        Returns the logs of the last step of parameter servers, if there are any.
        """
        self.open_sums.close()
        return self.elsewhere.settle() if self.elsewhere is not None else {}

    def copy_back(self) -> None:
        """Copy the values from TPUs to the model, where callbacks may read them."""
        if isinstance(self.elsewhere, TPUs):
            self.elsewhere.copy_back()

    def end(self) -> None:
        """`fit` has ended, perhaps with an error: let the model have its values."""
        self.open_sums.end()
        self.copy_back()

    def run(self, model: keras.Model, mode: str, execution: Execution) -> dict[str, Any]:
        """Run steps of training ("train") or evaluation ("test"); the logs of the last one."""
        logs: dict[str, Any] = {}
        searches = mode == "train" and self.finds_pieces
        in_memory = functools.partial(self._train_in_memory, model)
        step = in_memory if searches else self.step_functions(model, mode)
        with self._naming_what_saves_memory():
            for shares in execution.batches:
                logs = step(shares)
        return logs

    def run_batch(
        self, model: keras.Model, mode: str, batch: Batch, pieces: int | None = None
    ) -> Any:
        """Run one step of a mode on a global batch, perhaps in another number of pieces."""
        shares = self.cutter(batch)
        try:
            if mode == "train" and pieces is None and self.finds_pieces:
                return self._train_in_memory(model, shares)
            with replaced(self, "pieces", pieces or self.pieces), self._naming_what_saves_memory():
                return self.step_functions(model, mode)(shares, is_argument=True)
        finally:
            self.copy_back()

    @contextlib.contextmanager
    def _naming_what_saves_memory(self) -> Iterator[None]:
        """Say what would help if a step runs out of memory."""
        try:
            yield
        except tf.errors.ResourceExhaustedError:
            if self.group.count > 1 and self.options.shard is None:
                logger.error(
                    'Out of memory. `kmg.distribute(model, shard="optimizer")`, or "weights", lets '
                    "replicas divide what they all hold; `kmg.memory(model)` says what it saves, "
                    "and what it costs."
                )
            raise

    def _train_in_memory(self, model: keras.Model, shares: Shares) -> Any:
        """Train on a batch; if memory runs out, try again in twice as many pieces."""
        # Here a step assigns variables only when all replicas have their new values, so one that
        # fails leaves nothing behind.
        while True:
            steps = self.step_functions(model, "train")
            try:
                return steps(shares)
            except tf.errors.ResourceExhaustedError:
                largest = max(shares.counts)
                is_unsplit = any(runner.unsplit_because for runner in steps.runners)
                # Other workers would still be in the middle of the step.
                if self.group.is_spread or self.pieces >= largest or is_unsplit:
                    raise
                self.pieces *= 2
                logger.warning(
                    "Out of memory: each replica now splits its part of a batch into %d "
                    "micro-batches. Pass `micro_batches=%d` to `compile` to start with that.",
                    *(self.pieces, self.pieces),
                )
