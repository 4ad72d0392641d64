"""The loops of `fit`, `evaluate` and `predict`: Keras's contract, on public parts.

Keras's own loops cannot be used: they consume a batch to build the model, lose batches of
generators, and report wrong batch indices when one call runs several steps.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import value_error, warn
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.keras_internals.model_internals import overridden
from keras_multigpu.training import fit_arguments, workers
from keras_multigpu.training.announcing import announce
from keras_multigpu.training.feed.feed import Execution, Feed
from keras_multigpu.training.feed.sources import knows_epochs
from keras_multigpu.training.replica_group import ReplicaGroup
from keras_multigpu.training.replication import accumulates, replication_of
from keras_multigpu.training.run import TrainingRun, flattened, numbers
from keras_multigpu.training.shares import join_shares

LOOK_AT_LOGS = (keras.callbacks.TensorBoard, keras.callbacks.TerminateOnNaN)
STOPS = {"train": "stop_training", "test": "stop_evaluating", "predict": "stop_predicting"}
"""The attribute of a model with which callbacks end an epoch."""


def train(
    model: keras.Model,
    feed: Feed,
    validation: "Validation | None",
    callbacks: Any,
    verbose: Any,
    epochs: int,
    initial_epoch: int,
) -> keras.callbacks.History:
    """Run the epochs of `fit`."""
    most = keras.config.max_epochs()
    if most and most < epochs:  # As in Keras.
        warn(f"Limiting epochs to {most}", stacklevel=3)
        epochs = most
    replication = replication_of(model)
    group = replication.group
    build(
        model,
        feed,
        "train_step",
        epochs=epochs,
        initial_epoch=initial_epoch,
        validation_freq=validation and validation.frequency,
        callbacks=workers.steering(callbacks),
    )
    if validation is not None and not validation.draws:
        validation.begin(model)
    announce(replication, model, verbose)
    callbacks = callback_list(model, group, callbacks, verbose, feed.num_batches, epochs)
    model.stop_training = False
    run = TrainingRun(model, feed, callbacks, epochs, initial_epoch)
    logs: dict[str, Any] = {}
    with run.running(), workers.together(group), feed.reading(), run.watching():
        callbacks.on_train_begin()
        run.begin()
        workers.require_same_epoch(group, model, run.epoch)
        for epoch in range(run.epoch, epochs):
            run.begin_epoch(epoch)
            run.call("on_epoch_begin", epoch)
            workers.require_same_epoch(group, model, epoch)
            epoch_logs = run_epoch(model, feed, callbacks, "train", run)
            if not epoch_logs:
                break
            logs = epoch_logs
            if validation is not None and validation.is_due(epoch):
                run.validation_feed = validation.begin(model)
                # As in Keras, the user may have overridden `evaluate`.
                found = model.evaluate(
                    **validation.arguments,
                    callbacks=callbacks,
                    return_dict=True,
                    **{model_internals.VALIDATES: True},
                )
                logs |= {f"val_{name}": value for name, value in found.items()}
                run.call_after("on_test_end")
            run.call("on_epoch_end", epoch, logs)
            # A user's callback may have stopped this worker only, and the others would wait.
            model.stop_training = group.any_worker(bool(model.stop_training))
            if model.stop_training:
                break
        # As in Keras: with `use_ema=True` the averages become the weights.
        if isinstance(model.optimizer, keras.optimizers.Optimizer) and epochs > 0:
            model.optimizer.finalize_variable_values(model.trainable_weights)
        callbacks.on_train_end(logs=logs)
    return model.history


def build(model: keras.Model, feed: Feed, method: str, **compared: Any) -> None:
    """Compare the workers, check the data, and build the model for a method that takes them."""
    replication = replication_of(model)
    # First, because to make a variable is an exchange, in which workers that differ would wait.
    require_fitting(model, feed, method, **compared)
    predicts = method == "predict_step"
    with workers.while_all_live(replication.group):
        replication.placement.prepare(model, feed.source.spec, method=None if predicts else method)
    if not predicts:
        require_labels(model, feed)


def require_fitting(
    model: keras.Model, feed: Feed, method: str, validates: bool = False, **compared: Any
) -> None:
    """Raise a `ValueError` if workers differ, or a model cannot take the data."""
    group = replication_of(model).group
    workers.require_same_run(group, model, feed, **compared)
    fit_arguments.require_fitting_data(model, feed.source.spec, method, group.count, validates)


def require_labels(model: keras.Model, feed: Feed) -> None:
    """Check the labels of `Batches`, which know how many classes they have."""
    own = overridden(model, "train_step", "test_step", "compute_loss")
    if knows_epochs(feed.data) and feed.source.spec is not None and not own:
        classes = len(feed.data.class_counts or ())
        fit_arguments.require_units(model, feed.source.spec[1], classes)


def executions(model: keras.Model, feed: Feed, callbacks: Any, mode: str) -> Iterator[Execution]:
    """The executions of an epoch, until a callback of any worker stops it."""
    group, stop = replication_of(model).group, STOPS[mode]
    # Only the chief may have such callbacks, but all workers must ask or none.
    asks = group.any_worker(
        listens(callbacks, mode) and any(map(workers.may_stop_alone, callbacks.callbacks))
    )
    begin = getattr(callbacks, f"on_{mode}_batch_begin")
    found = feed.epoch(model.steps_per_execution)
    if group.is_spread and not feed.source.is_countable:
        found = workers.in_step(group, feed, found)
    for execution in found:
        begin(execution.first)
        yield execution
        stops = bool(getattr(model, stop))
        if group.any_worker(stops) if asks else stops:
            setattr(model, stop, True)
            return


def run_epoch(
    model: keras.Model, feed: Feed, callbacks: Any, mode: str, run: TrainingRun | None = None
) -> dict[str, Any]:
    """Run an epoch of training ("train") or evaluation ("test"), and return its last logs.

    The logs are nested as the step returned them, because Keras's callbacks sort each level. They
    are empty if earlier epochs have read all data.
    """
    replication = replication_of(model)
    listened, looked_at = (listens(callbacks, mode, bars) for bars in (True, False))
    end = getattr(callbacks, f"on_{mode}_batch_end")
    logs: dict[str, Any] = {} if run is None or not run.step else run.logs
    if mode == "train" and accumulates(model):
        # Nobody may see the sums of a replica before they are added to those of the others.
        replication.open_sums.allow(not replication.group.any_worker(looked_at))
    for execution in executions(model, feed, callbacks, mode):
        if not execution.first and feed.source.spec is None:
            # A generator's first batch.
            (first, *_) = execution.batches
            count = replication.group.count
            fit_arguments.require_fitting_data(model, first.spec, f"{mode}_step", count)
        with contextlib.nullcontext() if run is None else run.timed_call():
            logs = replication.run(model, mode, execution)
        if run is not None:
            run.step, run.logs = feed.done, logs
        if looked_at:
            replication.copy_back()
        if listened:
            end(execution.first + execution.size - 1, logs)
        if run is not None:
            run.call_after("on_train_batch_end")
    replication.open_sums.allow(False)
    # Workers of parameter servers may still be computing the last logs.
    logs = replication.settle() or logs
    if not logs and not feed.has_come:
        raise_no_data("fit" if mode == "train" else "evaluate")
    if logs and overridden(model, f"{mode}_step", "get_metrics_result"):
        replication.copy_back()
        logs = model_internals.end_of_epoch(model, logs)
    return numbers(logs)


class Validation:
    """When and on what `fit` validates.

    Args:
        frequency: Every so many epochs, or a list of epochs, counted from one.
        **arguments: What `evaluate` is called with, in case the user has overridden it.

    Attributes:
        draws: Whether looking at the data may draw numbers that plain Keras draws after the first
            epoch.
    """

    def __init__(self, frequency: Any, **arguments: Any) -> None:
        x = arguments["x"]
        self.draws = isinstance(x, keras.utils.PyDataset) and not knows_epochs(x)
        fit_arguments.require_validation_data(fit_arguments.is_empty(x))
        self.frequency, self.arguments = frequency, arguments
        self._feed: Feed | None = None

    def begin(self, model: keras.Model) -> Feed:
        """The feed of the data, which are looked at and checked the first time."""
        if self._feed is None:
            self._feed = Feed(replication_of(model).cutter, **self.arguments)
            fit_arguments.require_validation_data(self._feed.source.num_batches == 0)
            require_fitting(model, self._feed, "test_step", validates=True)
            require_labels(model, self._feed)
        return self._feed

    def is_due(self, epoch: int) -> bool:
        if isinstance(self.frequency, (list, tuple)):
            return epoch + 1 in self.frequency
        return bool((epoch + 1) % self.frequency == 0)


def evaluate(model: keras.Model, feed: Feed, callbacks: Any, verbose: Any) -> dict[str, Any]:
    group = replication_of(model).group
    # `fit` passes its list, and has compared and built before its first epoch.
    if not isinstance(callbacks, keras.callbacks.CallbackList):
        build(model, feed, "test_step")
        callbacks = callback_list(model, group, callbacks, verbose, feed.num_batches)
    feed.rewind()
    model.stop_evaluating = False
    with workers.together(group):
        callbacks.on_test_begin()
        model.reset_metrics()
        with feed.reading():
            logs = flattened(run_epoch(model, feed, callbacks, "test"))
        callbacks.on_test_end(logs)
    return logs


def predict(model: keras.Model, feed: Feed, callbacks: Any, verbose: Any) -> Any:
    """Run the loop of `predict`, and return the predictions in the order of the inputs."""
    replication = replication_of(model)
    build(model, feed, "predict_step")
    callbacks = callback_list(model, replication.group, callbacks, verbose, feed.num_batches)
    model.stop_predicting = False
    outputs: list[Any] = []
    with workers.together(replication.group):
        callbacks.on_predict_begin()
        with feed.reading():
            for execution in executions(model, feed, callbacks, "predict"):
                steps = replication.step_functions(model, "predict")
                parts = []
                for shares in execution.batches:
                    parts.append(steps(shares, is_argument=True))
                    if feed.source.marks_missing:
                        present = join_shares(shares.rows, shares.spec)[2]
                        parts[-1] = with_gaps(parts[-1], present)
                outputs += parts
                last = execution.first + execution.size - 1
                callbacks.on_predict_batch_end(last, {"outputs": joined(parts)})
        callbacks.on_predict_end()
    if not outputs:
        raise_no_data("predict")
    return keras.tree.map_structure(as_array, joined(outputs))


def with_gaps(outputs: Any, present: tf.Tensor) -> Any:
    """Predictions with NaN in the rows of the examples that could not be read."""
    read = present > 0
    if bool(tf.reduce_all(read)):
        return outputs

    def with_nan(output: Any) -> Any:
        if not (tf.is_tensor(output) and output.dtype.is_floating) or not output.shape.rank:
            raise value_error(
                "Some examples could not be read, and predictions of this type cannot be NaN.",
                "Expected floating-point numbers, a row for each example.",
                'Return floats from `predict_step`, or read the data with on_error="raise".',
                predictions=output,
            )
        rows = tf.reshape(read, [-1, *[1] * (output.shape.rank - 1)])
        return tf.where(rows, output, tf.constant(math.nan, output.dtype))

    return keras.tree.map_structure(with_nan, outputs)


def callback_list(
    model: keras.Model,
    group: ReplicaGroup,
    callbacks: Any,
    verbose: Any,
    steps: int | None,
    epochs: int | None = None,
) -> Any:
    """The callbacks that this process runs; those of `fit` have epochs."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    # Progress bars of several processes would overwrite each other.
    verbose = verbose if group.is_chief else 0
    return keras.callbacks.CallbackList(
        workers.callbacks_here(callbacks, group),
        add_history=epochs is not None,
        add_progbar=verbose != 0,
        verbose=verbose,
        epochs=1 if epochs is None else epochs,
        steps=steps,
        model=model,
    )


