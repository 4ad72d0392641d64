"""`Explanation`: which parts of a step replicas share, and what the others cost."""

import collections
import dataclasses
from collections.abc import Iterator, Mapping

from keras_multigpu.partition.planning.cost import StepCost
from keras_multigpu.partition.source_line import place_of
from keras_multigpu.training.steps.batches import BATCH
from keras_multigpu.training.steps.partitioned_step import PartitionedStep

MOST_PARTS = 12


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of a step.

    Args:
        kind: "summed" over the replicas; "scattered", of which each gets its rows; "gathered" from
            them; "weights" that they divide and gather; computed "whole" on each of them; or run
            "once", on the first one.
        place: The line that causes it, such as `train.py:31`, or the operation's name if Keras
            itself does.
        operation: The operation's type in TensorFlow.
        bytes: How many bytes every replica receives for it in a step.
        arithmetic: Its fraction of the step's arithmetic, from 0 to 1.
    """

    kind: str
    place: str
    operation: str
    bytes: int = 0
    arithmetic: float = 0.0


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation:
    """What `keras_multigpu.explain` has found and printed.

    Args:
        step: The name of the step.
        replicas: How many replicas share it.
        global_batch_size: The batch size that the figures are for.
        shared: The fraction of the arithmetic that is split over the replicas, from 0 to 1. Only
            products and convolutions count; None for a step without any.
        summed_bytes: How many bytes are summed over the replicas in a step.
        gathered_bytes: How many bytes replicas gather in a step.
        parts: The sums together, what `shard` moves, and everything that is gathered or not shared,
            largest first.
        reason: Why one replica takes the whole batch; None if it does not.
        times_unsharded: How many times the bytes that a step moves without `shard`.
    """

    step: str
    replicas: int
    global_batch_size: int
    shared: float | None
    summed_bytes: int
    gathered_bytes: int
    parts: tuple[Part, ...]
    reason: str | None = None
    times_unsharded: float = 1.0

    @property
    def summary(self) -> str:
        """One line: `exact; 98 % of the arithmetic is shared; train.py:31 gathers 2.1 MB`."""
        if self.reason is not None:
            return f"exact, but one replica takes the whole batch: {self.reason}"
        # The largest gathers come first.
        gathers = [part for part in self.parts if part.kind == "gathered"]
        phrases = [f"{part.place} gathers {in_bytes(part.bytes)}" for part in gathers[:2]]
        others = gathers[2:]
        if others:
            places = "other place gathers" if len(others) == 1 else "other places gather"
            rest = in_bytes(sum(part.bytes for part in others))
            phrases.append(f"{len(others)} {places} {rest}")
        if not gathers:
            phrases = ["nothing is gathered"]
        if any(part.kind in ("scattered", "weights") for part in self.parts):
            phrases.append(f"moves {self.times_unsharded:.1f} times the bytes of no `shard`")
        return "; ".join(["exact", shared_in_words(self.shared), *phrases])

    def __repr__(self) -> str:
        return f"<Explanation {self.step} on {self.replicas} replicas: {self.summary}>"

    @property
    def text(self) -> str:
        """The table that was printed."""
        batches = f"in batches of {self.global_batch_size}"
        lines = [f"{self.step} on {self.replicas} replicas, {batches}: {self.summary}.", ""]
        if not self.parts:
            return lines[0]
        rows = [("what", "where", "operation", "bytes a step", "arithmetic")]
        rows += [
            (
                part.kind,
                part.place,
                part.operation,
                in_bytes(part.bytes) if part.bytes else "-",
                in_percent(part.arithmetic) if part.arithmetic else "-",
            )
            for part in self.parts[:MOST_PARTS]
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines += [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        ]
        if len(self.parts) > MOST_PARTS:
            lines.append(f"and {len(self.parts) - MOST_PARTS} smaller ones")
        return "\n".join(lines)


def explanation_of(step: PartitionedStep, replicas: int, batch_size: int) -> Explanation:
    """How this many replicas share a training step for batches of this size."""
    numbers = collections.defaultdict(lambda: 1, {BATCH: batch_size})
    cost = step.cost
    return Explanation(
        "train_step",
        replicas,
        batch_size,
        cost.shared(numbers),
        cost.bytes("summed", numbers),
        cost.bytes("gathered", numbers),
        tuple(parts_of(cost, numbers)) if step.unsplit_because is None else (),
        None if step.unsplit_because is None else str(step.unsplit_because),
        cost.times_unsharded(numbers),
    )


def parts_of(cost: StepCost, numbers: Mapping[str, int]) -> Iterator[Part]:
    places = {
        "summed": "gradients, losses, statistics",
        "scattered": "gradients of what replicas divide",
        "weights": "what replicas divide",
    }
    for kind, place in places.items():
        if values := sum(moved.kind == kind for moved in cost.moved):
            count = "1 value" if values == 1 else f"{values} values"
            yield Part(kind, place, count, cost.bytes(kind, numbers))
    gathers: dict[tuple[str, str], int] = collections.Counter()
    for moved in cost.moved:
        if moved.kind == "gathered":
            key = ("results", "") if moved.op is None else (place_of(moved.op), moved.op.type)
            gathers[key] += cost.bytes("gathered", numbers, [moved])
    for (place, name), size in largest_first(gathers):
        yield Part("gathered", place, name, bytes=size)
    everything = cost.flops(numbers)
    wholes: dict[tuple[str, str], int] = collections.Counter()
    for work in cost.work:
        if not work.shared:
            wholes[place_of(work.op), work.op.type] += cost.flops(numbers, [work])
    for (place, name), flops in largest_first(wholes):
        yield Part("whole", place, name, arithmetic=flops / everything if everything else 0.0)
    for op in cost.once:
        yield Part("once", place_of(op), op.type)


def largest_first(found: Mapping[tuple[str, str], int]) -> list[tuple[tuple[str, str], int]]:
    return sorted(found.items(), key=lambda item: -item[1])


def shared_in_words(shared: float | None) -> str:
    if shared is None:
        return "no products or convolutions"
    if shared == 1.0:
        return "all of the arithmetic is shared"
    return f"{in_percent(shared)} of the arithmetic is shared"


def in_percent(fraction: float) -> str:
    """A fraction in percent: 0 or 100 only if it is nothing or everything."""
    percent = 100 * fraction
    if 0 < percent < 1:
        return "less than 1 %"
    return f"{min(int(percent), 99) if fraction < 1 else 100} %"


def in_bytes(size: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size} bytes"
