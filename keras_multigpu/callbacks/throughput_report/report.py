"""How fast an epoch was, where its time went, what limits it, and a chart of several."""

import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras

from keras_multigpu import pictures
from keras_multigpu.callbacks.throughput_report.end_time import time_of_day
from keras_multigpu.callbacks.throughput_report.forward_flops import TRAINING
from keras_multigpu.callbacks.timing import Timing
from keras_multigpu.data.batches import Batches
from keras_multigpu.training.replication import replication_of
from keras_multigpu.writing import size_text


class Throughput(NamedTuple):
    """How fast an epoch was, and where its time went. Steps that were compiled are left out.

    Attributes:
        epoch: The epoch, from zero.
        devices: The names of the replicas' devices.
        steps: How many steps were measured.
        examples: How many examples they had.
        wall: How many seconds they took.
        parts: These seconds by what they were spent on.
        straggler: How long replicas waited for the slowest, in seconds, on average.
        forward_flops: The operations of the forward pass for one example; None if unknown.
        peak_flops: The peak operations per second of the devices; None if unknown.
        verdict: What limits the speed, and what to try.
        epochs: How many epochs the `fit` has; None if unknown.
        ends: When it will end, in seconds since 1970, if epochs go on taking as long; None after
            the last one, or if unknown.
        peak_memory: The most bytes of memory that each device has used; of a CPU, that its process
            has used since it began. Zero if unknown.
        first_step_memory: The same after the first step of this `fit`.
        slowest: The device whose passes took longest; empty for one replica, or if unknown.
        exchanges: How many exchanges with other workers a step has, and the bytes that each replica
            gives to them, None if unknown; None without other workers.
        hidden: How long replicas exchanged sums while they computed, in seconds, on average.
    """

    epoch: int
    devices: list[str]
    steps: int
    examples: float
    wall: float
    parts: dict[str, float]
    straggler: float
    forward_flops: int | None = None
    peak_flops: float | None = None
    verdict: str = ""
    epochs: int | None = None
    ends: float | None = None
    peak_memory: Sequence[int] = ()
    first_step_memory: Sequence[int] = ()
    slowest: str = ""
    exchanges: Sequence[int | None] | None = None
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
        if self.forward_flops is None:
            return None
        return TRAINING * self.forward_flops * self.examples_per_second

    @property
    def utilisation(self) -> float | None:
        """The fraction of the devices' peak that the model uses; None if unknown."""
        done = self.flops_per_second
        return None if done is None or not self.peak_flops else done / self.peak_flops

    def as_json(self) -> dict[str, Any]:
        numbers: dict[str, Any] = {
            "examples_per_second": self.examples_per_second,
            "examples_per_second_per_device": self.examples_per_second_per_device,
            "step_time": self.step_time,
            "flops_per_second": self.flops_per_second,
            "utilisation": self.utilisation,
        }
        return jsonable({**self._asdict(), **numbers, "shares": self.shares})

    def __str__(self) -> str:
        return "\n".join([*self._lines(), self.verdict])

    def _lines(self) -> list[str]:
        epoch = f"{self.epoch + 1} of {self.epochs}" if self.epochs else f"{self.epoch + 1}"
        end = f"; ends about {time_of_day(self.ends, time.time())}" if self.ends else ""
        lines = [f"Throughput of epoch {epoch} ({self.steps} steps, compiling left out){end}"]
        if not self.steps:
            return lines
        each = f"{number(self.examples_per_second_per_device)} on each of {len(self.devices)}"
        lines.append(line("examples a second", number(self.examples_per_second), each))
        lines.append(line("step", f"{self.step_time * 1e3:.2f} ms", "100%"))
        for name, seconds in self.parts.items():
            label = "  " + LABELS[name]
            text = f"{seconds / self.steps * 1e3:.2f} ms"
            lines.append(line(label, text, f"{self.shares[name]:.0%}"))
        if self.forward_flops is not None:
            note = "peak_flops= adds the utilisation"
            if self.utilisation is not None:
                note = f"{self.utilisation:.1%} of the devices' peak"
            done = self.flops_per_second or 0.0
            unit, factor = ("T", 1e12) if done >= 1e12 else ("G", 1e9)
            lines.append(line("model FLOPs", f"{done / factor:.3g} {unit}/s", note))
        if self.exchanges:
            count, size = self.exchanges
            name = "exchange" if count == 1 else "exchanges"
            each = "sizes vary" if size is None else size_text(size)
            lines.append(line("exchanged", each, f"in {count} {name} of a step"))
            waited, hidden = (
                f"{seconds / self.steps * 1e3:.2f} ms"
                for seconds in (self.parts.get("all_reduce", 0.0), self.hidden)
            )
            slowest = f"; slowest: {self.slowest}" if self.slowest else ""
            lines.append(line("  waited for", waited, f"{hidden} hidden by compute{slowest}"))
        if any(self.peak_memory):
            most = max(self.peak_memory)
            place = self.peak_memory.index(most)
            first = size_text(self.first_step_memory[place])
            where = place_of_memory(self.devices[place])
            lines.append(line("peak memory", size_text(most), f"{where}; {first} after one step"))
        return lines


