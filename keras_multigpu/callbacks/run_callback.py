"""`RunCallback`, the base class of all callbacks."""

from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.checks import value_error
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.workers import is_tracker
from keras_multigpu.writing import say


class RunCallback(keras.callbacks.Callback):
    """A Keras callback for distributed models that knows where `fit` is.

    Subclasses set the class attributes below. An overridden `on_train_begin` calls
    `super().on_train_begin(logs)` first, which checks model and order before the first step.

    Args:
        verbose: Whether `say` prints.

    Attributes:
        writes: The logs that it adds. Callbacks that read them must come later in the list.
        saved: The attributes that `ResumableCheckpoint` saves, and restores after `on_train_begin`
            of all callbacks: numbers, text, None, NumPy arrays, and lists and dicts of these. For
            anything else override `state`.
        single: Whether one `fit` may have only one.
    """

    writes: Sequence[str] = ()
    saved: Sequence[str] = ()
    single: bool = False

    def __init__(self, *, verbose: int = 1) -> None:
        super().__init__()
        self.verbose = verbose
        self._began_at = 0
        self._asked_at: dict[int, int] = {}

    @property
    def run(self) -> TrainingRun:
        """The running `fit`; a `ValueError` if there is none, as in stock Keras."""
        run: TrainingRun | None = getattr(self.model, "training_run", None)
        if run is None:
            raise value_error(
                f"`{type(self).__name__}` needs a running `fit` of a distributed model.",
                "Expected a model of `keras_multigpu.distribute`: in stock Keras no callback knows "
                "where `fit` is, looks inside a step, tries one, or changes what follows.",
                "Write `model = kmg.distribute(model)` before `compile`, which also works on one "
                "device, or leave out the callback.",
                model=type(self.model).__name__,
            )
        return run

    @property
    def state(self) -> dict[str, Any]:
        """What `ResumableCheckpoint` saves and restores: by default the attributes in `saved`."""
        return {name: getattr(self, name) for name in self.saved}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        for name in self.saved:
            setattr(self, name, state[name])

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self.run.after_each("on_epoch_begin", self._epoch_begun)
        require_order(self, self.run.callbacks)

    def every(self, steps: int, batch: int) -> bool:
        """Whether the epoch has just completed another `steps` steps, for `on_train_batch_end`.

        A resumed epoch counts from its beginning. With `steps_per_execution` this is true when the
        next execution ends.
        """
        before, done = self._asked_at.get(steps, self._began_at), batch + 1
        self._asked_at[steps] = done
        return done // steps > before // steps

    def say(self, text: str) -> None:
        """Print a line on one worker, unless `verbose` is 0."""
        if self.verbose:
            say(f"{type(self).__name__}: {text}")

    def _epoch_begun(self) -> None:
        self._began_at, self._asked_at = self.run.step, {}


def require_order(callback: RunCallback, callbacks: Sequence[keras.callbacks.Callback]) -> None:
    """Raise a `ValueError` if a callback has the wrong place in the list."""
    name, names = type(callback).__name__, [type(each).__name__ for each in callbacks]
    place = next((place for place, each in enumerate(callbacks) if each is callback), None)
    if place is None:
        # Another callback calls it, and is responsible for the order.
        return
    if callback.single and sum(type(each) is type(callback) for each in callbacks) > 1:
        raise value_error(
            f"There is more than one `{name}` in this `fit`.",
            "Expected at most one, because both would do the same work.",
            callbacks=names,
        )
    for other in callbacks[:place]:
        # These write all logs; `EarlyStopping` and others name the one that they read.
        writers = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)
        reads_all = isinstance(other, writers) or is_tracker(other)
        if callback.writes and (reads_all or getattr(other, "monitor", None) in callback.writes):
            raise value_error(
                f"{type(other).__name__} comes before {name} and would miss "
                f"{' and '.join(f'`{one}`' for one in callback.writes)}.",
                f"Expected {name} before all callbacks that read the logs.",
                f"Move {name} to the front of `callbacks`.",
                callbacks=names,
            )
