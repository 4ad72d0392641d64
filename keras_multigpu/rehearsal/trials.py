"""What two steps do not show: tried, or computed, when they are over."""

import contextlib
import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf
from keras.optimizers import schedules

from keras_multigpu.callbacks import BatchSizeScaling, ResumableCheckpoint
from keras_multigpu.callbacks.trials import resize_batch
from keras_multigpu.checks import in_one_line
from keras_multigpu.cluster import is_chief
from keras_multigpu.explanation.memory import memory
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.keras_internals.optimizer_internals import compiled_rate
from keras_multigpu.rehearsal.overlay import Overlay
from keras_multigpu.training.feed.sources import PythonSource
from keras_multigpu.training.run import TrainingRun
from keras_multigpu.training.shares import Batch
from keras_multigpu.training.variables.placement import optimizers_of
from keras_multigpu.writing import size_text

BATCHES = 20
"""How many batches are looked at for the largest one."""

Found = Iterator[tuple[str, ...]]


class RealRun(NamedTuple):
    """What a `fit` was asked to do.

    Attributes:
        steps: The steps of an epoch; None if unknown.
        takes_all: Whether an epoch takes all of the data.
        callbacks: The user's, by unique names.
        save_freqs: After how many steps they save, or "epoch"; None for others.
    """

    x: Any
    y: Any
    steps: int | None
    epochs: int
    takes_all: bool
    callbacks: dict[str, keras.callbacks.Callback]
    save_freqs: dict[str, Any]
    overlay: Overlay


def try_all(real: RealRun, model: keras.Model) -> Found:
    for check, trial in TRIALS.items():
        try:
            for found in trial(real, model):
                yield (check, *found)
        except Exception as error:
            yield (check, "note", f"could not be tried: {in_one_line(error)}")


def schedule(real: RealRun, model: keras.Model) -> Found:
    """Is a learning rate's schedule as long as the training?"""
    for callback in real.callbacks.values():
        if isinstance(callback, keras.callbacks.LearningRateScheduler):
            try:
                try:
                    callback.schedule(real.epochs - 1, 0.001)
                except TypeError:  # As in Keras: one without the present rate.
                    callback.schedule(real.epochs - 1)
            except Exception as error:
                text = f"in epoch {real.epochs:,}: {in_one_line(error)}"
                yield "fails", text, "Let the function know a rate for each epoch."
    for optimizer in optimizers_of(model):
        rate = compiled_rate(optimizer)
        length = length_of_schedule(rate)
        if length is None:
            continue
        name, total = type(rate).__name__, (real.steps or 0) * real.epochs
        said = f"{name} has {length:,} steps, the training {total or 'an unknown number':,}"
        if real.steps is None:
            yield "note", said, ""
        # An epoch's last batch may be left out, so a few more or less are no error.
        elif abs(length - total) <= 0.1 * total:
            yield "ok", said
        elif length < total or not isinstance(rate, schedules.PiecewiseConstantDecay):
            end = f"the learning rate ends at {float(rate(total)):.2g}"
            do = "Give it the steps of an epoch times the epochs"
            less = ", less its `warmup_steps`" if getattr(rate, "warmup_steps", 0) else ""
            yield "fails", f"{said}: {end}", f"{do}{less}."


def length_of_schedule(rate: Any) -> int | None:
    """After how many steps a schedule stays as it is; None if it has no end."""
    if isinstance(rate, schedules.CosineDecay):
        return int(rate.decay_steps + (rate.warmup_steps if rate.warmup_target else 0))
    if isinstance(rate, schedules.PolynomialDecay) and not rate.cycle:
        return int(rate.decay_steps)
    return None


def disk(real: RealRun, model: keras.Model) -> Found:
    """Is there room for all checkpoints?"""
    if not is_chief():
        return
    needs: dict[int, list[Any]] = {}
    for name, callback in real.callbacks.items():
        path: Any = getattr(callback, "filepath", None) or getattr(callback, "folder", "")
        each, count = real.overlay.bytes_written(name), 1
        if isinstance(callback, ResumableCheckpoint):
            files = Path(real.overlay.to_read(callback.folder)).rglob("*")
            each = max((file.stat().st_size for file in files), default=0)
            count = callback.keep + 1  # The next one is written beside them.
        elif "{" in str(path):
            every = real.save_freqs[name]
            steps = real.epochs * (real.steps or 1)
            count = steps // every if isinstance(every, int) else real.epochs
        if not each or real.overlay.place(path) is None:  # Or in a bucket.
            continue
        device, free, place = real.overlay.disk_of(path)
        need = needs.setdefault(device, [0, free, place, ""])
        need[0] += each * count
        need[3] += f"{', ' if need[3] else ''}{name} {count:,} times {size_text(each)}"
    for need, free, place, text in needs.values():
        said = f"{text}: {size_text(need)} of the {size_text(free)} that are free in {place}"
        yield "ok" if need < free else "fails", said, "" if need < free else "Keep fewer of them."