LABELS = {
    "data_wait": "wait for data",
    "compute": "compute",
    "all_reduce": "all-reduce",
    "host": "host",
    "step": "step, as a whole",
}


def place_of_memory(device: str) -> str:
    """Where the memory is that a device uses: a CPU's is that of the process."""
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


def line(*columns: str) -> str:
    return f"  {columns[0]:<20}{columns[1]:>12}   {columns[2]}"


def number(value: float) -> str:
    """A speed with three digits or more."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def throughput_of(epoch: int, devices: list[str], timing: Timing) -> Throughput:
    """The report of an epoch whose steps were looked into."""
    sums = timing.sums
    seconds = {"compute": sums.step_compute, "all_reduce": sums.step_all_reduce}
    parts = fitted(timing.wall, {"data_wait": timing.data_wait, **seconds})
    straggler = max(parts["compute"] - float(sums.compute.mean()), 0.0)
    examples = float(sums.examples.sum())
    found = Throughput(epoch, devices, timing.steps, examples, timing.wall, parts, straggler)
    found = found._replace(hidden=float(sums.step_hidden))
    slowest = devices[int(sums.compute.argmax())] if sums.compute.any() else ""
    return found._replace(slowest=slowest if len(devices) > 1 else "")


def unseen_throughput(
    epoch: int, devices: list[str], timing: Timing, batch_size: int | None
) -> Throughput:
    """The report of an epoch whose steps were not looked into; all batches count as full."""
    parts = fitted(timing.wall, {"data_wait": timing.data_wait, "step": timing.in_steps})
    examples = float(timing.steps * batch_size) if batch_size else math.nan
    return Throughput(epoch, devices, timing.steps, examples, timing.wall, parts, 0.0)


def fitted(wall: float, parts: dict[str, float]) -> dict[str, float]:
    """Parts that are never negative and, with the host's, add up to the wall time."""
    left, found = max(wall, 0.0), {}
    for name, seconds in parts.items():
        # Two clocks are involved, so the sum may exceed it by microseconds.
        found[name] = min(max(seconds, 0.0), left)
        left -= found[name]
    return {**found, "host": left}


NOTABLE = 0.2
"""From which fraction on a part other than computation limits the speed."""

NAMES = {
    "data_wait": "input-bound: {share:.0%} waiting",
    "all_reduce": "communication-bound: {share:.0%} in the all-reduce",
    "host": "host-bound: {share:.0%} outside of the devices",
    "straggler": "held up by the slowest replica{slowest}: {share:.0%} waiting for it",
    "compute": "compute-bound: {share:.0%} computing",
    "step": "bound by the step: {share:.0%} in it",
}

UNSEEN = ". The parts of this `train_step` cannot be seen"


