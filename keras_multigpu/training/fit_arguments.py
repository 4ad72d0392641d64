"""Names mistakes in what `fit`, `evaluate` and `predict` are given, before the first step.

Keras reports wrong arguments from deep inside, unsuitable arrays by a data type, wrong sizes by the
layer that could not multiply, and classes without a unit by a loss of NaN. What Keras can train is
let through; labels are refused only if the model has one output and one of Keras's losses.
"""

import math
import numbers
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_multigpu.checks import error_of, real_number, shortened, value_error, warn
from keras_multigpu.keras_internals import model_internals
from keras_multigpu.keras_internals.model_internals import overridden
from keras_multigpu.training.feed.sources import knows_epochs
from keras_multigpu.training.shares import Batch, symbolic

PARTS = ("x", "y", "sample_weight")

SPARSE = "sparse_categorical_crossentropy"

LOSSES = {
    keras.losses.SparseCategoricalCrossentropy: SPARSE,
    keras.losses.CategoricalCrossentropy: "categorical_crossentropy",
    keras.losses.BinaryCrossentropy: "binary_crossentropy",
}


def require_of_fit(
    x: Any,
    epochs: Any,
    initial_epoch: Any,
    validation_split: Any,
    class_weight: tuple[Any, Any, Any],
    **sizes: Any,
) -> None:
    """Check the arguments of `fit`; `class_weight` comes with the labels and the loss."""
    require_whole_number("epochs", epochs)
    require_whole_number("initial_epoch", initial_epoch)
    if initial_epoch > epochs:
        warn(
            f"Nothing is trained: `initial_epoch={initial_epoch}` is after `epochs={epochs}`, the "
            "number of the last epoch, and not how many are added.",
            stacklevel=3,
        )
    if validation_split and not 0 <= real_number(validation_split) < 1:
        raise value_error(
            "`validation_split` is not a fraction of the examples.",
            "Expected a number from 0 to less than 1.",
            "Pass 0.2 for the last fifth of them, for example.",
            validation_split=validation_split,
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
    require_class_weights(*class_weight, most_axes=2)
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


def require_of_validation(
    x: Any, validation_freq: Any, validation_steps: Any, validation_batch_size: Any
) -> None:
    """Check the arguments of `fit` that belong to `validation_data`.

    Args:
        x: The inputs in them; None if there are none.
    """
    if x is None:
        given = {"steps": validation_steps, "batch_size": validation_batch_size}
        given["freq"] = None if validation_freq == 1 else validation_freq
        named = [f"`validation_{name}`" for name, value in given.items() if value is not None]
        if named:
            warn(f"{' and '.join(named)} without `validation_data`: nothing is validated.", 3)
        return
    several = isinstance(validation_freq, (list, tuple))
    epochs = validation_freq if several else [validation_freq]
    if not epochs or not all(isinstance(n, numbers.Integral) and int(n) > 0 for n in epochs):
        raise value_error(
            "`validation_freq` is neither an interval nor a list of epochs.",
            "Expected a positive integer or a list of them.",
            "Pass 2 for every second epoch, or [1, 5] for epochs 1 and 5.",
            validation_freq=validation_freq,
        )
    if validation_batch_size is not None:
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


def require_installed(callbacks: Any) -> None:
    """Raise an `ImportError` if TensorBoard is missing; TensorFlow reports it an epoch later."""
    for callback in keras.tree.flatten(callbacks):
        # TensorFlow brought the package until 2.20.
        if isinstance(callback, keras.callbacks.TensorBoard) and not find_spec("tensorboard"):
            raise error_of(
                ImportError,
                "Keras's callback TensorBoard needs the package tensorboard.",
                "Expected it to be installed; TensorFlow 2.21 no longer brings it.",
                "Run `pip install tensorboard`, or leave the callback out.",
                callback=callback,
            )


def require_class_weights(
    class_weight: Any, labels: Any, loss: Any, most_axes: int | None = None
) -> None:
    """Check that class weights are a dict, and that each label names one class.

    Args:
        labels: The targets, or their specs.
        most_axes: How many axes labels may have; Keras reads more of them in datasets only.
    """
    if class_weight is None:
        return
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
    shape = tf.TensorShape(getattr(labels, "shape", None))
    # Keras reads labels with two axes as one-hot.
    several = shape.rank == 2 and shape[1] not in (None, 1) and name_of_loss(loss) == SPARSE
    if several or (most_axes and (shape.rank or 0) > most_axes):
        raise value_error(
            "`class_weight` does not apply to targets with several labels per example.",
            "Expected one class for each example, as a number or one-hot.",
            "Pass `sample_weight` instead, with a weight for each label: "
            "`np.vectorize(class_weight.get)(y)` of integer labels.",
            class_weight=class_weight,
            shape=tuple(shape),
        )


def completed_class_weights(
    class_weight: dict[Any, Any] | None, labels: Any, model: keras.Model
) -> dict[int, float] | None:
    """Class weights with those that are missing, which are 1.0 as in Keras; with a warning.

    Args:
        labels: The targets if they are known: then only their classes matter.
    """
    if class_weight is None:
        return None
    weights = {int(kind): float(weight) for kind, weight in class_weight.items()}
    missing = [each for each in classes_in(labels, model, weights) if each not in weights]
    if missing:
        some = ", ".join(map(str, missing[:5])) + ", ..." * (len(missing) > 5)
        warn(
            f"`class_weight` has no weight for class{'es' * (len(missing) > 1)} {some}: 1.0 is "
            "taken, as in Keras.",
            stacklevel=3,
        )
    return dict.fromkeys(missing, 1.0) | weights


def classes_in(labels: Any, model: keras.Model, weights: dict[int, float]) -> Iterable[int]:
    """The classes of labels, or those that the model tells apart if there are no labels yet."""
    if labels is None:
        name, units = name_of_loss(model.loss), units_of(model) or 0
        known = 0 if name is None else max(units, 2 * (name == "binary_crossentropy"))
        return range(max(known, *weights, 0))
    found = np.asarray(labels) if hasattr(labels, "shape") else np.array([], object)
    if found.dtype.kind not in "biuf":
        return ()
    if found.ndim > 1:  # As in Keras.
        found = found[..., 0] if found.shape[-1] == 1 else found.argmax(axis=-1)
    classes: list[int] = np.unique(np.round(found).astype("int32")).tolist()
    return classes


def require_fitting_labels(model: keras.Model, labels: Any, classes: int | None) -> None:
    """Check that labels fit the loss and the number of units of the model.

    Args:
        labels: Their spec.
        classes: How many classes the data has, if known.
    """
    units, name, loss = units_of(model), name_of_loss(model.loss), only_loss(model.loss)
    shape = getattr(labels, "shape", None)
    if units is None or name is None or shape is None or shape.rank not in (1, 2):
        return
    width = 1 if shape.rank == 1 else shape[1]
    if width is None:
        return
    if getattr(loss, "ignore_class", None) is not None:
        classes = None  # The ignored class needs no unit.
    lacks_units = units < (classes or 0) if name == SPARSE else (classes or 0) > 2
    if width > 1 and (name == SPARSE or width != units):
        what, fix = f"Labels of {width} numbers", f"Give the last layer {width} units."
        if name == SPARSE:
            fix = 'Pass `label_mode="int"`, or use loss="categorical_crossentropy".'
    elif name in (SPARSE, "binary_crossentropy") and width == 1 and lacks_units:
        what, fix = f"{classes} classes", f"Give the last layer {classes} units"
        fix += "." if name == SPARSE else f", and use {SPARSE}."
    elif name != SPARSE and width != units:
        what, fix = "Labels of one number", f"Give the last layer one unit, or use {SPARSE}."
        if name == "categorical_crossentropy":
            fix = f'Pass `label_mode="categorical"`, or use {SPARSE}.'
    else:
        return
    raise value_error(
        f"{what} do not fit the loss {name} and a last layer with {units} "
        f"unit{'s' * (units != 1)}.",
        "Expected labels, a loss and units that belong together.",
        fix,
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
                refuse_text(name, shortened(values[0], 60))
            if first.dtype.kind == "O" and not text:
                raise value_error(
                    f"`{name}` is an array of Python objects.",
                    "Expected numbers, in one array.",
                    f"Write `{name}.astype('float32')` where each is a number, `np.stack({name})` "
                    "where all are arrays of one shape; pad those of several shapes, or pass a "
                    "ragged tensor.",
                    first=shortened(values[:1], 60),
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
    for wanted, leaf in inputs_of(model, spec[0]):
        shape = leaf.shape
        # Keras itself adds a last axis of length 1.
        if shape.rank == len(wanted.shape) - 1 and wanted.shape[-1] != 1:
            raise value_error(
                "The dataset's elements are single examples.",
                f"Expected batches of inputs of shape {tuple(wanted.shape)}.",
                "Pass `dataset.batch(32)`, or make the data with "
                "`kmg.data.from_dataset(dataset, global_batch_size=32)`.",
                shape=tuple(shape),
            )
        if shape.rank == len(wanted.shape) and not shape[1:].is_compatible_with(wanted.shape[1:]):
            refuse_sizes(model, spec, tuple(wanted.shape[1:]), tuple(shape[1:]))


def inputs_of(model: keras.Model, x: Any) -> Iterator[tuple[Any, Any]]:
    """Each input of the model with its data; nothing if the model does not know its inputs."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    leaves = keras.tree.flatten(x)
    if isinstance(x, dict):
        named = {wanted.name: wanted for wanted in inputs}
        inputs = [named[name] for name in sorted(x)] if named.keys() == x.keys() else []
    if len(inputs) == len(leaves):
        pairs = zip(inputs, leaves, strict=True)
        yield from ((wanted, leaf) for wanted, leaf in pairs if leaf is not None)


def refuse_sizes(
    model: keras.Model, spec: Batch, wanted: tuple[Any, ...], came: tuple[Any, ...]
) -> None:
    """Raise a `ValueError` unless the model takes other sizes, as convolutions do."""
    try:
        model_internals.symbolic_call(model, symbolic(spec[0]))
    except (ValueError, tf.errors.OpError) as error:
        raise value_error(
            f"The model expects inputs of shape {wanted}, and the data has {came}.",
            "Expected inputs of the shape that its `Input` names.",
            "Read or resize them to it, as `image_size=` of the data or `keras.layers.Resizing` "
            "does, or make the model for theirs.",
            came=came,
            wanted=wanted,
        ) from error
    except Exception:  # A model that cannot run on shapes alone may still train.
        return
