"""`MemoryEstimate`: what a training step holds on each device, before the first one runs."""

import dataclasses
import functools
import math
import os
import subprocess
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import require_positive_integer, value_error
from keras_multigpu.devices import short_name
from keras_multigpu.host_memory import available_bytes
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.partition.liveness import Bytes, Liveness
from keras_multigpu.training.expected_batches import expected_batches
from keras_multigpu.training.feed.cutter import AHEAD
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.replica_group import copies_of
from keras_multigpu.training.replication import Replication, replication_of
from keras_multigpu.training.shares import Batch, open_spec, present, sized_spec, specs_of
from keras_multigpu.training.steps.one_device import traced_for_one_device
from keras_multigpu.training.steps.planned_step import OWN, PlannedStep
from keras_multigpu.training.variables.owners import owners_of
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.writing import size_text

# Above this part of what a device has, allocators run out: memory is in pieces.
TIGHT = 0.9


@dataclasses.dataclass(frozen=True)
class DeviceMemory:
    """What one device holds at the peak of a step, in bytes.

    Args:
        device: Its name, such as `GPU:0`.
        weights: The model's weights and statistics.
        optimizer: The optimizer's state.
        update: Gradients, new values, and copies of weights: all that the step makes and that does
            not depend on the size of a batch.
        activations: What the step makes of the rows of a batch.
        waiting: The rows of the batch that is trained on, and of those that wait.
        available: How much there is: of a GPU's memory all; of a CPU's what is free now, besides
            these weights. None where it is not known.
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
        """All of it."""
        return self.weights + self.optimizer + self.update + self.activations + self.waiting


@dataclasses.dataclass(frozen=True, repr=False)
class MemoryEstimate:
    """What `model.memory` found. Its text is a table.

    Args:
        devices: What each device of this process holds.
        global_batch_size: The batch size that the figures are for.
        replicas: How many replicas share a batch.
        in_update: Whether most is held when weights are updated, and not while the step works on
            the batch.
        helps: What each device would hold, in bytes, with these settings.
        unknown: How many results of operations have an unknown size, and are not counted.
        reason: Why one replica takes the whole batch; None if it does not.
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
        """The device that holds most."""
        return max(self.devices, key=lambda device: device.total)

    @property
    def fits(self) -> bool | None:
        """Whether the devices have that much; None where that is not known."""
        # CPU devices share the memory of the machine.
        shared = [each for each in self.devices if each.device.startswith("CPU")]
        needs = [(each.total, each.available) for each in self.devices if each not in shared]
        if shared:
            needs.append((sum(each.total for each in shared), shared[0].available))
        if any(available is None for _, available in needs):
            return None
        return all(total <= (available or 0) for total, available in needs)

    def __repr__(self) -> str:
        return f"<MemoryEstimate {size_text(self.largest.total)} on {self.largest.device}>"

    def __str__(self) -> str:
        one = self.largest
        when = "the update" if self.in_update else "the forward and backward pass"
        where = f"each of {len(self.devices)} devices" if len(self.devices) > 1 else one.device
        share = math.ceil(self.global_batch_size / self.replicas)
        if self.reason is not None:
            share = self.global_batch_size
        batch = (
            f"{share} of {self.global_batch_size} examples"
            if self.replicas > 1
            else f"{share} examples"
        )
        if len({dataclasses.replace(each, device="").total for each in self.devices}) > 1:
            where = f"{one.device}, which holds most of {len(self.devices)} devices"
        rows = [
            ("weights", one.weights),
            ("optimizer", one.optimizer),
            ("gradients and new values", one.update),
            ("activations", one.activations),
            ("batches in use and waiting", one.waiting),
            ("together", one.total),
        ]
        lines = [f"Memory on {where} with {batch}, at its most in {when}:"]
        lines += [f"  {name:28}{size_text(size):>10}" for name, size in rows]
        if one.available is not None:
            lines[-1] += f" of {size_text(one.available)}: {self._verdict()}"
        if self.reason is not None:
            lines.append(f"  One replica takes the whole batch: {self.reason}.")
        if self.unknown:
            lines.append(f"  Not counted: {self.unknown} results whose size is not known.")
        if self.helps:
            helps = "; ".join(f"{name}: {size_text(size)}" for name, size in self.helps.items())
            lines.append(f"  Would help: {helps}.")
        return "\n".join(lines)

    def _verdict(self) -> str:
        if not self.fits:
            return "does not fit"
        shared = self.largest.device.startswith("CPU")
        total = sum(each.total for each in self.devices) if shared else self.largest.total
        return "tight" if total > TIGHT * (self.largest.available or 0) else "fits"