def labels(real: RealRun, model: keras.Model) -> Found:
    """Does the model have an output for each class?"""
    if "sparse_categorical_crossentropy" not in str(getattr(model.loss, "name", model.loss)):
        return
    found = [real.y] if real.y is not None else [batch[1] for batch in some_batches(model)]
    if not found:
        return
    low, high = min(np.min(each) for each in found), max(np.max(each) for each in found)
    outputs = model.output_shape[-1]
    said = f"from {low:g} to {high:g}, with {outputs} outputs"
    fits = 0 <= low and high < outputs
    yield "ok" if fits else "fails", said, "" if fits else "The last layer needs one per class."


def largest_batch(real: RealRun, model: keras.Model) -> Found:
    """Does a step on the largest batch fit into memory, and one on what is left at the end run?"""
    run = run_of(model)
    if run is None:
        yield (
            "note",
            "is estimated for distributed models only",
            "Write `model = kmg.distribute(model)`.",
        )
        return
    size, batches = run.global_batch_size, some_batches(model)
    if not batches:
        yield "note", "a generator can be read only once", ""
        return
    largest = max(batches, key=lambda batch: sum(map(np.size, leaves(batch))))
    sizes = [size or len(leaves(largest)[0])]
    for callback in real.callbacks.values():
        if isinstance(callback, BatchSizeScaling):
            sizes += callback.schedule.values()
    with contextlib.redirect_stdout(io.StringIO()):
        found = memory(model, keras.utils.pack_x_y_sample_weight(*largest), batch_size=max(sizes))
    one = found.largest
    said = f"{max(sizes):,} examples take about {size_text(one.total)} of {one.device}"
    if found.fits is False:
        do = f"Try {next(iter(found.helps), 'a smaller batch')}."
        yield "fails", f"{said}, which has {size_text(one.available or 0)}", do
        return
    error = error_of_step(run, resize_batch(largest, max(sizes)))
    yield ("ok", said) if error is None else ("fails", f"{said}: {error}", "")


def last_batch(real: RealRun, model: keras.Model) -> Found:
    run = run_of(model)
    examples, size = run and run.feed.source.num_examples, run and run.global_batch_size
    if not (run and examples and size and examples % size and real.takes_all):
        return
    batch = some_batches(model)[0]
    error = error_of_step(run, resize_batch(batch, examples % size))
    said = f"{examples % size} examples"
    yield ("ok", said) if error is None else ("fails", f"{said}: {error}", "")


def saving(real: RealRun, model: keras.Model) -> Found:
    """Can the whole model be saved, and loaded by who has its classes?"""
    if not is_chief():
        return
    path = real.overlay.notes.folder / "model.keras"
    classes = {type(each).__name__: type(each) for each in model_internals.layers_of(model)}
    try:
        model.save(path)
        loaded = keras.saving.load_model(path, custom_objects=classes, compile=False)
        same = all(map(np.array_equal, model.get_weights(), loaded.get_weights()))
    except Exception as error:
        yield "if saved", in_one_line(error), "Give the layer `get_config`, or save weights alone."
        return
    said = f"{size_text(path.stat().st_size)}, with the same weights"
    yield ("ok", said) if same else ("fails", "the loaded model has other weights", "")
    path.unlink()


def run_of(model: keras.Model) -> TrainingRun | None:
    return getattr(model, "training_run", None)


def some_batches(model: keras.Model) -> list[Batch]:
    """The first batches; none of a generator, which can be read only once."""
    run = run_of(model)
    if run is None or isinstance(run.feed.source, PythonSource):
        return []
    return list(itertools.islice(run.first_batches(), BATCHES))


def leaves(batch: Batch) -> list[Any]:
    return [leaf for leaf in tf.nest.flatten(batch, expand_composites=True) if leaf is not None]


def error_of_step(run: TrainingRun, batch: Batch) -> str | None:
    """What a training step raises, which is undone; None if it runs."""
    try:
        with run.trial(batch):
            run.train_on(batch)
    except Exception as error:
        return in_one_line(error)
    return None


TRIALS: dict[str, Callable[[RealRun, keras.Model], Found]] = {
    "schedule": schedule,
    "disk": disk,
    "labels": labels,
    "memory": largest_batch,
    "last batch": last_batch,
    "save and load": saving,
}
