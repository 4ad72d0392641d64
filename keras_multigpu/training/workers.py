"""Several processes call `fit`, `evaluate` or `predict` together, and must do the same.

Logs and weights are the same on all workers, so callbacks that act on them (`EarlyStopping`,
`ReduceLROnPlateau`) decide alike everywhere. The chief alone writes files.
"""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error
from keras_multigpu.cluster.environment import name_of
from keras_multigpu.cluster.failures import ending_together, naming_others, naming_servers
from keras_multigpu.keras_internals import graph_internals, variable_internals
from keras_multigpu.training.agreement import DIFFERS, known_to_all
from keras_multigpu.training.feed.feed import Execution, Feed
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replication import replication_of
from keras_multigpu.training.steps.same_on_workers import number_of
from keras_multigpu.training.variables.model_state import identity_of_model, rates_of
from keras_multigpu.writing import leave_to_another

WRITERS = (
    keras.callbacks.CSVLogger,
    keras.callbacks.ModelCheckpoint,
    # Keras 3.10 has no `OrbaxCheckpoint`.
    *filter(None, [getattr(keras.callbacks, "OrbaxCheckpoint", None)]),
    keras.callbacks.RemoteMonitor,
    keras.callbacks.TensorBoard,
)
"""Callbacks that only the chief runs, like those of the packages in `TRACKERS`."""

TRACKERS = ("mlflow", "wandb")
"""Packages whose callbacks write the logs of a run."""

LISTENERS = (
    keras.callbacks.History,
    keras.callbacks.LambdaCallback,
    keras.callbacks.ProgbarLogger,
    *WRITERS,
)
"""Callbacks that one worker may have alone: they change nothing and exchange nothing."""


@contextlib.contextmanager
def together(group: ReplicaGroup) -> Iterator[None]:
    """End all processes when one fails, each with an error that names the one that failed."""
    if not group.is_spread:
        with naming_servers():
            yield
        return
    with ending_together(group.workers, group.worker), leave_to_another(not group.is_chief):
        try:
            yield
        except tf.errors.InvalidArgumentError as error:
            if DIFFERS in str(error):
                raise ValueError(DIFFERS) from error
            raise


@contextlib.contextmanager
def while_all_live(group: ReplicaGroup) -> Iterator[None]:
    """Name another process that fails while all of them make variables together."""
    # An error of this process is not announced: the others find and report the same one.
    with naming_others(group.workers, group.worker) if group.is_spread else naming_servers():
        yield


def agreed_seed(group: ReplicaGroup) -> int | None:
    """The same new seed on all workers, which also take Keras's global seed from the chief.

    None if there is one process, or all have the same seed of TensorFlow's: then all shuffle in the
    order of one process.
    """
    if not group.is_spread:
        return None
    state = variable_internals.global_seed_state()
    seed = graph_internals.seed_of_tensorflow()
    with while_all_live(group):
        everyones = group.exchange_numbers([number_of_value(seed), *map(int, state.numpy())])
        state.assign(everyones[0][1:])
        if seed is not None and len({number for number, *_ in everyones}) == 1:
            return None
        own = tf.random.uniform((), maxval=2**31 - 1, dtype=tf.int32)
        return group.exchange_numbers([int(own)])[0][0]


def require_same(group: ReplicaGroup, settings: Mapping[str, Any], fix: str) -> None:
    """Raise a `ValueError` in all processes if the settings of one differ from the chief's."""
    if not group.is_spread:
        return
    with ending_together(group.workers, group.worker):
        of_chief, *others = group.exchange_numbers([number_of_value(v) for v in settings.values()])
    for worker, own in enumerate(others, start=1):
        pairs = zip(settings, of_chief, own, strict=True)
        if differing := [name for name, *pair in pairs if len({*pair}) > 1]:
            first = name_of(group.workers, worker).capitalize()
            error = value_error(
                f"{first} and the chief differ in {' and '.join(differing)}.",
                "Expected the same script and the same data on all workers.",
                fix,
                worker=group.worker,
                **{
                    name.strip("`"): settings[name]
                    for name in differing
                    if not name.startswith("the model") and name != "the data"
                },
            )
            raise known_to_all(group, error)


def require_same_call(group: ReplicaGroup, method: str) -> None:
    """Raise a `ValueError` if workers call different methods: they would wait for each other."""
    require_same(
        group,
        {"the method that they call": method},
        "Call `fit`, `evaluate` and `predict` on every worker, in the same order, and print or "
        "write the results on the chief alone.",
    )


