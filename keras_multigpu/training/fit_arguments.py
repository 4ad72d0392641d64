"""Names mistakes in what `fit`, `evaluate` and `predict` are given, before the first step.

Here stands what Keras reports from deep inside, as wrong arguments and unsuitable arrays; or not at
all, as classes without a unit, whose loss is NaN. What Keras names itself is left to it.
"""

import math
import numbers
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import (
    real_number,
    require_number,
    shorten,
    value_error,
    warn,
)
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.keras_internals.model_internals import overridden
from keras_multigpu.training.feed.sources import knows_epochs
from keras_multigpu.training.shares import Batch, symbolic

PARTS = ("x", "y", "sample_weight")

SPARSE, BINARY = "sparse_categorical_crossentropy", "binary_crossentropy"

LOSSES = {
    keras.losses.SparseCategoricalCrossentropy: SPARSE,
    keras.losses.BinaryCrossentropy: BINARY,
}


def require_of_fit(
    x: Any, epochs: Any, initial_epoch: Any, validation_split: Any, **sizes: Any
) -> None:
    """Check the arguments of `fit` that are numbers."""
    require_whole_number("epochs", epochs)
    require_whole_number("initial_epoch", initial_epoch)
    if initial_epoch > epochs:
        warn(
            f"Nothing is trained: `initial_epoch={initial_epoch}` is after `epochs={epochs}`, the "
            "number of the last epoch, and not how many are added.",
            stacklevel=3,
        )
    require_number(
        "validation_split",
        validation_split or 0,
        lambda fraction: 0 <= fraction < 1,
        "from 0 to less than 1",
        "Pass 0.2 for the last fifth of the examples, for example.",
    )
    if validation_split and knows_epochs(x):
        raise value_error(
            "`validation_split` does not apply to `Batches`.",
            "Expected it with arrays only, as in Keras.",
            f"Write `train, validation = batches.split({validation_split})`, and pass "
            "`validation_data=validation`.",
            x=x,
            validation_split=validation_split,
        )
    require_sizes(x, **sizes)


def require_sizes(x: Any, **sizes: Any) -> None:
    """Check sizes and numbers of steps, and warn of a `batch_size` that `x` does not need."""
    for name, value in sizes.items():
        if value is not None:
            require_whole_number(name, value, least=1)
    if sizes["batch_size"] is not None:
        warn_if_batched("batch_size", x)


def warn_if_batched(name: str, x: Any) -> None:
    """Warn that a batch size is not used; `Batches` refuse it themselves."""
    if comes_in_batches(x) and not knows_epochs(x):
        warn(
            f"`{name}` is ignored, as in Keras: {type(x).__name__} has its own batches.",
            stacklevel=5,
        )


def comes_in_batches(x: Any) -> bool:
    """Whether data are not arrays but something that makes batches of them."""
    return not all(leaf is None or hasattr(leaf, "shape") for leaf in keras.tree.flatten(x))


def require_whole_number(name: str, value: Any, least: int = 0) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        number = real_number(value)
        near = round(number) if 0.5 < number < 1e15 else 1
        raise value_error(
            f"`{name}` is not a whole number{' above zero' * least}.",
            f"Expected {'' if least else '0, '}1, 2, ...",
            f"Write `{name}={near}`, for example.",
            **{name: value},
        )


def require_of_validation(x: Any, frequency: Any, batch_size: Any) -> None:
    """Check the arguments of `fit` that belong to `validation_data`, with the inputs in these."""
    several = isinstance(frequency, (list, tuple))
    epochs = frequency if several else [frequency]
    if not epochs or not all(isinstance(n, numbers.Integral) and int(n) > 0 for n in epochs):
        raise value_error(
            "`validation_freq` is neither an interval nor a list of epochs.",
            "Expected a positive integer or a list of them.",
            "Pass 2 for every second epoch, or [1, 5] for epochs 1 and 5.",
            validation_freq=frequency,
        )
    if batch_size is not None:
        warn_if_batched("validation_batch_size", x)


def require_validation_data(is_empty: bool) -> None:
    if is_empty:
        raise value_error(
            "`validation_data` is empty.",
            "Expected at least one batch.",
            "Leave it out, or look at how it was cut off the data.",
            batches=0,
        )


def is_empty(x: Any) -> bool:
    """Whether arrays or a `PyDataset` are known to have no examples, without reading them."""
    if isinstance(x, keras.utils.PyDataset):
        return not knows_epochs(x) and x.num_batches == 0
    return any(tuple(getattr(leaf, "shape", ())[:1]) == (0,) for leaf in keras.tree.flatten(x))