def verdict_on(found: Throughput, model: keras.Model, data: Any) -> str:
    """What limits the speed and what to try, in one sentence."""
    if not found.steps:
        return "Nothing was measured: every step of the epoch was compiled. Train longer."
    shares = dict(found.shares)
    shares["straggler"] = found.straggler / found.wall if found.wall else 0.0
    inside = "step" if "step" in shares else "compute"
    candidates = {k: v for k, v in shares.items() if k != inside and v >= NOTABLE}
    limit = max(candidates, key=lambda name: candidates[name]) if candidates else inside
    tries = {
        "data_wait": faster_input(data),
        "all_reduce": less_communication(model),
        "host": less_dispatch(model),
        "straggler": [
            "`ReplicaMetrics`, which shows whether it always is",
            "checking what else runs on its device",
        ],
        "compute": faster_steps(model),
        "step": faster_steps(model),
    }[limit]
    slowest = f", {found.slowest}" if found.slowest else ""
    limited = NAMES[limit].format(share=shares[limit], slowest=slowest)
    return f"{limited}; try {', '.join(tries)}{UNSEEN if inside == 'step' else ''}"


def faster_input(data: Any) -> list[str]:
    if isinstance(data, Batches):
        settings = data.reading().settings
        tries = [] if settings["cache"] else ['cache="memory" or a folder']
        tries.append("a larger replica batch")
        if settings["augment"] is not None:
            tries.append("moving the augmentation into the first layers of the model")
        if data.file_paths:
            tries.append('resize="random_crop" or a smaller image_size= when the files are read')
        return tries
    return [
        "one of `kmg.data.from_*`, with cache=",
        "`.cache()` and `.prefetch(tf.data.AUTOTUNE)` on a `tf.data.Dataset`",
        "a larger replica batch",
    ]


def less_communication(model: keras.Model) -> list[str]:
    tries = ["a larger replica batch (with micro_batches= if memory is short)"]
    # Also in mixed precision: gradients have the type of the variables, which is float32.
    if not replication_of(model).half_sums:
        tries.append('kmg.distribute(sum_dtype="bfloat16"), which rounds gradients')
    tries.append("faster links between the devices, or fewer devices")
    return tries


def less_dispatch(model: keras.Model) -> list[str]:
    tries = []
    if model.run_eagerly:
        tries.append("compile(run_eagerly=False)")
    elif model.steps_per_execution == 1:
        # Nearly halves a step that is all dispatch; see docs/benchmarks.md.
        tries.append("compile(steps_per_execution=8)")
    if not model.jit_compile and not model.run_eagerly:
        tries.append("compile(jit_compile=True)")
    tries.append("a larger replica batch")
    tries.append("callbacks that do less work after each step")
    return tries


def faster_steps(model: keras.Model) -> list[str]:
    tries = []
    if model.compute_dtype == "float32":
        tries.append('mixed precision: keras.config.set_dtype_policy("mixed_bfloat16")')
    if not model.jit_compile and not model.run_eagerly:
        tries.append("compile(jit_compile=True)")
    tries.append("more devices")
    return tries


COLORS = {
    "data_wait": pictures.ORANGE,
    "compute": pictures.BLUE,
    "step": pictures.BLUE,
    "all_reduce": pictures.PURPLE,
    "host": pictures.PALE,
}


def throughput_figure(reports: Sequence[Throughput]) -> Any:
    figure = pictures.narrow_figure(5.6)
    bars, speed = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    epochs = [report.epoch + 1 for report in reports]
    below = [0.0] * len(reports)
    for name in reports[0].parts:
        heights = [report.parts[name] / report.steps * 1e3 for report in reports]
        bars.bar(epochs, heights, 0.7, below, color=COLORS[name], label=LABELS[name])
        below = [low + height for low, height in zip(below, heights, strict=True)]
    bars.set_ylabel("milliseconds a step", color=pictures.GREY)
    speed.plot(epochs, [r.examples_per_second for r in reports], "-o", color=COLORS["compute"])
    speed.set_ylim(bottom=0)
    speed.yaxis.set_major_formatter("{x:,.6g}")
    speed.set_ylabel("examples a second", color=pictures.GREY)
    for axes in (bars, speed):
        pictures.plain_axes(axes)
        axes.locator_params(axis="x", integer=True)
    speed.set_xlabel("epoch", color=pictures.GREY)
    handles, labels = bars.get_legend_handles_labels()
    style = {"ncols": len(labels), "frameon": False, "fontsize": 9}
    figure.legend(handles, labels, loc="outside lower center", **style)
    pictures.title(figure, "Throughput", reports[-1].verdict.partition(";")[0])
    return figure