def memory_of(
    model: keras.Model, batch_size: int | None, x: Any, y: Any, sample_weight: Any
) -> MemoryEstimate:
    """What a training step of a compiled model will hold."""
    if batch_size is not None:
        require_positive_integer("batch_size", batch_size)
    replication = replication_of(model)
    require_known_kind(model, replication)
    spec, size = expected_batches(
        model, x, y, sample_weight, batch_size, "model.memory(batch_size, "
    )
    spec, size = measured_spec(replication, spec, x, y, sample_weight), batch_size or size
    # What helps depends on it: whether pieces of a batch would wait for sums.
    step = planned(model, replication, spec, size, max(replication.group.count, 2))
    return Estimating(model, replication, step, size).estimate()


def require_known_kind(model: keras.Model, replication: Replication) -> None:
    """Raise where a step has no graph, or runs where this process does not see it."""
    if model.run_eagerly or replication.elsewhere is not None:
        raise value_error(
            "How much memory the step takes is not known.",
            "Expected a step with a graph, on devices of this process.",
            "Compile without `run_eagerly=True`; for servers and TPUs, ask for the same model on "
            "one device.",
            run_eagerly=model.run_eagerly,
            strategy=type(replication.strategy).__name__,
        )


def measured_spec(
    replication: Replication, spec: Batch, x: Any, y: Any, sample_weight: Any
) -> Batch:
    """A batch's specs with all lengths but its number of examples."""
    if any(None in leaf.shape[1:] for leaf in present(spec)):
        if x is None:
            raise value_error(
                "The model's inputs leave a length open, and memory depends on it.",
                "Expected a batch, or a dataset whose first batch shows the length.",
                "Call `model.memory(batch_size, x, y)` with the longest batch that you train on.",
                inputs=[leaf.shape for leaf in present(spec)],
            )
        feed = Feed(replication.cutter, x, y, sample_weight, None)
        spec = specs_of(next(iter(feed.source.first_batches(None))))
    return open_spec(spec)


def planned(
    model: keras.Model, replication: Replication, spec: Batch, size: int, parts: int
) -> PlannedStep:
    """The step, split and not run."""
    replication.placement.prepare(model, spec, "train_step")

    def of(spec: Batch) -> PlannedStep:
        trace = functools.partial(traced_for_one_device, model, model.train_step, spec)
        replication.placement.make_ready(model, spec, trace)
        request = replication.request(model, model.train_step)
        return PlannedStep(request._replace(spec=spec, pieces=1), parts)

    try:
        return of(spec)
    except Exception:  # User code may need to know the batch size.
        return of(sized_spec(spec, size))