def require_same_run(group: ReplicaGroup, model: keras.Model, feed: Feed, **arguments: Any) -> None:
    """Raise a `ValueError` if workers have different models, data or `arguments`."""
    if not group.is_spread:
        return
    compiled = ("steps_per_execution", "run_eagerly", "jit_compile")
    settings = {
        **{f"the model's {name}": part for name, part in identity_of_model(model).items()},
        "the learning rate": rates_of(model),
        **{f"`{name}`": getattr(model, name) for name in compiled},
        "the arguments of `distribute`": [*replication_of(model).options],
        "the form of a batch": str(feed.source.spec),
        "the batch size": feed.source.batch_size,
        # A worker that reads its own rows only cannot compare the batches themselves.
        "the data": feed.identity() if feed.source.reads_own_rows else None,
        "the number of steps of an epoch": feed.num_batches,
        **{f"`{name}`": value for name, value in arguments.items()},
    }
    require_same(
        group,
        settings,
        "Install the same packages and copy the same script and data to all machines, and make "
        "sure that nothing in them depends on the worker.",
    )


def require_same_epoch(group: ReplicaGroup, model: keras.Model, epoch: int) -> None:
    """Raise a `ValueError` if workers are in different epochs, or have other learning rates."""
    if not group.is_spread:
        return  # To read the rates waits for the devices.
    require_same(
        group,
        {"the epoch": epoch, "the learning rate": rates_of(model)},
        "Give `fit` the same callbacks on each worker, of which none asks which it is, and "
        "`BackupAndRestore` a folder that all workers share.",
    )


def number_of_value(value: Any) -> int:
    # Not `hash`, which differs from process to process.
    return number_of(json.dumps(value, sort_keys=True, default=str).encode())


def steering(callbacks: Any) -> list[str]:
    """The callbacks that every worker needs, by the names of their library classes.

    These are Keras's and this package's, and their subclasses, unless they only listen. A user's
    own callback may be on the chief alone: most of them write something.
    """
    given = single(getattr(callbacks, "callbacks", callbacks))
    classes = (type(each).__mro__ for each in given if not isinstance(each, LISTENERS))
    known = (next(kind for kind in mro if is_of_library(kind)) for mro in classes)
    return [kind.__name__ for kind in known if kind is not keras.callbacks.Callback]


def single(callbacks: Any) -> list[keras.callbacks.Callback]:
    """The callbacks in what `fit` takes: one, or nested lists, perhaps with None."""
    return [each for each in keras.tree.flatten(callbacks or []) if each is not None]


def is_of_library(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("keras", "keras_multigpu")


def is_tracker(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback is one of a package that tracks runs, or extends one."""
    return any(kind.__module__.partition(".")[0] in TRACKERS for kind in type(callback).__mro__)


def may_stop_alone(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback may stop training for a reason that other workers do not see."""
    # A library's own callbacks see only the logs, which all workers share.
    is_ours = is_of_library(type(callback))
    return not is_ours or isinstance(callback, keras.callbacks.LambdaCallback)


def callbacks_here(callbacks: Any, group: ReplicaGroup) -> Any:
    """The callbacks that this worker runs: on all but the chief, those that do not write."""
    if group.is_chief or isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return [
        RestoreOnly(each) if isinstance(each, keras.callbacks.BackupAndRestore) else each
        for each in single(callbacks)
        if not (isinstance(each, WRITERS) or is_tracker(each))
    ]


class RestoreOnly(keras.callbacks.Callback):
    """Restores what the chief's `BackupAndRestore` has saved."""

    def __init__(self, backup: keras.callbacks.BackupAndRestore) -> None:
        super().__init__()
        self._backup = backup

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        # All workers read before the first step, and the chief writes after it.
        self._backup.set_model(self.model)
        self._backup.on_train_begin(logs)


def in_step(
    group: ReplicaGroup, feed: Feed, executions: Iterator[Execution]
) -> Iterator[Execution]:
    """The executions of an epoch, which must end at the same step on all workers.

    Their number is unknown beforehand, so the workers compare notes before each batch.
    """
    while True:
        each = next(executions, None)
        sizes = [size for (size,) in group.exchange_numbers([0 if each is None else each.size])]
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
