"""`StepRequest`: what to make a step of."""

import contextlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from keras_multigpu.keras_internals import variable_internals
from keras_multigpu.training.exchange.stage import size_of
from keras_multigpu.training.replica_group import ReplicaGroup, is_in_parts
from keras_multigpu.training.shares import Batch
from keras_multigpu.training.steps.one_device import known_variables
from keras_multigpu.training.variables.open_sums import OpenSums
from keras_multigpu.training.variables.placement import Placement
from keras_multigpu.training.watching.probe import Probe
from keras_multigpu.writing import size_text

logger = logging.getLogger("keras_multigpu")

NO_SPEC: Batch = (None, None, None)


class Options(NamedTuple):
    """How replicas compute together: the arguments of `distribute`, and two of `compile`.

    Attributes:
        on_inexact: What to do if a split step differs from one device: "one_device" or "error".
        self_check: Whether a training step is tried before its first batch.
        shard: What replicas divide: None or "optimizer".
        micro_batches: In how many pieces replicas take their shares; "auto" finds out.
        xla: Whether the user wants XLA; None with `jit_compile="auto"`.
    """

    on_inexact: str = "one_device"
    self_check: bool = True
    shard: str | None = None
    micro_batches: int | str = 1
    xla: bool | None = None

    @property
    def finds_pieces(self) -> bool:
        """Whether a step that runs out of memory runs again, in more pieces."""
        return self.micro_batches == "auto"


class StepRequest(NamedTuple):
    """A step to make: what one device would run, for which batches, and where it runs.

    Attributes:
        model: The model, or the `UsedObjects` that a custom training loop uses.
        function: The step as one device runs it, given a batch: `model.train_step`, say.
        mode: "train", "test", "predict", or "function" for the step of a custom training loop.
        warned_of: The warnings that the user has seen.
        probes: What callbacks measure in steps of training.
        pieces: In how many pieces a replica takes its share.
        open_sums: The open sums that steps leave in variables; None if they may leave none.
    """

    model: Any
    function: Callable[[Any], Any]
    mode: str
    group: ReplicaGroup
    placement: Placement
    options: Options
    warned_of: set[str]
    probes: tuple[Probe, ...] = ()
    pieces: int = 1
    open_sums: OpenSums | None = None
    spec: Batch = NO_SPEC

    @property
    def trains(self) -> bool:
        """Whether `fit` runs it, which counts its changes of the model."""
        return self.mode == "train"

    @property
    def accumulates(self) -> bool:
        """Whether sums of gradients may wait in variables."""
        # Replicas that divide variables keep their rows of the sum, a part of its size.
        return self.open_sums is not None and self.options.shard is None

    @property
    def self_check(self) -> bool:
        """Whether it is tried before its first batch."""
        return self.options.self_check and self.mode in ("train", "function")

    @property
    def at_once(self) -> bool:
        """Whether it assigns each variable as soon as the new value is there.

        A step that fails may then have assigned some.
        """
        # Another worker may stop or be killed in the middle of a step, see `ReplicaGroup.change`.
        # With "auto" a step that fails runs again.
        return not (self.group.is_spread or self.trains and self.options.finds_pieces)

    def change(self) -> contextlib.AbstractContextManager[None]:
        """The context in which variables change; see `ReplicaGroup.change`."""
        return self.group.change() if self.trains else contextlib.nullcontext()

    @property
    def name(self) -> str:
        """The name of the step, for messages."""
        return getattr(self.function, "__name__", "the step")

    def warn_of_one_replica(self, reason: object, step: str = "") -> None:
        """Warn once that one replica takes whole batches, and why."""
        whole = f", and not in {self.pieces} micro-batches" if self.pieces > 1 else ""
        text = (
            f"One replica computes the whole of {step or self.name}{whole}: {reason}. The results "
            "are those of one device, and the step is no faster."
        )
        storages = variable_internals.storages_of(known_variables(self.model))
        if divided := sum(size_of(each) for each in storages if is_in_parts(each)):
            text += f" It needs all of what replicas divide at a time: {size_text(divided)}."
        self.warn(text)

    def warn(self, text: str, key: str | None = None) -> None:
        """Log a warning, once for each text, or each key."""
        if (key or text) not in self.warned_of:
            self.warned_of.add(key or text)
            logger.warning(text)
