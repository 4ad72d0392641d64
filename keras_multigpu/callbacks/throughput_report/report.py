"""How fast an epoch was, where its time went, and what limits it."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras

from keras_multigpu.callbacks.timing import Timing
from keras_multigpu.data.batches import Batches
from keras_multigpu.data.pipeline.source import Source
from keras_multigpu.training.replication import replication_of
from keras_multigpu.writing import size_text


class Throughput(NamedTuple):
    """How fast an epoch was, and where its time went, without the steps that were compiled.

    Attributes:
        epoch: The epoch, from zero.
        devices: The names of the replicas' devices.
        steps: How many steps were measured.
        examples: How many examples they had.
        wall: How many seconds they took.
        parts: These seconds by what they were spent on.
        straggler: The seconds that replicas waited for the slowest, on average.
        step_flops: The operations of a step of mean size, forward and backward; None if unknown.
        peak_flops: The peak operations per second of the devices; None if unknown.
        verdict: What limits the speed, and what to try.
        peak_memory: The peak bytes of memory of each device until the end of the epoch; for a CPU,
            of its process since it started. Zero if unknown.
        slowest: The device whose passes took longest; empty for one replica, or if unknown.
        hidden: The seconds in which replicas exchanged sums while they computed, on average.
    """

    epoch: int
    devices: list[str]
    steps: int
    examples: float
    wall: float
    parts: dict[str, float]
    straggler: float
    step_flops: int | None = None
    peak_flops: float | None = None
    verdict: str = ""
    peak_memory: Sequence[int] = ()
    slowest: str = ""
    hidden: float = 0.0

    @property
    def examples_per_second(self) -> float:
        """Examples a second of all replicas; NaN if no step was measured."""
        return self.examples / self.wall if self.steps and self.wall > 0 else math.nan

    @property
    def examples_per_second_per_device(self) -> float:
        """Examples a second of one replica."""
        return self.examples_per_second / len(self.devices)

    @property
    def step_time(self) -> float:
        """Seconds for each step."""
        return self.wall / self.steps if self.steps else math.nan

    @property
    def shares(self) -> dict[str, float]:
        """Each part of the wall time, from 0 to 1."""
        wall = self.wall
        return {name: part / wall if wall else 0.0 for name, part in self.parts.items()}

    @property
    def flops_per_second(self) -> float | None:
        """The model's operations a second in training; None if unknown."""
        if self.step_flops is None or self.wall <= 0:
            return None
        return self.step_flops * self.steps / self.wall

    @property
    def utilisation(self) -> float | None:
        """The fraction of the devices' peak that the model uses; None if unknown."""
        done = self.flops_per_second
        return None if done is None or not self.peak_flops else done / self.peak_flops

    def as_json(self) -> dict[str, Any]:
        derived = (
            "examples_per_second",
            "examples_per_second_per_device",
            "step_time",
            "flops_per_second",
            "utilisation",
            "shares",
        )
        return jsonable({**self._asdict(), **{name: getattr(self, name) for name in derived}})

    def __str__(self) -> str:
        heading = f"Throughput of epoch {self.epoch + 1} ({self.steps} steps, compiling left out)"
        rows = [f"  {label:<20}{value:>12}   {note}" for label, value, note in self._rows()]
        return "\n".join([heading, *map(str.rstrip, rows), self.verdict])

    def _rows(self) -> Iterator[tuple[str, str, str]]:
        """The label, value and note of each line."""
        if not self.steps:
            return

        def milliseconds(seconds: float) -> str:
            return f"{seconds / self.steps * 1e3:.2f} ms"

        each = f"{number(self.examples_per_second_per_device)} on each of {len(self.devices)}"
        yield "examples a second", number(self.examples_per_second), each
        yield "step", milliseconds(self.wall), "100%"
        for name, seconds in self.parts.items():
            note = f"{self.shares[name]:.0%}"
            if name == "all_reduce" and self.hidden:
                note += f", and {milliseconds(self.hidden)} hidden by compute"
            yield "  " + LABELS[name], milliseconds(seconds), note
        if (done := self.flops_per_second) is not None:
            used = self.utilisation
            note = "" if used is None else f"{used:.1%} of the devices' peak"
            unit, factor = ("T", 1e12) if done >= 1e12 else ("G", 1e9)
            yield "model FLOPs", f"{done / factor:.3g} {unit}/s", note
        if any(self.peak_memory):
            most = max(self.peak_memory)
            place = self.peak_memory.index(most)
            yield "peak memory", size_text(most), describe_memory_of(self.devices[place])


LABELS = {
    "data_wait": "wait for data",
    "compute": "compute",
    "all_reduce": "all-reduce",
    "host": "host",
    "step": "step, as a whole",
}


def describe_memory_of(device: str) -> str:
    """Whose memory a device uses: a CPU uses that of its process."""
    name, _, worker = device.partition(" of ")
    if name.startswith("CPU"):
        return f"of the process of {worker}" if worker else "of the process"
    return f"on {device}"


