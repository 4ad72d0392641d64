"""Several processes call `fit`, `evaluate` or `predict` together: alike, and to one end.

Logs and weights are the same on all workers, so callbacks that steer by them (`EarlyStopping`,
`ReduceLROnPlateau`) decide alike everywhere. Files are written by the chief alone.
"""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu import identities
from keras_multigpu.checks import value_error
from keras_multigpu.cluster.failures import ending_together, naming_others, naming_servers
from keras_multigpu.cluster.lifelines import name_of
from keras_multigpu.keras_internals import variable_internals
from keras_multigpu.training.feed.feed import Feed, Group
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.steps.same_on_workers import DIFFERS, known_to_all, number_of
from keras_multigpu.training.variables.model_state import identity_of_model, rates_of
from keras_multigpu.writing import left_to_another

ONLY_WRITE = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    # Older versions of Keras have none.
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""What the chief alone runs."""


ONLY_HEAR = (
    keras.callbacks.History,
    keras.callbacks.LambdaCallback,
    keras.callbacks.ProgbarLogger,
    *ONLY_WRITE,
)
"""What may be on one worker alone: it changes nothing and exchanges nothing by itself."""

SHOWN = ("verbose", "path", "picture", "folder", "backup_dir")
"""Arguments of callbacks that say what is shown and where it is written, on this worker."""

KNOWN = ("keras", "keras_multigpu")

HOW = ("steps_per_execution", "run_eagerly", "jit_compile")


@contextlib.contextmanager
def together(group: ReplicaGroup) -> Iterator[None]:
    """Let a failure of one process end all of them, each with a sentence that names it."""
    if not group.is_spread:
        with naming_servers():
            yield
        return
    with ending_together(group.workers, group.worker), left_to_another(not group.is_chief):
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if DIFFERS in str(error):
                raise ValueError(DIFFERS) from error
            raise


@contextlib.contextmanager
def while_all_live(group: ReplicaGroup) -> Iterator[None]:
    """Name another process that fails while variables are made, which all do together.

    What this one finds wrong itself the others find as well, and say it in their own words.
    """
    with naming_others(group.workers, group.worker) if group.is_spread else naming_servers():
        yield


def agreed_seed(group: ReplicaGroup) -> int | None:
    """A seed that all processes have in common, and with it the chief's global seed of Keras.

    None where there is one process.
    """
    if not group.is_spread:
        return None
    state = variable_internals.global_seed_state()
    own = tf.random.uniform((), maxval=2**31 - 1, dtype=tf.int32)
    with while_all_live(group):
        seed, *of_chief = group.of_processes([int(own), *map(int, state.numpy())])[0]
    state.assign(of_chief)
    return seed


def require_same_call(group: ReplicaGroup, method: str) -> None:
    """Raise a `ValueError` where processes call different methods, and wait for each other."""
    if not group.is_spread:
        return
    with ending_together(group.workers, group.worker):
        first, *others = group.of_processes([number_of_value(method)])
    for worker, of_worker in enumerate(others, start=1):
        if of_worker != first:
            error = value_error(
                f"{name_of(group.workers, worker).capitalize()} and the chief call different "
                f"methods.",
                "Expected `fit`, `evaluate` and `predict` in the same order on all workers.",
                "Call them on every worker, and print or write the results on the chief alone.",
                called_here=method,
            )
            raise known_to_all(group, error)


def require_same_run(group: ReplicaGroup, model: keras.Model, feed: Feed, **arguments: Any) -> None:
    """Raise a `ValueError` where processes train different models, or on batches of other kinds.

    Of further arguments, too, each process must have the same.
    """
    if not group.is_spread:
        return
    with identities.with_all_code():
        parts = {"class": identities.of_class(type(model)), **identity_of_model(model)}
        settings = {
            **{f"the model's {name}": part for name, part in parts.items()},
            "the learning rate": rates_of(model),
            **{f"`{name}`": getattr(model, name) for name in HOW},
            "the arguments of `distribute`": [*replication_of(model).options],
            "the form of a batch": str(feed.source.spec),
            "the batch size": feed.source.batch_size,
            # Where each reads its own rows, none can see whether all have read the same batch.
            "the data": feed.identity() if feed.source.here else None,
            "the number of steps of an epoch": feed.num_batches,
            **{f"`{name}`": value for name, value in arguments.items()},
        }
    numbers = [number_of_value(value) for value in settings.values()]
    with ending_together(group.workers, group.worker):
        first, *others = group.of_processes(numbers)
    for worker, of_worker in enumerate(others, start=1):
        differing = [
            what for what, *pair in zip(settings, first, of_worker, strict=True) if len({*pair}) > 1
        ]
        if differing:
            error = value_error(
                f"{name_of(group.workers, worker).capitalize()} and the chief differ in "
                f"{' and '.join(differing)}.",
                "Expected the same script and the same data on all workers.",
                "Install the same packages and copy the same script and data to all machines, and "
                "make sure that nothing in them depends on the worker.",
                worker=group.worker,
                **{
                    what.strip("`"): settings[what]
                    for what in differing
                    if not what.startswith("the model") and what != "the data"
                },
            )
            raise known_to_all(group, error)


def steering(callbacks: Any) -> list[Any]:
    """What all workers must have: callbacks that change the training, or exchange values.

    Those of Keras and of this package do, and what inherits from them. What the user's own do is
    not known; most of them write something on the chief.
    """
    given = getattr(callbacks, "callbacks", callbacks)
    flat = [each for each in keras.tree.flatten(given or []) if each is not None]
    steer = [each for each in flat if known(each) and not isinstance(each, ONLY_HEAR)]
    return [
        {
            name: part
            for name, part in identities.of_object(each, (), known(each)).items()
            if name not in SHOWN
        }
        for each in steer
    ]


def known(callback: Any) -> list[type]:
    """Which of Keras's classes of callbacks, or of this package's, a callback is."""
    # Other arguments of a user's subclass may be specific to this worker, such as a file.
    kinds = [each for each in type(callback).__mro__ if each is not keras.callbacks.Callback]
    return [each for each in kinds if each.__module__.partition(".")[0] in KNOWN]


def require_same_rates(group: ReplicaGroup, model: keras.Model) -> None:
    """Raise a `ValueError` where a callback has changed the learning rate on some workers only."""
    if not group.is_spread:
        return
    rates = rates_of(model)
    numbers = [number for (number,) in group.of_processes([number_of_value(rates)])]
    if len({*numbers}) > 1:
        error = value_error(
            "The workers have different learning rates, so their weights would drift apart.",
            "Expected a callback that changes the rate on all of them.",
            "Give `fit` the same callbacks on each worker, and let none of them ask which it is.",
            rates=rates,
        )
        raise known_to_all(group, error)


def in_step(
    group: ReplicaGroup, feed: Feed, batches: Iterator[tuple[int, Group]]
) -> Iterator[tuple[int, Group]]:
    """The batches of an epoch, which must end in all processes at the same step."""
    # If the number is unknown beforehand, the processes ask each other before each batch.
    if not group.is_spread or feed.source.is_countable:
        return batches
    return told_to_all(group, feed, batches)


def told_to_all(
    group: ReplicaGroup, feed: Feed, batches: Iterator[tuple[int, Group]]
) -> Iterator[tuple[int, Group]]:
    """The batches of an epoch, which ends on all workers when one has none."""
    while True:
        each = next(batches, None)
        sizes = [size for (size,) in group.of_processes([0 if each is None else each[1].size])]
        shortest = sizes.index(min(sizes))
        if sizes[shortest] < max(sizes):
            error = value_error(
                f"The data of {name_of(group.workers, shortest)} ended before that of others.",
                "Expected the same batches on all workers.",
                "Give all of them the same files, or end the data after the same number of "
                "batches, for example with `dataset.take`.",
                batches=feed.done,
            )
            raise known_to_all(group, error)
        if each is None:
            return
        yield each


class Stopping:
    """Whether a loop stops after a step: on all workers as soon as one of them wants to.

    It tells the others in their next step, which then changes nothing; where steps cannot, workers
    ask each other after each.

    Args:
        asks: Whether they may differ in this.

    Attributes:
        asks_others: Whether there are others to ask.
        asked_for: Whether this worker wants to stop; in the end, whether one does.
    """

    def __init__(self, group: ReplicaGroup, asks: bool) -> None:
        self._group, self._asks = group, asks
        self.asks_others = asks and group.is_spread
        self._in_step = self.asked_for = False

    def __enter__(self) -> "Stopping":
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if self._in_step:
            self._tell(False)
            if kind is None:
                # There may have been no next step.
                self.asked_for = self._group.agree(self.asked_for)

    def has_dropped_step(self) -> bool:
        """Whether the last step has changed nothing, because a worker wants to stop."""
        if not self._in_step or self._group.stop_flags[1].numpy():
            return False
        self._group.stop_flags[1].assign(True)
        self.asked_for = True
        return True

    def follows(self, asked_for: bool, in_step: bool) -> bool:
        """Whether to stop now, given what this worker wants, and whether the next step can tell."""
        self._in_step = in_step
        if in_step:
            if asked_for != self.asked_for:
                self._tell(asked_for)
        elif self._asks:
            asked_for = self._group.agree(asked_for)
        self.asked_for = asked_for
        return asked_for and not in_step

    def _tell(self, asked_for: bool) -> None:
        self._group.stop_flags[0].assign(float(asked_for))


def may_stop_alone(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback may know more than the logs, which are the same in all processes."""
    # Keras's own and this package's do not, except one that calls the user's functions.
    of_keras = type(callback).__module__.partition(".")[0] in KNOWN
    return not of_keras or isinstance(callback, keras.callbacks.LambdaCallback)


