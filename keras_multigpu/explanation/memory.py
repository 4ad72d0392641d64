"""`memory`: estimates what a training step will hold on each device."""

import dataclasses
import math
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import require_positive_integer, value_error
from keras_multigpu.devices import short_name
from keras_multigpu.explanation.liveness import Bytes, Liveness
from keras_multigpu.explanation.planning import (
    expected_batches,
    leaves_length_open,
    planned,
    require_distributed,
)
from keras_multigpu.host_memory import available_bytes
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.keras_internals.variable_internals import variable_storage
from keras_multigpu.partition.planning.gathering import BUCKET
from keras_multigpu.partition.planning.part import OWN, Part, planned_whole
from keras_multigpu.partition.planning.planner import CannotSplit
from keras_multigpu.partition.sizes import Size
from keras_multigpu.training.feed.cutter import AHEAD
from keras_multigpu.training.replica_group import parts_or_copies
from keras_multigpu.training.replication import Replication, replication_of
from keras_multigpu.training.shares import open_spec, present_leaves
from keras_multigpu.training.steps.batches import BATCH
from keras_multigpu.training.steps.partitioned_step import PartitionedStep
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.training.variables.storage import can_be_divided
from keras_multigpu.writing import size_text

TIGHT = 0.9
"""Above this part of a device's memory, allocators may fail because free memory is fragmented."""


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What one device holds at the peak of a step, in bytes.

    Args:
        device: Its name, such as `GPU:0`.
        weights: The model's weights and statistics.
        optimizer: The optimizer's state.
        update: Gradients, new values, and copies of weights: whatever the step makes that does not
            grow with the batch.
        activations: What the step computes from the rows of a batch.
        waiting: The rows of the batch in use, and of those that wait.
        available: A GPU's whole memory; on a CPU, the memory that is free now besides these
            weights. None if unknown.
    """

    device: str
    weights: int
    optimizer: int
    update: int
    activations: int
    waiting: int
    available: int | None

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return self.weights + self.optimizer + self.update + self.activations + self.waiting


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryEstimate:
    """What `keras_multigpu.memory` has found and printed.

    Args:
        devices: What each device of this process holds.
        global_batch_size: The batch size that the figures are for.
        replicas: How many replicas share a batch.
        in_update: Whether the peak is in the update of the weights, rather than in the forward and
            backward pass.
        helps: Settings that save memory, and what each device would hold with them, in bytes.
        unknown: How many results of operations have an unknown size, and are not counted.
        reason: Why one replica takes the whole batch; None if replicas share it.
    """

    devices: tuple[DeviceMemory, ...]
    global_batch_size: int
    replicas: int
    in_update: bool
    helps: Mapping[str, int]
    unknown: int = 0
    reason: str | None = None

    @property
    def largest(self) -> DeviceMemory:
        """The device that holds the most."""
        return max(self.devices, key=lambda device: device.total)

    @property
    def fits(self) -> bool | None:
        """Whether the devices have enough memory; None if unknown."""
        return self._fits_into(1)

    def _fits_into(self, part: float) -> bool | None:
        """Whether a part of the memory is enough."""
        # CPU devices share the memory of the machine.
        shared = [each for each in self.devices if each.device.startswith("CPU")]
        needs = [(each.total, each.available) for each in self.devices if each not in shared]
        if shared:
            needs.append((sum(each.total for each in shared), shared[0].available))
        if any(available is None for _, available in needs):
            return None
        return all(total <= part * (available or 0) for total, available in needs)

    def __repr__(self) -> str:
        return f"<MemoryEstimate {size_text(self.largest.total)} on {self.largest.device}>"

    @property
    def text(self) -> str:
        """The table that was printed."""
        one = self.largest
        when = "the update" if self.in_update else "the forward and backward pass"
        where = f"each of {len(self.devices)} devices" if len(self.devices) > 1 else one.device
        size = self.global_batch_size
        share = math.ceil(size / self.replicas) if self.reason is None else size
        batch = f"{share} of {size} examples" if self.replicas > 1 else f"{share} examples"
        if len({each.total for each in self.devices}) > 1:
            where = f"{one.device}, the fullest of {len(self.devices)} devices"
        rows = [
            ("weights", one.weights),
            ("optimizer", one.optimizer),
            ("gradients and new values", one.update),
            ("activations", one.activations),
            ("batches in use and waiting", one.waiting),
            ("total", one.total),
        ]
        lines = [f"Peak memory of {where} with {batch}, reached in {when}:"]
        lines += [f"  {name:28}{size_text(size):>10}" for name, size in rows]
        if one.available is not None:
            verdict = "fits" if self._fits_into(TIGHT) else "tight" if self.fits else "does not fit"
            lines[-1] += f" of {size_text(one.available)}: {verdict}"
        if self.reason is not None:
            lines.append(f"  One replica takes the whole batch: {self.reason}.")
        if self.unknown:
            lines.append(f"  Not counted: {self.unknown} results whose size is not known.")
        if self.helps:
            helps = "; ".join(f"{name}: {size_text(size)}" for name, size in self.helps.items())
            lines.append(f"  What would help: {helps}.")
        if any(name.startswith("shard") for name in self.helps):
            lines.append(
                '  In bytes moved, shard="optimizer" costs nothing, "weights" half as many more.'
            )
        return "\n".join(lines)


def memory(
    model: keras.Model,
    x: Any = None,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
) -> MemoryEstimate:
    """Print what a training step will hold on each device, before the first one runs.

    This builds what `fit` builds and traces the step, but computes nothing.

    Args:
        model: A compiled model from `keras_multigpu.distribute`.
        x: A batch, also as `(x, y)`, or anything that `fit` takes: needed if the model's inputs
            leave a length open, or if the model has its own `train_step`.
        y: Targets, if `x` does not include them.
        sample_weight: Sample weights, if `x` does not include them.
        batch_size: The global batch size; by default that of `x`, or 32 as in Keras.

    Returns:
        A `MemoryEstimate`; its `text` is the table.

    Example:

    ```python
    model = kmg.distribute(model)
    model.compile("adam", "sparse_categorical_crossentropy")
    kmg.memory(model, batch_size=256)
    ```
    """
    require_distributed(model)
    if batch_size is not None:
        require_positive_integer("batch_size", batch_size)
    replication = replication_of(model)
    if model.run_eagerly or replication.elsewhere is not None:
        raise value_error(
            "How much memory the step takes is not known.",
            "Expected a step with a graph, on devices of this process.",
            "Compile without `run_eagerly=True`; for servers and TPUs, ask for the same model on "
            "one device.",
            run_eagerly=model.run_eagerly,
            strategy=type(replication.strategy).__name__,
        )
    spec, known = expected_batches(
        model, x, y, sample_weight, batch_size, "kmg.memory(model, ", measures=True
    )
    if x is None and leaves_length_open(spec):
        raise value_error(
            "The model's inputs leave a length open, and memory depends on it.",
            "Expected a batch, or a dataset whose first batch shows the length.",
            "Call `kmg.memory(model, x, y)` with the longest batch that you train on.",
            inputs=[leaf.shape for leaf in present_leaves(spec)],
        )
    size = batch_size or known
    # Split even for one replica, to see whether micro-batches would have to wait for sums.
    replicas = max(replication.group.count, 2)
    step = planned(model, open_spec(spec), size, replicas)
    found = Estimator(model, replication, step, size).estimate()
    # Printing the table is what the function is for.
    print(found.text)  # noqa: T201
    return found


class Estimator:
    """Estimates the memory of a step for batches of `size` examples."""

    def __init__(
        self, model: keras.Model, replication: Replication, step: PartitionedStep, size: int
    ) -> None:
        self._model, self._replication, self._step, self._size = model, replication, step, size
        group = replication.group
        self._devices = [replica.device for replica in group.replicas]
        self._alone = step.unsplit_because is not None and group.count * replication.pieces > 1
        self._share = size if self._alone else math.ceil(size / group.count)
        self._pieces = 1 if self._alone else replication.pieces
        of_optimizers = [v for each in optimizers_of(model) for v in each.variables]
        self._of_optimizers = list({id(v): v for v in of_optimizers}.values())
        self._weights = self._held(model.weights)
        self._optimizer = self._held(self._of_optimizers)
        try:
            self._part = step.local_step.part
        except CannotSplit:
            local = step.local_step
            whole = planned_whole(local.program, local.facts)
            self._part = Part(whole, 1, whole.outs, dict(enumerate(step.variables)))

    def _held(self, variables: list[keras.Variable]) -> dict[str, int]:
        """How many bytes of variables each device holds."""
        found = dict.fromkeys(self._devices, 0)
        for variable in variables:
            for part in parts_or_copies(variable_storage(variable)):
                found[part.device] = found.get(part.device, 0) + bytes_of(part)
        return found

    def estimate(self) -> MemoryEstimate:
        on_batch, after, unknown = self._peaks(self._pieces)
        waiting, devices = self._waiting(), []
        for device in self._devices:
            step = max(on_batch, after, key=lambda held: held.total)
            devices.append(
                DeviceMemory(
                    short_name(device),
                    self._weights[device],
                    self._optimizer[device],
                    step.fixed,
                    step.of_batch,
                    waiting,
                    self._available(device),
                )
            )
        one = max(devices, key=lambda device: device.total)
        in_update = (one.update, one.activations) != on_batch
        reason = str(self._step.unsplit_because) if self._alone else None
        count = self._replication.group.count
        helps = self._helps(one, on_batch, after)
        return MemoryEstimate(tuple(devices), self._size, count, in_update, helps, unknown, reason)

    def _peaks(self, pieces: int) -> tuple[Bytes, Bytes, int]:
        """What a replica holds in the forward and backward pass, and in the update."""
        rows = math.ceil(self._share / pieces)
        # If pieces wait for sums over all of them, all are held.
        rows = self._share if self._step.cost.pieces_wait else rows
        numbers = {BATCH: self._size, OWN + BATCH: rows}
        walk = Liveness(numbers, set(numbers))
        replaces = self._step.traced.request.at_once and not self._step.unsplit_because
        on_batch, after = walk.peaks(self._part, replaces)
        if pieces > 1:
            # The sum of the gradients of earlier pieces.
            on_batch += Bytes(sum(4 * math.prod(v.shape) for v in self._model.trainable_variables))
        return on_batch, after, len(walk.unknown)

    def _waiting(self) -> int:
        """How many bytes the batch in use and the waiting ones take."""
        walk = Liveness({BATCH: self._share}, set())
        inputs, size = self._step.inputs, 0
        specs = tf.nest.flatten(inputs.specs, expand_composites=True)
        for leaf, spec, holds_rows in zip(inputs.leaves, specs, inputs.hold_rows, strict=True):
            dims = None if leaf.dims is None else list(leaf.dims)
            if dims and holds_rows:
                dims[0] = Size.of(BATCH)
            size += walk.bytes_of(dims, spec.dtype) or 0
        return (1 + AHEAD) * size

    def _helps(self, one: DeviceMemory, on_batch: Bytes, after: Bytes) -> dict[str, int]:
        """What a device would hold with other settings."""
        states = one.total - one.update - one.activations
        found: dict[str, int] = {}

        def note(name: str, held: int) -> None:
            if held < one.total:
                found[name] = held

        more = 2 * self._pieces
        if not self._alone and more <= self._share:
            peaks = self._peaks(more)[:2]
            note(f"micro_batches={more}", states + max(each.total for each in peaks))
        if len(self._devices) > 1 and not (self._replication.options.shard or self._alone):
            saved = self._saved_by_dividing(self._of_optimizers)
            held = max(on_batch.total, after.total - saved)
            note('shard="optimizer", about', states - saved + held)
            weights = self._saved_by_dividing(self._model.weights)
            # Two buckets of weights are whole at a time.
            buckets = min(weights, 2 * BUCKET)
            held = max(on_batch.total, after.total - saved - weights)
            note('shard="weights", about', states - saved - weights + buckets + held)
        if all(each.compute_dtype == "float32" for each in model_internals.layers_of(self._model)):
            # Weights are cast as well, and gradients stay.
            half = on_batch.fixed + on_batch.of_batch // 2 + one.weights // 2
            note("mixed_bfloat16, about", states + max(half, after.total))
        return found

    def _saved_by_dividing(self, variables: list[keras.Variable]) -> int:
        """How many bytes each device would save if all of them divided these variables."""
        count = len(self._devices)
        held = sum(bytes_of(v) for v in variables if can_be_divided(v, count))
        return held - math.ceil(held / count)

    def _available(self, device: str) -> int | None:
        if "GPU" in device:
            return memory_of_gpu(int(device.rpartition(":")[2]))
        # The weights and the optimizer's state are there already.
        states = sum([*self._weights.values(), *self._optimizer.values()])
        free = available_bytes()
        return None if free >= 2**62 else free + states


def bytes_of(variable: keras.Variable | tf.Variable) -> int:
    return int(math.prod(variable.shape) * tf.as_dtype(variable.dtype).size)


def memory_of_gpu(number: int) -> int | None:
    """The memory of a GPU in bytes, as its driver reports it; None if it does not."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        done = subprocess.run(
            [*command, *(["-i", visible] if visible else [])],
            capture_output=True,
            text=True,
            check=True,
            timeout=20,
        )
        return int(done.stdout.split()[number]) * 2**20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None
