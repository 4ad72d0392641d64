"""What happens to a step between `fit` and its first run, pass by pass; this is the whole list.

    prepared              makes the model's variables on all replicas, as graphs capture them
    TracedStep            runs Keras's own Python once, as for one device: no code is written twice
    require_same_graph    compares the workers' graphs, whose sums would otherwise be mixed up
    split                 emits the part of one replica, cut into stages where replicas sum;
                          one replica takes whole batches if there is no way to split them
    warn_of_gathers       names what makes a step slow: its numbers would not show it
    check                 tries the step on a few rows of its first batch: rules may be wrong
    MadeStep.graph        calls the part for each replica, in a graph that TensorFlow optimizes

A runner then runs it. `make_runner` makes one for the replicas; those of `servers` and `tpus` take
the same passes.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

from keras_multigpu.checks import runtime_error
from keras_multigpu.devices import forget_peaks
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.partition.source_line import place_of
from keras_multigpu.training.exchange.sums import Cuts
from keras_multigpu.training.feed.cutter import has_own_memory
from keras_multigpu.training.runners.replica_runner import ReplicaRunner
from keras_multigpu.training.runners.runner import Runner
from keras_multigpu.training.runners.whole_step import WholeStep
from keras_multigpu.training.shares import (
    Batch,
    Rows,
    batch_size_of,
    join_shares,
)
from keras_multigpu.training.steps.batches import BATCH
from keras_multigpu.training.steps.one_device import trace_for_one_device
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.steps.request import StepRequest
from keras_multigpu.training.steps.self_check import difference
from keras_multigpu.training.steps.traced_step import TracedStep
from keras_multigpu.training.steps.trial import Trial

# Gathers that take more than this part of a step are worth a warning.
COSTLY = 0.1
# Keras's default.
USUAL_BATCH_SIZE = 32
PIECES_WAIT = (
    "`micro_batches={pieces}` saves little memory with this model: each piece waits for what "
    "replicas exchange, as BatchNormalization or weights in parts need it, and is kept until then. "
    "The results are the same."
)


def prepared(make: Callable[[StepRequest], Any], request: StepRequest, spec: Batch) -> Any:
    """What `make` makes of a step for batches of these specs, once the model is ready for it."""
    model, placement = request.model, request.placement
    if request.mode == "predict":
        placement.prepare(model, spec)
    else:
        placement.prepare(model, spec, f"{request.mode}_step")
        trace = functools.partial(trace_for_one_device, model, request.function, spec)
        placement.make_ready(model, spec, trace)
    return make(request._replace(spec=spec))


def make_runner(request: StepRequest) -> Runner:
    """Make what runs a step on the replicas of this process, and of others."""
    step = split(TracedStep(request), request.group.count, request.pieces)
    if step.local is None:
        return WholeStep(request, step)
    if request.trains:
        warn_of_gathers(step)
    if step.pieces_wait:
        request.warn(PIECES_WAIT.format(pieces=step.pieces))
    return ReplicaRunner(step)


def split(
    traced: TracedStep, replicas: int, pieces: int, because: CannotSplit | None = None
) -> PartitionedStep:
    """Split a step, into one part if need be; if there is no graph even of that, `local` is None.

    Args:
        because: Why there is one part, if there should be more.
    """
    while True:
        cuts = cuts_of(traced.request, replicas, pieces)
        step = PartitionedStep(traced, cuts, pieces, because)
        try:
            step.emit()
        except CannotSplit as reason:
            step.unsplit_because = because or reason
            if step.parts > 1:
                traced.request.warn_of_one_replica(reason)
                because, replicas, pieces = reason, 1, 1
                continue
        return step


def cuts_of(request: StepRequest, replicas: int, pieces: int = 1) -> Cuts:
    """What marks the sums of so many parts; `ReplicaGroup.exchange` makes them when they run."""
    here = request.group.replicas
    on_cpu = not all(has_own_memory(each.device) for each in here)
    places = len(here) if replicas == request.group.count else replicas
    return Cuts(replicas * pieces, on_cpu, bool(request.model.jit_compile), places, pieces)


def warn_of_gathers(step: PartitionedStep) -> None:
    """Warn of the gather that makes a step slow, once for each source line."""
    request = step.traced.request
    replicas = request.group.count
    if step.unsplit_because or replicas == 1:
        return
    run = vars(request.model).get("training_run")
    size = batch_size_of(request.spec) or (run and run.global_batch_size) or USUAL_BATCH_SIZE
    # As if all batches had this size.
    numbers = collections.defaultdict(lambda: 1, {BATCH: size})
    part = step.cost.part_of_gathers(numbers, replicas)
    found = [each for each in step.cost.moved if each.kind == "gathered" and each.op]
    if part <= COSTLY or not found:
        return
    most = max(found, key=lambda each: step.cost.bytes("gathered", numbers, [each]))
    assert most.op is not None
    place = place_of(most.op)
    request.warn(
        f"{place} needs the rows of all replicas ({most.op.type}): gathering them, and what "
        f"every replica then computes in full, takes about {round(100 * part)} % of a step. "
        "The results are those of one device. `kmg.explain(model)` lists what each part costs.",
        key=place,
    )


def check(runner: ReplicaRunner, shares: Sequence[Rows]) -> None:
    """Compare with the unsplit step on rows of the first batch; one replica runs it if they differ.

    Args:
        runner: Runs the step; it gets another one if need be.
        shares: The batch.
    """
    step, request = runner.step, runner.request
    runner.is_checked = True
    if runner.open_sums is not None:
        # It takes all copies of a variable for equal.
        runner.open_sums.close()
    own = [rows for rows in shares if rows.data is not None]
    found = None
    # Effects, and draws from a state of their own, cannot be undone.
    if not (step.unsplit_because or step.parts == 1 or step.cost.once):
        if len(own) == len(shares) or step.inputs.takes_any_size:
            found = difference(Trial(step), join_shares(own, step.spec))
            # What the trial needed on GPUs is not what the step needs.
            forget_peaks()
    # These may be copies of before the model was placed.
    step.traced.variables = []
    if not request.group.any_worker(found is not None):
        return
    what = found or "as another worker found"
    if request.options.on_inexact == "error":
        raise runtime_error(
            f"Split over {step.parts} parts, `{request.name}` does not give the numbers of one "
            f"device: {what}.",
            "Expected the same numbers, but for rounding.",
            "Leave out `on_inexact`: one replica then computes the whole step. And please "
            "report it: this is a bug in keras_multigpu.",
            on_inexact="error",
        )
    reason = CannotSplit(f"split, it would not give the numbers of one device ({what})")
    request.warn_of_one_replica(reason)
    runner.step = split(step.traced, 1, 1, reason)
