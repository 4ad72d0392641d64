"""`BatchSizeFinder`: the largest replica batch that fits into memory."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import keras

from keras_multigpu.callbacks.base import RunCallback
from keras_multigpu.callbacks.batch_size_finder.search import SizeSearch, Try, largest_size
from keras_multigpu.callbacks.trials import batches_going_round, same_draws
from keras_multigpu.checks import (
    error_of,
    require_choice,
    require_number,
    require_positive_integer,
    value_error,
)
from keras_multigpu.pictures import BLUE, GREY, INK, PURPLE, RED, one_panel, plain_axes, title
from keras_multigpu.training.run import TrainingRun


class BatchSizeFinder(RunCallback):
    """Finds the largest replica batch that fits into memory, before the first epoch.

    It runs real training steps on all replicas, with 1, 2, 4, 8, ... examples on each until memory
    runs out, then bisects between the last two sizes. Afterwards everything is restored bit for
    bit: model, optimizer, metrics, random numbers, and the position in the data.

    `fit(..., epochs=0)` only searches. The batch size of the data does not matter: the rows of the
    first batch are repeated.

    Args:
        apply: What this `fit` does with the size. `"replica_batch_size"` trains with it.
            `"micro_batches"` keeps the global batch, and splits a replica's part that does not fit
            into micro-batches, in place of those of `compile`. None changes nothing.
        minimum: The first size. It must fit.
        maximum: The largest size to try. By default the number of examples divided by the
            replicas, or unlimited if that is not known.
        margin: The fraction of the largest size that is left unused, for fragmentation and for
            what other callbacks measure. From 0 to below 1; the search is exact to half of it. A
            size limited by `maximum` or the number of examples has no margin.
        steps: How many steps to run with each size. Later ones may need more memory.
        picture: A `.png` file for speed and memory against the size. Needs matplotlib.
        verbose: 1 prints the result, and the progress of a long search; 0 prints nothing.

    Attributes:
        best_replica_batch_size: The size to use, after the margin. None before a search.
        largest_replica_batch_size: The largest size that fitted.
        tries: A `Try` for each size, in order: `replica_batch_size`, `fits`, `seconds` of a step
            (without communication between workers), and `peak_bytes` on GPUs.
    """

    needs = "trial"
    kept = ("best_replica_batch_size", "largest_replica_batch_size")

    def __init__(
        self,
        apply: str | None = "replica_batch_size",
        *,
        minimum: int = 1,
        maximum: int | None = None,
        margin: float = 0.1,
        steps: int = 3,
        picture: str | Path | None = None,
        verbose: int = 1,
    ) -> None:
        super().__init__(picture=picture, verbose=verbose)
        require_choice("apply", apply, ["replica_batch_size", "micro_batches", None])
        require_positive_integer("minimum", minimum)
        require_positive_integer("steps", steps)
        if maximum is not None:
            require_positive_integer("maximum", maximum)
            if maximum < minimum:
                raise value_error(
                    "`maximum` is smaller than `minimum`.",
                    "Expected `minimum <= maximum`.",
                    "Change one of them.",
                    minimum=minimum,
                    maximum=maximum,
                )
        fix = "Pass 0.1 to leave a tenth unused."
        require_number("margin", margin, lambda part: 0 <= part < 1, "from 0 to below 1", fix)
        self.best_replica_batch_size: int | None = None
        self.largest_replica_batch_size: int | None = None
        self.tries: list[Try] = []
        self.apply = apply
        self.minimum = int(minimum)
        self.maximum = maximum
        self.margin = margin
        self.steps = int(steps)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        super().on_train_begin(logs)
        run = self.run
        if self.apply == "micro_batches" and run.global_batch_size is None:
            raise value_error(
                "The global batch cannot be kept, because its size is not known.",
                "Expected data with a known batch size.",
                "Make the data with one of the `keras_multigpu.data.from_*` functions, or pass "
                "`apply=None`.",
                apply="micro_batches",
                data=type(run.data).__name__,
            )
        if self.apply == "replica_batch_size":
            # Data with fixed batches are refused now, not after a search.
            run.first_batches((run.global_batch_size or 0) + 1)
        self.best_replica_batch_size = None
        run.after_begin(lambda: self._begin(run))

    def _begin(self, run: TrainingRun) -> None:
        if self.best_replica_batch_size is not None:
            # Restored: a resumed run already knows its batches.
            return
        with same_draws():
            batch = next(batches_going_round(run))
        search = SizeSearch(run, batch, self.steps, self.say)
        self.tries = search.tries
        # `fit` would compile the step as well, and keep what that draws.
        with run.trial(batch), same_draws():
            found = self._search(run, search)
            outcome = self._applied(run, search)
        self.say(f"{found}; {outcome}.")
        self.draw(size_figure, self.tries, run.replicas, self.best_replica_batch_size)

    def _search(self, run: TrainingRun, search: SizeSearch) -> str:
        examples = number_of_examples(run)
        share = None if examples is None else max(self.minimum, examples // run.replicas)
        limits = [size for size in (self.maximum, share) if size is not None]
        maximum = min(limits, default=None)
        good, bad = largest_size(search.fits, self.minimum, maximum, self.margin / 2)
        if good is None:
            raise_too_little_memory(self.minimum, run.replicas)
        self.largest_replica_batch_size = good
        used = good if bad is None else int(good * (1 - self.margin))
        self.best_replica_batch_size = max(self.minimum, used)
        if bad is None:
            why = "`maximum`" if maximum == self.maximum else "the number of examples"
            return f"{good} examples fit on each replica, the most that {why} allows"
        spare = "" if used == good else f", {self.best_replica_batch_size} with a margin"
        return f"{good} examples fit on each replica and {bad} do not{spare}"

    def _applied(self, run: TrainingRun, search: SizeSearch) -> str:
        """Let training use the size; returns what to say about it."""
        best, replicas, size = self.best_replica_batch_size, run.replicas, run.global_batch_size
        assert best is not None
        if self.apply is None:
            return "nothing is changed"
        if self.apply == "replica_batch_size":
            run.set_batch_size(replicas * best, largest_share=best)
            before = "" if size is None else f" instead of {size}"
            return f"global batches have {replicas * best} examples from now on{before}"
        assert size is not None
        pieces = search.pieces_that_fit(size, best)
        if pieces is None:
            raise_too_little_memory(1, replicas)
        share = math.ceil(size / replicas)
        run.set_batch_size(size, largest_share=math.ceil(share / pieces))
        return (
            f"global batches keep their {size} examples, and each replica computes its {share} in "
            f"{pieces} micro-batch{'es' if pieces > 1 else ''}"
        )


def number_of_examples(run: TrainingRun) -> int | None:
    """How many examples an epoch has at most; None if it is not known."""
    known = getattr(run.data, "num_examples", None)
    if known is None and run.steps_per_epoch and run.global_batch_size:
        known = run.steps_per_epoch * run.global_batch_size
        shape: tuple[int, ...] = getattr(keras.tree.flatten(run.data)[0], "shape", ())
        known = min(known, shape[0]) if len(shape) else known
    return known


def raise_too_little_memory(size: int, replicas: int) -> NoReturn:
    raise error_of(
        MemoryError,
        f"The model does not fit into memory with {size} examples on each replica.",
        "Expected at least `minimum` examples to fit.",
        "Pass a smaller `minimum`, shrink the examples or the model, use mixed precision, or free "
        "other memory of the device.",
        minimum=size,
        replicas=replicas,
    )


def size_figure(tries: Sequence[Try], replicas: int, chosen: int) -> Any:
    """A figure of speed and memory against the replica batch; `chosen` need not have been tried."""
    from matplotlib.ticker import EngFormatter

    figure, axes = one_panel()
    fitted = sorted(one for one in tries if one.fits)
    failed = sorted(one.replica_batch_size for one in tries if not one.fits)
    sizes = [one.replica_batch_size for one in fitted]
    speeds = [replicas * one.replica_batch_size / (one.seconds or 1.0) for one in fitted]
    across = axes.get_xaxis_transform()
    axes.plot(sizes, speeds, "-o", color=BLUE, markersize=5, label="examples a second")
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter("{x:,.6g}")
    axes.set_ylabel("examples a second", color=GREY)
    if failed:
        style = {"color": RED, "markersize": 8, "markeredgewidth": 2, "clip_on": False}
        axes.plot(failed, [0] * len(failed), "x", label="did not fit", transform=across, **style)
    axes.axvline(chosen, color=INK, linewidth=1.2, linestyle="--", label="chosen")
    axes.text(chosen, 1.01, f"{chosen:,}", transform=across, ha="center", fontweight="bold")
    # Doublings have equal widths.
    axes.set_xscale("log", base=2)
    axes.set_xlim(min([chosen, *sizes]) / 2**0.5, max([chosen, *sizes, *failed]) * 2**0.5)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("examples on each replica", color=GREY)
    lines = list(axes.lines)
    if any(one.peak_bytes for one in fitted):
        memory = axes.twinx()
        plain_axes(memory)
        peaks = [one.peak_bytes for one in fitted]
        lines += memory.plot(sizes, peaks, "-s", color=PURPLE, label="peak memory of a GPU")
        memory.set_ylim(bottom=0)
        memory.yaxis.set_major_formatter(EngFormatter(unit="B"))
        memory.grid(visible=False)
    figure.legend(handles=lines, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    together = "1 replica" if replicas == 1 else f"{replicas} replicas together"
    title(figure, "Batch size search", together)
    return figure