def weights_of_classes(
    class_weight: Any, labels: Any, model: keras.Model
) -> dict[int, float] | None:
    """Class weights by number, checked; 1.0 for each class without one, as in Keras.

    Args:
        labels: The targets if they are known.
    """
    if class_weight is None:
        return None
    if not isinstance(class_weight, dict):
        raise value_error(
            "`class_weight` is not a dict.",
            "Expected a weight for each class, by the class's number.",
            "Pass {0: 1.0, 1: 2.5}, for example.",
            class_weight=class_weight,
        )
    for kind, weight in class_weight.items():
        is_class = isinstance(kind, bool) or real_number(kind).is_integer()
        if not is_class or not math.isfinite(real_number(weight)):
            raise value_error(
                "`class_weight` holds something else than classes and their weights.",
                "Expected the numbers of classes as keys, and finite numbers as values.",
                "Pass {0: 1.0, 1: 2.5}, for example; `class_names.index(name)` numbers a name.",
                **{"class": kind, "weight": weight},
            )
    require_one_class(class_weight, labels, model, most_axes=2)
    known = {int(kind): float(weight) for kind, weight in class_weight.items()}
    # Keras does so for arrays. In datasets, classes after the last one with a weight fail.
    return dict.fromkeys(range(max(2, units_of(model) or 0, *known)), 1.0) | known


def require_one_class(
    class_weight: Any, labels: Any, model: keras.Model, most_axes: int | None = None
) -> None:
    """Check that each label names one class, which class weights need.

    Args:
        labels: The targets, or their specs.
        most_axes: How many axes labels may have; Keras reads more of them in datasets only.
    """
    shape = tf.TensorShape(getattr(labels, "shape", None))
    # Keras reads labels with two axes as one-hot.
    several = shape.rank == 2 and shape[1] not in (None, 1) and name_of_loss(model.loss) == SPARSE
    if several or (most_axes and (shape.rank or 0) > most_axes):
        raise value_error(
            "`class_weight` does not apply to targets with several labels per example.",
            "Expected one class for each example, as a number or one-hot.",
            "Pass `sample_weight` instead, with a weight for each label: "
            "`np.vectorize(class_weight.get)(y)` of integer labels.",
            class_weight=class_weight,
            shape=tuple(shape),
        )


def require_units(model: keras.Model, labels: Any, classes: int) -> None:
    """Check that numbers of classes fit the loss: otherwise it is NaN on GPUs, or just wrong.

    Args:
        labels: Their spec.
        classes: How many classes the data has; 0 if unknown.
    """
    units, name, loss = units_of(model), name_of_loss(model.loss), only_loss(model.loss)
    shape = getattr(labels, "shape", tf.TensorShape(None))
    if units is None or name is None or shape.rank is None or shape[1:] not in ([], [1]):
        return
    most, more = (units, "") if name == SPARSE else (2, f", and use {SPARSE}")
    # A class that the loss ignores needs no unit.
    if getattr(loss, "ignore_class", None) is None and classes > most:
        raise value_error(
            f"{classes} classes do not fit the loss {name} and a last layer with {units} "
            f"unit{'s' * (units != 1)}.",
            "Expected a unit for each class.",
            f"Give the last layer {classes} units{more}.",
            loss=name,
            units=units,
        )


def units_of(model: keras.Model) -> int | None:
    """The size of the model's only output; None if it has several, or it is unknown."""
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if len(outputs) != 1 or len(outputs[0].shape) != 2:
        return None
    return outputs[0].shape[1]


def name_of_loss(loss: Any) -> str | None:
    loss = only_loss(loss)
    for kind, name in LOSSES.items():
        # A subclass may compute something else.
        if type(loss) is kind or loss is getattr(keras.losses, name):
            return name
    return None


def only_loss(loss: Any) -> Any:
    """The compiled loss itself if it was given as a name or in a list."""
    if isinstance(loss, (list, tuple)) and len(loss) == 1:
        (loss,) = loss
    return keras.losses.get(loss) if isinstance(loss, str) else loss


def require_tensors(x: Any, y: Any = None, sample_weight: Any = None) -> None:
    """Check that arrays hold what can become a tensor for training."""
    for path, leaf in keras.tree.flatten_with_path((x, y, sample_weight)):
        part, *inside = path
        if isinstance(leaf, str | bytes | numbers.Number):
            raise value_error(
                f"`{PARTS[part]}` holds single Python values.",
                "Expected an array; a list means several arrays.",
                "Wrap it in `np.array(...)`.",
                first=leaf,
            )
        name = PARTS[part] + "".join(f"[{step!r}]" for step in inside)
        for column in columns_of(leaf):
            first = np.asarray(column[:1])
            values = first.reshape(-1).tolist()
            text = bool(values) and all(isinstance(each, str | bytes) for each in values)
            # Text in Python objects becomes a tensor of strings.
            if text and column.dtype != np.dtype("O"):
                refuse_text(name, shorten(values[0], 60))
            if first.dtype.kind == "O" and not text:
                raise value_error(
                    f"`{name}` is an array of Python objects.",
                    "Expected numbers, in one array.",
                    f"Write `{name}.astype('float32')` where each is a number, `np.stack({name})` "
                    "where all are arrays of one shape; pad those of several shapes, or pass a "
                    "ragged tensor.",
                    first=shorten(values[:1], 60),
                )


