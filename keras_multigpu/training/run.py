"""`TrainingRun`: the progress of a call of `fit`, and what callbacks may do with it."""

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.keras_internals import compile_internals, graph_internals, model_internals
from keras_multigpu.keras_internals.replacing import replaced
from keras_multigpu.training.feed.feed import Feed
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.shares import Batch, open_spec, symbolic
from keras_multigpu.training.variables.model_state import ModelState
from keras_multigpu.training.watching.probe import P
from keras_multigpu.training.watching.standstill import Standstill

AFTER = ("on_epoch_begin", "on_train_batch_end", "on_test_end", "on_epoch_end")
"""The hooks for `TrainingRun.after_each`."""


class TrainingRun:
    """The progress of `fit`, for callbacks: `model.training_run`, while `fit` runs.

    Attributes:
        epoch: The epoch in progress, from zero.
        step: How many of its steps are done, including the current one in `on_train_batch_end`.
        epochs: The epoch to stop before.
        logs: The logs of the last step.
        callbacks: All callbacks of this `fit`, in order.
        data: The `x` of `fit`.
        replicas: The number of replicas in all processes.
        in_steps: Seconds that steps have run, including compilation but not waiting for data.
        step_began: When the last call of the training function began, by `time.perf_counter`.
        last_hook: The last hook of `after_each` that was called on all callbacks; None while an
            epoch's first or last hook is called on one after another.
        validation_feed: Where validation batches come from, if there are any.
        feed: Where batches come from. For this package's callbacks: its interface may change.
        group: The replicas, and how they exchange values. Its interface may change, too.
    """

    def __init__(
        self, model: keras.Model, feed: Feed, callbacks: Any, epochs: int, initial_epoch: int
    ) -> None:
        self.epoch, self.step, self.epochs = initial_epoch, 0, epochs
        self.logs: dict[str, Any] = {}
        self.callbacks: list[keras.callbacks.Callback] = list(callbacks.callbacks)
        self.feed, self.data = feed, feed.data
        self._model, self._replication = model, replication_of(model)
        self.group = self._replication.group
        self.replicas = self.group.count
        self.in_steps = self.step_began = 0.0
        self.last_hook: str | None = None
        self.validation_feed: Feed | None = None
        self._list = callbacks
        self._acts: dict[str, list[Callable[[], None]]] = {
            moment: [] for moment in ("begin", *AFTER, "failure", "end")
        }
        self._next_size: int | None = None
        self._largest_share: int | None = None
        self._is_restored = False
        self._pieces = self._replication.pieces

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps of this epoch; None if unknown."""
        return self.feed.num_batches

    @property
    def global_batch_size(self) -> int | None:
        """The number of examples of a step; None if it varies with the batches."""
        return self.feed.source.batch_size

    @property
    def micro_batches(self) -> int:
        """The number of pieces in which each replica takes its share of a batch."""
        return self._replication.pieces

    @property
    def is_eager(self) -> bool:
        """Whether Python starts each step: without a graph, or on workers elsewhere."""
        return bool(self._model.run_eagerly) or self._replication.elsewhere is not None

    @property
    def data_wait(self) -> float:
        """Seconds that training has waited for data."""
        return self.feed.waited

    # For `on_train_begin`.

    def after_begin(self, act: Callable[[], None]) -> None:
        """Call `act` after `on_train_begin` of all callbacks, before the first epoch."""
        self._acts["begin"].append(act)

    def after_each(self, hook: str, act: Callable[[], None]) -> None:
        """Call `act` after a hook has been called on all callbacks.

        This is not a callback hook, so logs can stay on the devices.

        Args:
            hook: `"on_epoch_begin"`, `"on_train_batch_end"`, `"on_test_end"` (of validation) or
                `"on_epoch_end"`.
            act: What to call.
        """
        self._acts[hook].append(act)

    def after_failure(self, act: Callable[[], None]) -> None:
        """Call `act` when `fit` ends with an error, on any worker; before `after_end`."""
        self._acts["failure"].append(act)

    def after_end(self, act: Callable[[], None]) -> None:
        """Call `act` when `fit` ends, even with an error."""
        self._acts["end"].append(act)

    def watch(self, probe: P) -> P:
        """Add a probe to every training step until `fit` ends.

        Returns:
            The probe to read: that of an earlier `fit` if it has the same `settings`.
        """
        return self._replication.watch(probe)

    # For any time.

    def set_batch_size(self, global_batch_size: int, largest_share: int | None = None) -> None:
        """Change the batch size from the next epoch on; in `on_train_begin`, from the first one.

        Args:
            global_batch_size: The number of examples of a step.
            largest_share: The most examples that a replica takes in one piece.
        """
        self._next_size, self._largest_share = global_batch_size, largest_share

    def first_batches(self, global_batch_size: int | None = None) -> Iterator[Batch]:
        """Batches from the beginning of the data, for trials; `fit` still trains on all of them."""
        return self.feed.source.first_batches(global_batch_size)

    @contextlib.contextmanager
    def trial(self, batch: Batch) -> Iterator[None]:
        """Restore the model after the steps in this context, and hide them from probes.

        Args:
            batch: One of the batches to come, to create all variables first.
        """
        pieces = self._replication.pieces
        with replaced(self._replication, "probes", ()):
            self._make_step(open_spec(batch))
            before = ModelState.of(self._model)
            try:
                yield
            finally:
                self._replication.pieces = pieces
                before.restore(self._model)

    def train_on(self, batch: Batch, micro_batches: int | None = None) -> dict[str, Any]:
        """Run one training step outside the epochs and return its logs, as tensors.

        Args:
            batch: The global batch.
            micro_batches: The number of pieces in which each replica takes its share, without
                another try if they do not fit into memory. By default as in `fit`.
        """
        return self._replication.run_batch(self._model, "train", batch, micro_batches)

    # To stop and resume.

    @property
    def state(self) -> dict[str, Any]:
        """The progress of training, in numbers, lists and arrays; see `restore`."""
        anchor = self.feed.source.anchor
        return {
            "epoch": self.epoch,
            "step": self.step,
            "global_batch_size": self.global_batch_size,
            "micro_batches": self.micro_batches,
            "compiled_micro_batches": self._pieces,
            "anchor": None if anchor is None else list(anchor),
            "next_batch_size": self._next_size,
            "largest_share": self._largest_share,
            "logs": {
                name: value if isinstance(value, float) else np.asarray(value)
                for name, value in pythonic(self.logs).items()
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from `state`; only before the first epoch.

        If the place in the data cannot be computed, batches are read and dropped. The training step
        is compiled, so that all variables exist and can be assigned their values.
        """
        self.epoch, self.step, self.logs = state["epoch"], state["step"], dict(state["logs"])
        self._next_size = state["next_batch_size"]
        self._largest_share = state["largest_share"]
        self._resize(state["global_batch_size"])
        # If the user has changed `micro_batches`, the new number counts.
        is_same = self._pieces == state["compiled_micro_batches"]
        pieces = state["micro_batches"] if is_same else self._pieces
        # With fewer replicas than before, shares are larger.
        self._replication.pieces = max(pieces, self._pieces_of(state["global_batch_size"]))
        self._is_restored = True
        skipped = self.feed.go_to(self.epoch, self.step, state["anchor"])
        spec = self.feed.source.spec or skipped
        if spec is not None:
            self._make_step(spec, not self.feed.source.reads_own_rows)

    # For the loop of `fit`.

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Show callbacks the run as `model.training_run`, and clean up after it."""
        replication, attributes = self._replication, self._model.__dict__
        # A callback of one `fit` may call another.
        outer, probes = attributes.get("training_run"), replication.probes
        # Not an attribute for Keras to track or save.
        attributes["training_run"], replication.probes = self, ()
        try:
            yield
        except Exception:
            self._act("failure")
            raise
        finally:
            replication.spare = replication.probes or replication.spare
            attributes["training_run"], replication.probes = outer, probes
            if outer is None:
                del attributes["training_run"]
            if not replication.finds_pieces:
                replication.pieces = self._pieces
            with contextlib.ExitStack() as ends:
                # All of them run, even if one fails.
                for act in (*reversed(self._acts["end"]), replication.end):
                    ends.callback(act)

    def watching(self) -> contextlib.AbstractContextManager[None]:
        """Say so if training stands still in this context."""

        def counts() -> list[Any]:
            return [self._replication.calls, self.feed.done, self.epoch, self.last_hook]

        def place() -> str:
            return f"epoch {self.epoch + 1}, step {self.step + 1}"

        group = self.group
        of_workers = (group.workers, group.worker) if group.is_spread else ()
        return Standstill(counts, place, *of_workers).watching()

    def begin(self) -> None:
        """Let callbacks restore a run, and go to where training starts."""
        self._act("begin")
        # A callback such as `BackupAndRestore` may have set the number of the epoch.
        self.epoch = model_internals.initial_epoch(self._model) or self.epoch
        if not self._is_restored:
            self.feed.rewind(self.epoch)

    def begin_epoch(self, epoch: int) -> None:
        """Begin an epoch, or continue one that was interrupted."""
        if epoch != self.epoch:
            self.epoch, self.step = epoch, 0
        if not self.step:
            self._model.reset_metrics()
            size, self._next_size = self._next_size, None
            if size is not None:
                if self._resize(size):
                    self.feed.rewind(epoch)
                self._replication.pieces = self._pieces_of(size)

    def call(self, hook: str, *arguments: Any) -> None:
        """Call an epoch's first or last hook on all callbacks, and then what comes after it."""
        self.last_hook = None
        getattr(self._list, hook)(*arguments)
        self.call_after(hook)

    def call_after(self, hook: str) -> None:
        self.last_hook = hook
        self._act(hook)

    def _act(self, moment: str) -> None:
        for act in self._acts[moment]:
            act()

    @contextlib.contextmanager
    def timed_call(self) -> Iterator[None]:
        """A call of the training function."""
        self.step_began, waited = time.perf_counter(), self.feed.waited
        yield
        waited = self.feed.waited - waited
        self.in_steps += time.perf_counter() - self.step_began - waited

    def _resize(self, size: int | None) -> bool:
        """Change the batch size, unless it is unknown; whether it is another one."""
        if size is None or size == self.feed.source.batch_size:
            return False
        self.feed.resize(size, self.epoch)
        self._list.set_params({**self._list.params, "steps": self.feed.num_batches})
        return True

    def _pieces_of(self, size: int | None) -> int:
        """In how many pieces replicas take their shares of a batch of this size."""
        if not self._largest_share or size is None:
            return self._pieces
        return math.ceil(math.ceil(size / self.replicas) / self._largest_share)

    def _make_step(self, spec: Batch, all_here: bool = True) -> None:
        if self._model.run_eagerly:
            # There is nothing to compile, and building the model makes all variables.
            with graph_internals.single_device():
                compile_internals.build_model(self._model, symbolic(spec))
        else:
            self._replication.step_functions(self._model, "train").make(spec, all_here)


def pythonic(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs as Keras's callbacks and `History` have them: flat, sorted, of Python numbers."""
    return flattened(numbers(logs))


def numbers(logs: Any) -> Any:
    """Nested logs, with Python numbers for scalars and arrays for the rest, if they can be."""
    # Keras's own `pythonify_logs` flattens, which `evaluate` must not do to a metric's dictionary.
    if isinstance(logs, dict):
        return {name: numbers(value) for name, value in logs.items()}
    if logs is None or isinstance(logs, tf.SparseTensor):
        return logs
    value = logs.numpy() if isinstance(logs, tf.RaggedTensor) else np.asarray(logs)
    # A string of TensorFlow's is an object.
    return float(value) if value.ndim == 0 and value.dtype != object else value


def flattened(logs: dict[str, Any]) -> dict[str, Any]:
    """Logs without nesting, sorted by name on each level, as in Keras."""
    flat: dict[str, Any] = {}
    for name, value in sorted(logs.items()):
        flat.update(flattened(value) if isinstance(value, dict) else {name: value})
    return flat
