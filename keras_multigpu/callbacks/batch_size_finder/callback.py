"""`BatchSizeFinder`: the largest replica batch that fits into memory."""

import math
from pathlib import Path
from typing import Any, NoReturn

import keras

from keras_multigpu.callbacks.batch_size_finder.figure import size_figure
from keras_multigpu.callbacks.batch_size_finder.search import SizeSearch, Try, largest_size
from keras_multigpu.callbacks.fit_run import batches_going_round, run_to_try, same_draws
from keras_multigpu.checks import (
    error_of,
    require_choice,
    require_number,
    require_positive_integer,
    value_error,
)
from keras_multigpu.pictures import picture_file, write_png
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.writing import say

FOUND = ("best_replica_batch_size", "largest_replica_batch_size")
"""What a search finds, and a run that goes on keeps."""


class BatchSizeFinder(keras.callbacks.Callback):
    """Finds the largest replica batch that fits into memory, before the first epoch.

    It runs real training steps on all replicas, with 1, 2, 4, 8, ... examples on each until memory
    runs out, and then looks between the last two sizes. Afterwards the model, its optimizer,
    metrics and random numbers are what they were, bit for bit, and the data begin where they would
    have.

    To know the size and not train, call `fit(..., epochs=0)`. The data's own batches do not
    matter: the rows of the first one are repeated. All replicas are filled alike, so the global
    batch that is tried is the replica batch times the number of replicas.

    Args:
        apply: What to do with the size in this `fit`. `"replica_batch_size"` makes it every
            replica's share, so that the global batch changes. `"micro_batches"` keeps the
            global batch, and where a share is larger than the size, replicas take it in pieces;
            the numbers stay the same. None changes nothing.
        minimum: Integer, the size to begin with. It has to fit.
        maximum: Integer, the largest size to try. By default an equal share of all examples, or
            without a limit where their number is not known.
        margin: Float from 0 up to 1. This part of the largest size that fits is left unused, for
            memory that later steps or callbacks need, and the search is exact to half of it. A
            size that `maximum` or the number of examples has limited is used whole.
        steps: Integer, how many steps are run with each size. The first one may need less
            than those that follow.
        picture: Where to draw speed and memory against the size, a `.png`. By default nowhere.
        verbose: 1 prints what was found, and the progress of a long search; 0 prints nothing.

    Attributes:
        best_replica_batch_size: The size to use, margin left. None before a search.
        largest_replica_batch_size: The largest size that fitted.
        tries: A `Try` for each size, in order: whether it fitted, seconds of a step, bytes.
            On several workers each has its own, of steps without what they exchange.
    """

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
        super().__init__()
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
        self.picture = picture_file(picture)
        self.verbose = verbose
        self._resumed = False

    @property
    def state(self) -> dict[str, Any]:
        """What was found, for a run that goes on and need not search again."""
        return {name: getattr(self, name) for name in FOUND}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        for name in FOUND:
            setattr(self, name, state[name])
        self._resumed = self.best_replica_batch_size is not None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        run = run_to_try(self)
        if self.apply == "micro_batches" and run.global_batch_size is None:
            raise value_error(
                "The global batch is to be kept, and its size is not known.",
                "Expected data that know their batch size.",
                "Make the data with one of the `keras_multigpu.data.from_*` functions, or pass "
                "`apply=None`.",
                apply="micro_batches",
                data=type(run.data).__name__,
            )
        if self.apply == "replica_batch_size":
            # Data that come in batches of their own are refused now, and not after a search.
            run.first_batches((run.global_batch_size or 0) + 1)
        self._resumed = False
        run.after_begin(lambda: self._begin(run))

    def _begin(self, run: TrainingRun) -> None:
        if self._resumed:
            # A run that goes on knows by itself which batches it takes.
            return
        with same_draws():
            batch = next(batches_going_round(run))
        search = SizeSearch(run, batch, self.steps, self._say)
        self.tries = search.tries
        # Compiling the step is what `fit` would do, and keeps what it draws.
        with run.trial(batch), same_draws():
            found = self._search(run, search)
            outcome = self._applied(run, search)
        self._say(f"{found}; {outcome}.")
        if self.picture is not None:
            assert self.best_replica_batch_size is not None
            figure = size_figure(self.tries, run.replicas, self.best_replica_batch_size)
            write_png(figure, self.picture)

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
        spare = "" if used == good else f", {self.best_replica_batch_size} with room to spare"
        return f"{good} examples fit on each replica and {bad} do not{spare}"

    def _applied(self, run: TrainingRun, search: SizeSearch) -> str:
        """Let training use the size; what is said about it."""
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
            f"global batches keep their {size} examples, and each replica takes its share of "
            f"{share} in {pieces} micro-batch{'es' if pieces > 1 else ''}"
        )

    def _say(self, text: str) -> None:
        if self.verbose:
            say(f"BatchSizeFinder: {text}")


def number_of_examples(run: TrainingRun) -> int | None:
    """How many examples an epoch has, at most; None if that is not known."""
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
        "Expected that at least `minimum` examples fit.",
        "Pass a smaller `minimum`, shrink the examples or the model, or train with "
        "`keras.mixed_precision`; see what else holds memory on the device.",
        minimum=size,
        replicas=replicas,
    )