def number_of_value(value: Any) -> int:
    # Not by `hash`, which differs from process to process.
    return number_of(json.dumps(value, sort_keys=True, default=str).encode())


def of_this_worker(callbacks: Any, group: ReplicaGroup) -> Any:
    if group.is_chief or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    flat = [callback for callback in keras.tree.flatten(callbacks or []) if callback is not None]
    return [
        OnlyReads(each) if isinstance(each, keras.callbacks.BackupAndRestore) else each
        for each in flat
        if not isinstance(each, ONLY_WRITE)
    ]


class OnlyReads(keras.callbacks.Callback):
    """What other workers do of the chief's `BackupAndRestore`: begin with what was saved."""

    def __init__(self, backup: keras.callbacks.BackupAndRestore) -> None:
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # All have read before the first step, and the chief writes after it.
        self._backup.set_model(self.model)
        self._backup.on_train_begin(logs)


def require_same_start(group: ReplicaGroup, epoch: int) -> None:
    """Raise a `ValueError` where processes would begin in different epochs."""
    epochs = [epoch for (epoch,) in group.of_processes([epoch])]
    if len({*epochs}) > 1:
        error = value_error(
            "The workers start at different epochs.",
            "Expected each to read the backup that the chief wrote.",
            "Give `BackupAndRestore` a folder that all workers share.",
            epochs=epochs,
        )
        raise known_to_all(group, error)