def columns_of(leaf: Any) -> list[Any]:
    """An array, or the columns of a pandas table; nothing for the other types that `fit` takes."""
    if hasattr(leaf, "iloc"):
        return [leaf.iloc[:, i] for i in range(leaf.shape[1])] if leaf.ndim == 2 else [leaf]
    return [leaf] if isinstance(leaf, np.ndarray) else []


def refuse_text(name: str, came: Any) -> None:
    expected = "Expected numbers."
    fix = f"Write `{name}.astype('float32')`."
    if name.startswith("x"):
        expected = "Expected text as Python objects, for a layer that reads it, or numbers."
        fix = f"Write `{name}.astype(object)` for `TextVectorization` or `StringLookup`."
    elif name.startswith("y"):
        fix = "Number the classes, as `names, y = np.unique(y, return_inverse=True)` does."
    raise value_error(f"`{name}` holds text.", expected, fix, came=came)


def require_fitting_data(
    model: keras.Model, spec: Batch | None, method: str, replicas: int, validates: bool = False
) -> None:
    """Check that the model can take batches of these specs, as far as they are known.

    Args:
        method: "train_step", "test_step" or "predict_step"; the user's own may take anything.
        validates: Whether they come as `validation_data`.
    """
    if spec is None:
        return
    # An eager step on one replica takes whatever comes, as in Keras.
    if not model.run_eagerly or replicas > 1:
        require_known_ranks(spec)
    if not overridden(model, method):
        require_batches(model, spec)
    own = overridden(model, "train_step", "test_step", "compute_loss")
    if own or method == "predict_step" or model.loss is None:
        return
    labels = keras.tree.flatten(spec[1])
    if labels == [None]:
        raise value_error(
            f"The batches{' of `validation_data`' * validates} have no labels.",
            "Expected labels, which the loss compares the predictions with.",
            f"Pass {'`validation_data=(x, y)`' if validates else '`y`'}, or a dataset of pairs "
            '`(x, y)`; read files with `label_mode="int"`; or compile without a loss.',
            loss=model.loss,
        )
    if len(labels) == 1 and labels[0].dtype == tf.string:
        refuse_text("y", labels[0])


def require_known_ranks(spec: Batch) -> None:
    for leaf in keras.tree.flatten(spec):
        if leaf is not None and leaf.shape.rank is None:
            raise value_error(
                "The dataset has tensors of unknown rank.",
                "Expected a known rank: `tf.numpy_function`, `tf.py_function` and "
                "`from_generator` with `output_types` lose it.",
                "Set it in a `map`, as `tf.ensure_shape(image, (224, 224, 3))` does for one "
                "image, or pass `output_signature` to `from_generator`.",
                spec=leaf,
            )


def require_batches(model: keras.Model, spec: Batch) -> None:
    """Raise a `ValueError` for inputs that are single examples, or of a size that fails."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    leaves = keras.tree.flatten(spec[0])
    # Those of a dictionary go by name.
    if isinstance(spec[0], dict) or len(inputs) != len(leaves):
        return
    for wanted, leaf in zip(inputs, leaves, strict=True):
        if leaf is None:
            continue
        rank = len(wanted.shape)
        # Keras itself adds a last axis of length 1.
        if leaf.shape.rank == rank - 1 and wanted.shape[-1] != 1:
            raise value_error(
                "The dataset's elements are single examples.",
                f"Expected batches of inputs of shape {tuple(wanted.shape)}.",
                "Pass `dataset.batch(32)`, or make the data with "
                "`kmg.data.from_dataset(dataset, global_batch_size=32)`.",
                shape=tuple(leaf.shape),
            )
        if leaf.shape.rank == rank and not leaf.shape[1:].is_compatible_with(wanted.shape[1:]):
            try:
                # Before an epoch of training, if these are validation data.
                model_internals.symbolic_call(model, symbolic(spec[0]))
            except ValueError:
                raise  # Keras names the sizes, of which convolutions take any.
            except Exception:  # A model that cannot run on shapes alone may still train.
                return