class Estimating:
    """Estimates the memory of one step.

    Args:
        model: The model.
        replication: Its replicas.
        step: The step, planned.
        size: How many examples a batch has.
    """

    def __init__(
        self, model: keras.Model, replication: Replication, step: PlannedStep, size: int
    ) -> None:
        self._model, self._replication, self._step, self._size = model, replication, step, size
        group = replication.group
        self._devices = [replica.device for replica in group.replicas]
        self._alone = step.alone is not None and group.count * replication.pieces > 1
        self._share = size if self._alone else math.ceil(size / group.count)
        self._pieces = 1 if self._alone else replication.pieces
        self._facts = step.facts_of_part()
        self._names = step.batch_names
        of_optimizers = [v for each in optimizers_of(model) for v in each.variables]
        self._of_optimizers = list({id(v): v for v in of_optimizers}.values())
        self._divided = step.divided()
        self._weights = self._held(model.weights, {})
        self._optimizer = self._held(self._of_optimizers, self._divided)

    def _held(self, variables: list[keras.Variable], alone: Mapping[int, int]) -> dict[str, int]:
        """How many bytes of variables lie on each device, or will where one is to keep them."""
        found = dict.fromkeys(self._devices, 0)
        for variable in variables:
            copies = copies_of(variable)
            devices = [copy.device for copy in copies]
            if id(copies[0]) in alone:
                devices = [self._devices[alone[id(copies[0])]]]
            for device in devices:
                found[device] = found.get(device, 0) + bytes_of(copies[0])
        return found

    def estimate(self) -> MemoryEstimate:
        """The estimate."""
        on_batch, after, unknown = self._peaks(self._pieces)
        waiting, devices = self._waiting(), []
        for device in self._devices:
            # New values of what others keep are not made here.
            there = self._elsewhere(device)
            step = max(on_batch, after - Bytes(there), key=lambda held: held.total)
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
        reason = str(self._step.alone) if self._alone else None
        count = self._replication.group.count
        helps = self._helps(one, on_batch, after)
        return MemoryEstimate(tuple(devices), self._size, count, in_update, helps, unknown, reason)

    def _peaks(self, pieces: int) -> tuple[Bytes, Bytes, int]:
        """What a replica holds while it works on a batch, and after that."""
        rows = math.ceil(self._share / pieces)
        # Pieces that wait for sums over all of them are all kept.
        rows = self._share if self._step.pieces_wait else rows
        numbers = {name: self._size for name in self._names}
        own = {OWN + name: rows for name in self._names}
        walk = Liveness(numbers | own, set(numbers) | set(own))
        on_batch, after = walk.peaks(self._facts)
        if pieces > 1:
            # The sums of the gradients of earlier pieces.
            on_batch += Bytes(self._gradients())
        return on_batch, after, len({op.name for op in walk.unknown})

    def _gradients(self) -> int:
        return sum(4 * math.prod(v.shape) for v in self._model.trainable_variables)

    def _waiting(self) -> int:
        """The rows of the batch in use, and of those ahead."""
        numbers = {prefix + name: self._share for name in self._names for prefix in ("", OWN)}
        walk = Liveness(numbers, set())
        return (1 + AHEAD) * sum(walk.bytes_of(*each) or 0 for each in self._step.leaves)

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
        if len(self._devices) > 1 and not (self._divided or self._alone):
            kept = self._saved_by_dividing()
            held = max(on_batch.total, after.total - kept)
            note("shard_optimizer=True, about", states - kept + held)
        if all(each.compute_dtype == "float32" for each in model_internals.layers_of(self._model)):
            # Weights are cast as well, and gradients stay.
            half = on_batch.fixed + on_batch.of_batch // 2 + one.weights // 2
            note("mixed_bfloat16, about", states + max(half, after.total))
        return found

    def _elsewhere(self, device: str) -> int:
        """How much of the optimizer's state other devices keep, and this one does not."""
        copies = [copies_of(v)[0] for v in self._of_optimizers]
        places = [(copy, self._divided.get(id(copy))) for copy in copies]
        own = self._devices.index(device)
        return sum(bytes_of(copy) for copy, place in places if place not in (None, own))

    def _saved_by_dividing(self) -> int:
        """How much of the optimizer's state the device with most weights would not keep."""
        owners = owners_of(self._model, self._devices)
        loads = [0] * len(self._devices)
        for weight in self._model.trainable_variables:
            loads[owners[id(weight)]] += math.prod(weight.shape)
        state = [bytes_of(copies_of(v)[0]) for v in self._of_optimizers if math.prod(v.shape) > 1]
        return sum(state) - math.ceil(sum(state) * max(loads) / max(sum(loads), 1))

    def _available(self, device: str) -> int | None:
        if "GPU" in device:
            return memory_of_gpu(int(device.rpartition(":")[2]))
        # They hold these already.
        states = sum([*self._weights.values(), *self._optimizer.values()])
        free = available_bytes()
        return None if free >= 2**62 else free + states


def bytes_of(variable: tf.Variable) -> int:
    return int(variable.shape.num_elements() * variable.dtype.size)


def memory_of_gpu(number: int) -> int | None:
    """How much memory a GPU has, as its driver says; None where there is no answer."""
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
