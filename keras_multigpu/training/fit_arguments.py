"""Names mistakes in what `fit`, `evaluate` and `predict` are given, before the first step.

Keras answers wrong arguments with errors from deep inside, labels of another form with shapes that
do not match, and classes that have no unit with a loss of NaN. Of labels only what is wrong for
certain is refused: one output of known size, and one of Keras's losses.
"""

import numbers
from importlib.util import find_spec
from typing import Any

import keras
import tensorflow as tf

from keras_multigpu.checks import error_of, real_number, value_error
from keras_multigpu.training.feed.sources import knows_epochs

SPARSE = "sparse_categorical_crossentropy"

LOSSES = {
    keras.losses.SparseCategoricalCrossentropy: SPARSE,
    keras.losses.CategoricalCrossentropy: "categorical_crossentropy",
    keras.losses.BinaryCrossentropy: "binary_crossentropy",
}


def require_of_fit(
    x: Any,
    epochs: Any,
    validation_split: Any,
    class_weight: tuple[Any, Any, Any],
    **whole_numbers: Any,
) -> None:
    """Raise a `ValueError` for arguments of `fit`; class weights come with labels and loss."""
    require_whole_number("epochs", epochs)
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
    require_whole_numbers(**whole_numbers)


def require_whole_numbers(**arguments: Any) -> None:
    for name, value in arguments.items():
        if value is not None:
            require_whole_number(name, value)


def require_whole_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        number = real_number(value)
        near = round(number) if 0.5 < number < 1e15 else 1
        raise value_error(
            f"`{name}` is not a whole number.",
            "Expected 0, 1, 2, ...",
            f"Write `{name}={near}`, for example.",
            **{name: value},
        )


def require_installed(callbacks: Any) -> None:
    """Raise an `ImportError` where a callback lacks the package that it would write with."""
    for callback in keras.tree.flatten(callbacks):
        # Else TensorFlow says it when the first epoch is over. It brought the package until 2.20.
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
    """Raise a `ValueError` unless class weights come as a dict, and each label says a class.

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
    shape = tf.TensorShape(getattr(labels, "shape", None))
    # Keras takes two axes for one-hot labels.
    several = shape.rank == 2 and shape[1] not in (None, 1) and name_of(loss) == SPARSE
    if several or (most_axes and (shape.rank or 0) > most_axes):
        raise value_error(
            "`class_weight` does not apply to targets with several labels per example.",
            "Expected one class for each example, as a number or one-hot.",
            "Pass `sample_weight` instead, with a weight for each label: "
            "`np.vectorize(class_weight.get)(y)` of integer labels.",
            class_weight=class_weight,
            shape=tuple(shape),
        )


def require_fitting_labels(model: keras.Model, labels: Any, classes: int | None) -> None:
    """Raise a `ValueError` where the labels do not fit the loss and the units of the model."""
    units, loss = units_of(model), name_of(model.loss)
    shape = getattr(labels, "shape", None)
    if units is None or loss is None or shape is None or shape.rank not in (1, 2):
        return
    if getattr(only_loss(model.loss), "ignore_class", None) is not None:
        classes = None  # One of them needs no unit.
    width = 1 if shape.rank == 1 else shape[1]
    wrong = None if width is None else mistake(loss, width, units, classes)
    if wrong is not None:
        what, fix = wrong
        raise value_error(
            f"{what} do not fit the loss {loss} and a last layer with {units} "
            f"unit{'s' * (units != 1)}.",
            "Expected labels, a loss and units that belong together.",
            fix,
            loss=loss,
            units=units,
        )


def mistake(loss: str, width: int, units: int, classes: int | None) -> tuple[str, str] | None:
    """What does not fit and how to fix it; None if nothing is known to be wrong.

    Args:
        width: How many values a label has.
        classes: How many classes the data has, if that is known.
    """
    if loss == SPARSE:
        if width > 1:
            what = f"Labels of {width} numbers"
            return what, 'Pass `label_mode="int"`, or use loss="categorical_crossentropy".'
        if classes is not None and units < classes:
            return f"{classes} classes", f"Give the last layer {classes} units."
    elif loss == "binary_crossentropy" and width == 1 and classes is not None and classes > 2:
        fix = f"Give the last layer {classes} units, and use sparse_categorical_crossentropy."
        return f"{classes} classes", fix
    elif width != units and width > 1:
        return f"Labels of {width} numbers", f"Give the last layer {width} units."
    elif width != units and loss == "categorical_crossentropy":
        what = "Labels of one number"
        return what, 'Pass `label_mode="categorical"`, or use sparse_categorical_crossentropy.'
    elif width != units:
        what = "Labels of one number"
        return what, "Give the last layer one unit, or use sparse_categorical_crossentropy."
    return None


def units_of(model: keras.Model) -> int | None:
    """The size of the model's only output, None if there is none or it is unknown."""
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if len(outputs) != 1 or len(outputs[0].shape) != 2:
        return None
    return outputs[0].shape[1]


def name_of(loss: Any) -> str | None:
    loss = only_loss(loss)
    for kind, name in LOSSES.items():
        # A subclass may compute something else.
        if type(loss) is kind or loss is getattr(keras.losses, name):
            return name
    return None


def only_loss(loss: Any) -> Any:
    """A compiled loss itself, where it came in a list or by its name."""
    if isinstance(loss, (list, tuple)) and len(loss) == 1:
        (loss,) = loss
    return keras.losses.get(loss) if isinstance(loss, str) else loss
