"""How fast an epoch was, and where its time went; and the picture of several."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from keras_multigpu import pictures
from keras_multigpu.callbacks.throughput_report.forward_flops import TRAINING
from keras_multigpu.callbacks.timing import Timing


class Scaling(NamedTuple):
    """What more replicas bring.

    Attributes:
        replicas: The number of replicas.
        one: Examples a second of one replica, with its share of the batch.
        all: Examples a second of all replicas.
        shared: Whether the devices are parts of one processor, which then cannot become faster.
    """

    replicas: int
    one: float
    all: float
    shared: bool

    @property
    def speedup(self) -> float:
        """How many times as fast all are as one."""
        return self.all / self.one

    @property
    def efficiency(self) -> float:
        """The speedup for each replica; 1 is the best."""
        return self.speedup / self.replicas


class Throughput(NamedTuple):
    """How fast an epoch was, and where its time went. Steps that were compiled are left out.

    Attributes:
        epoch: The epoch, from zero.
        devices: The names of the replicas' devices.
        steps: How many steps were measured.
        examples: How many examples they had.
        wall: How many seconds they took.
        parts: These seconds by what they were spent on.
        straggler: How many seconds of the computation replicas waited for the slowest, on average.
        forward_flops: The operations of the forward pass for one example; None if unknown.
        peak_flops: The operations a second that the devices can do at most; None if unknown.
        scaling: What more replicas bring, if it was measured.
        verdict: What limits the speed, and what to try.
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
    scaling: Scaling | None = None
    verdict: str = ""

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
    def state(self) -> dict[str, Any]:
        """What `from_state` makes a report of again."""
        return {**self._asdict(), "scaling": self.scaling and self.scaling._asdict()}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> "Throughput":
        scaling = state["scaling"]
        return cls(**{**state, "scaling": scaling and Scaling(**scaling)})

    @property
    def flops_per_second(self) -> float | None:
        """The model's operations a second in training; None if unknown."""
        if self.forward_flops is None:
            return None
        return TRAINING * self.forward_flops * self.examples_per_second

    @property
    def utilisation(self) -> float | None:
        """The part of the devices' peak that the model uses; None if unknown."""
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
        scaling = self.scaling
        if scaling is not None:
            ratios = {"speedup": scaling.speedup, "efficiency": scaling.efficiency}
            numbers["scaling"] = {**scaling._asdict(), **ratios}
        return jsonable({**self._asdict(), **numbers, "shares": self.shares})

    def __str__(self) -> str:
        return "\n".join([*self._lines(), self.verdict])

    def _lines(self) -> list[str]:
        lines = [f"Throughput of epoch {self.epoch + 1} ({self.steps} steps, compiling left out)"]
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
        if self.scaling is not None:
            all_of_them, speedup = self.scaling.replicas, f"{self.scaling.speedup:.2f} x"
            note = "; these devices share one processor" if self.scaling.shared else ""
            efficiency = f"efficiency {self.scaling.efficiency:.0%}{note}"
            lines.append(line(f"scaling 1 -> {all_of_them}", speedup, efficiency))
        return lines


LABELS = {
    "data_wait": "wait for data",
    "compute": "compute",
    "all_reduce": "all-reduce",
    "host": "host",
    "step": "step, as a whole",
}


def jsonable(value: Any) -> Any:
    """A value as strict JSON can hold it, which knows no NaN and no infinity."""
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
    """What was measured in an epoch, taken apart."""
    of_steps, computed = timing.sums.of_steps, timing.sums.of_replicas("compute")
    seconds = {name: of_steps(name) for name in ("compute", "all_reduce")}
    parts = fitted(timing.wall, {"data_wait": timing.data_wait, **seconds})
    straggler = max(parts["compute"] - float(computed.mean()), 0.0)
    examples = float(timing.sums.of_replicas("examples").sum())
    return Throughput(epoch, devices, timing.steps, examples, timing.wall, parts, straggler)


def unseen_throughput(
    epoch: int, devices: list[str], timing: Timing, batch_size: int | None
) -> Throughput:
    """The same where nothing inside the step is seen; all batches count as full."""
    parts = fitted(timing.wall, {"data_wait": timing.data_wait, "step": timing.in_steps})
    examples = float(timing.steps * batch_size) if batch_size else math.nan
    return Throughput(epoch, devices, timing.steps, examples, timing.wall, parts, 0.0)


def fitted(wall: float, parts: dict[str, float]) -> dict[str, float]:
    """Parts that are never negative and, with the host's, add up to the wall time."""
    left, found = max(wall, 0.0), {}
    for name, seconds in parts.items():
        # Two clocks are involved, so their sum may exceed it by microseconds.
        found[name] = min(max(seconds, 0.0), left)
        left -= found[name]
    return {**found, "host": left}


COLORS = {
    "data_wait": pictures.ORANGE,
    "compute": pictures.BLUE,
    "step": pictures.BLUE,
    "all_reduce": pictures.PURPLE,
    "host": pictures.PALE,
}


def throughput_figure(reports: Sequence[Throughput]) -> Any:
    figure = pictures.new_figure((9.5, 4.4))
    bars, speed = figure.subplots(1, 2, sharex=True, width_ratios=(3, 2))
    epochs = [report.epoch + 1 for report in reports]
    below = [0.0] * len(reports)
    for name in reports[0].parts:
        heights = [report.parts[name] / report.steps * 1e3 for report in reports]
        bars.bar(epochs, heights, 0.7, below, color=COLORS[name], label=LABELS[name])
        below = [low + height for low, height in zip(below, heights, strict=True)]
    bars.set_ylabel("milliseconds a step", color=pictures.GREY)
    speed.plot(epochs, [r.examples_per_second for r in reports], "-o", color=COLORS["compute"])
    speed.set_ylim(bottom=0)
    speed.set_ylabel("examples a second", color=pictures.GREY)
    for axes in (bars, speed):
        pictures.plain_axes(axes)
        axes.set_xlabel("epoch", color=pictures.GREY)
        axes.locator_params(axis="x", integer=True)
    handles, labels = bars.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower left", ncols=len(labels), frameon=False)
    pictures.title(figure, "Throughput", reports[-1].verdict.partition(";")[0])
    return figure