def listens(callbacks: keras.callbacks.CallbackList, mode: str, bars: bool = True) -> bool:
    """Whether any callback, or the list itself, has a hook for single batches.

    If none has, the logs of a step need not leave the device.

    Args:
        bars: Whether those count that look at the logs and never at the model between epochs.
    """
    hooks = [f"on_{mode}_batch_begin", f"on_{mode}_batch_end"]
    # Keras's two old names.
    hooks += ["on_batch_begin", "on_batch_end"] if mode == "train" else []

    def overrides(callback: Any, base: type) -> bool:
        if type(callback) is keras.callbacks.ProgbarLogger:
            # It hears of each batch to draw it, or to count them.
            return bars and (callback.verbose == 1 or callback.target is None)
        # The object itself may have a hook, too.
        methods = [getattr(getattr(callback, hook), "__func__", None) for hook in hooks]
        hears = methods != [getattr(base, hook) for hook in hooks]
        return hears and (bars or not looks_at_logs(callback))

    return overrides(callbacks, keras.callbacks.CallbackList) or any(
        overrides(callback, keras.callbacks.Callback) for callback in callbacks.callbacks
    )


def looks_at_logs(callback: Any) -> bool:
    """Whether the hooks of a callback for single batches look at logs, and never at the model."""
    if type(callback) is keras.callbacks.ModelCheckpoint:
        return bool(callback.save_freq == "epoch")
    # `async_safe` is Keras's word for hooks that may as well be called some batches later.
    return type(callback) in LOOK_AT_LOGS or bool(getattr(callback, "async_safe", False))


def joined(outputs: list[Any]) -> Any:
    """The predictions of several batches, concatenated."""
    return keras.tree.map_structure(lambda *parts: concatenated(list(parts)), *outputs)


def concatenated(parts: list[Any]) -> Any:
    """Tensors concatenated; ragged if their rows differ in shape. None stays None."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    # `tf.concat` takes no sparse tensors.
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(axis=0, sp_inputs=parts)
    if parts[0].shape.rank == 0:
        return tf.stack(parts)
    axes = range(1, parts[0].shape.rank)
    differing = [axis for axis in axes if len({part.shape[axis] for part in parts}) > 1]
    if differing:
        parts = [
            part
            if isinstance(part, tf.RaggedTensor)
            else tf.RaggedTensor.from_tensor(part, ragged_rank=differing[-1])
            for part in parts
        ]
    return tf.concat(parts, axis=0)


def as_array(output: Any) -> Any:
    """The output as a NumPy array, unless it is ragged, sparse or None."""
    return output.numpy() if isinstance(output, tf.Tensor) else output


def raise_no_data(method: str) -> None:
    raise value_error(
        f"`{method}()` received no data.",
        "Expected at least one batch.",
        "Check that the dataset is not empty and that a generator was not read before.",
        batches=0,
    )