def jsonable(value: Any) -> Any:
    """A value for strict JSON, which has no NaN and no infinity."""
    if isinstance(value, dict):
        return {name: jsonable(one) for name, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def number(value: float) -> str:
    """A speed with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def throughput_of(epoch: int, devices: list[str], timing: Timing) -> Throughput:
    """The report of an epoch whose steps a probe could inspect."""
    sums = timing.sums
    seconds = {"compute": sums.step_compute, "all_reduce": sums.step_all_reduce}
    parts = split_wall_time(timing.wall, {"data_wait": timing.data_wait, **seconds})
    return Throughput(
        epoch,
        devices,
        timing.steps,
        float(sums.examples.sum()),
        timing.wall,
        parts,
        straggler=max(parts["compute"] - float(sums.compute.mean()), 0.0),
        slowest=devices[sums.compute.argmax()] if len(devices) > 1 and sums.compute.any() else "",
        hidden=float(sums.step_hidden),
    )


def opaque_throughput(
    epoch: int, devices: list[str], timing: Timing, batch_size: int | None
) -> Throughput:
    """The report of an epoch whose steps no probe could inspect; all batches count as full."""
    seconds = {"data_wait": timing.data_wait, "step": timing.in_steps}
    parts = split_wall_time(timing.wall, seconds)
    examples = float(timing.steps * batch_size) if batch_size else math.nan
    return Throughput(epoch, devices, timing.steps, examples, timing.wall, parts, 0.0)


def split_wall_time(wall: float, parts: dict[str, float]) -> dict[str, float]:
    """The parts, never negative, and the rest of the wall time, which is the host's."""
    left, found = max(wall, 0.0), {}
    for name, seconds in parts.items():
        # Two clocks are involved, so the parts may exceed the wall time by microseconds.
        found[name] = min(max(seconds, 0.0), left)
        left -= found[name]
    return {**found, "host": left}


NOTABLE = 0.2
"""The fraction of the time from which a part other than computation limits the speed."""


def verdict_on(found: Throughput, model: keras.Model, data: Any) -> str:
    """What limits the speed and what to try, in one sentence."""
    if not found.steps:
        return "Nothing was measured: every step of the epoch was compiled. Train longer."
    shares = dict(found.shares)
    shares["straggler"] = found.straggler / found.wall if found.wall else 0.0
    inside = "step" if "step" in shares else "compute"
    candidates = [name for name in shares if name != inside and shares[name] >= NOTABLE]
    limit = max(candidates, key=shares.__getitem__, default=inside)
    slowest = f", {found.slowest}" if found.slowest else ""
    limited = {
        "data_wait": "input-bound: {} waiting",
        "all_reduce": "communication-bound: {} in the all-reduce",
        "host": "host-bound: {} outside of the devices",
        "straggler": f"held up by the slowest replica{slowest}: {{}} waiting for it",
        "compute": "compute-bound: {} computing",
        "step": "bound by the step: {} in it",
    }[limit].format(f"{shares[limit]:.0%}")
    tries = [each for helps, each in remedies(limit, model, data) if helps]
    opaque = ". The parts of this `train_step` cannot be seen" if inside == "step" else ""
    return f"{limited}; try {', '.join(tries)}{opaque}"


def remedies(limit: str, model: keras.Model, data: Any) -> list[tuple[Any, str]]:
    """What to try against a limit of the speed, each after whether it applies."""
    # Elsewhere XLA would compile each stage of a step; see docs/gpus.md.
    compiles_whole = replication_of(model).is_one_program and not model.run_eagerly
    jit = compiles_whole and not model.jit_compile, "compile(jit_compile=True)"
    larger = True, "a larger replica batch"
    if limit == "data_wait" and isinstance(data, Batches):
        settings = data.reading().settings
        can_cache = isinstance(data.reading().source, Source)
        augments = settings["augment"] is not None
        crop = 'resize="random_crop" or a smaller image_size= when the files are read'
        return [
            (can_cache and not settings["cache"], 'cache="memory" or a folder'),
            larger,
            (augments, "moving the augmentation into the first layers of the model"),
            (data.file_paths, crop),
        ]
    if limit == "data_wait":
        return [
            (True, "one of `kmg.data.from_*`, with cache="),
            (True, "`.cache()` and `.prefetch(tf.data.AUTOTUNE)` on a `tf.data.Dataset`"),
            larger,
        ]
    if limit == "all_reduce":
        return [
            (True, "a larger replica batch (with micro_batches= if memory is short)"),
            (True, "faster links between the devices, or fewer devices"),
        ]
    if limit == "host":
        # Several steps per call nearly halve a step that is all dispatch; see docs/benchmarks.md.
        single = not model.run_eagerly and model.steps_per_execution == 1
        return [
            (model.run_eagerly, "compile(run_eagerly=False)"),
            (single, "compile(steps_per_execution=8)"),
            jit,
            larger,
            (True, "callbacks that do less work after each step"),
        ]
    if limit == "straggler":
        return [
            (True, "`ReplicaMetrics`, which shows whether it always is"),
            (True, "checking what else runs on its device"),
        ]
    mixed = 'mixed precision: keras.config.set_dtype_policy("mixed_bfloat16")'
    return [(model.compute_dtype == "float32", mixed), jit, (True, "more devices")]
