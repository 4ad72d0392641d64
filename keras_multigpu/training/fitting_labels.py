"""Names labels that cannot belong to the model's loss or units, before the first step.

Keras meets them with shapes that do not match or, where a class has no unit, with a loss of NaN.
Only what is wrong for certain is refused: one output of known size, and one of Keras's losses.
"""

from typing import Any

import keras

from keras_multigpu.checks import problem

LOSSES = {
    keras.losses.SparseCategoricalCrossentropy: "sparse_categorical_crossentropy",
    keras.losses.CategoricalCrossentropy: "categorical_crossentropy",
    keras.losses.BinaryCrossentropy: "binary_crossentropy",
}


def require_fitting_labels(model: keras.Model, labels: Any, classes: int | None) -> None:
    """Raise a `ValueError` where the labels do not fit the loss and the units of the model.

    Args:
        model: The compiled model, built.
        labels: The spec of a batch's labels.
        classes: How many classes there are, if that is known.
    """
    units, loss = units_of(model), name_of(model.loss)
    shape = getattr(labels, "shape", None)
    if units is None or loss is None or shape is None or shape.rank not in (1, 2):
        return
    width = 1 if shape.rank == 1 else shape[1]
    wrong = None if width is None else mistake(loss, width, units, classes)
    if wrong is not None:
        what, fix = wrong
        raise ValueError(
            problem(
                f"{what} meet the loss {loss} and a last layer with {counted(units, 'unit')}.",
                "Expected labels, a loss and units that belong together.",
                fix,
                loss=loss,
                units=units,
            )
        )


def mistake(loss: str, width: int, units: int, classes: int | None) -> tuple[str, str] | None:
    """What came and how to mend it; None where all may be well.

    Args:
        loss: One of `LOSSES`.
        width: How many numbers an example has as its label.
        units: How many numbers the model returns for it.
        classes: How many classes there are, if that is known.
    """
    if loss == "sparse_categorical_crossentropy":
        if width > 1:
            what = f"Labels of {width} numbers"
            return what, 'Pass `label_mode="int"`, or use loss="categorical_crossentropy".'
        if classes is not None and units < classes:
            return f"{classes} classes", f"Give the last layer {classes} units."
    elif width != units and width > 1:
        return f"Labels of {width} numbers", f"Give the last layer {width} units."
    elif width != units and loss == "categorical_crossentropy":
        what = "Labels of one number"
        return what, 'Pass `label_mode="categorical"`, or use sparse_categorical_crossentropy.'
    elif width != units:
        what = "Labels of one number"
        return what, "Give the last layer one unit, or use sparse_categorical_crossentropy."
    return None


def counted(number: int, what: str) -> str:
    """A number of things."""
    return f"{number} {what}{'s' * (number != 1)}"


def units_of(model: keras.Model) -> int | None:
    """The size of the model's only output, None where there is none or nobody knows it."""
    outputs = keras.tree.flatten(getattr(model, "outputs", None) or [])
    if len(outputs) != 1 or len(outputs[0].shape) != 2:
        return None
    return outputs[0].shape[1]


def name_of(loss: Any) -> str | None:
    """Which of `LOSSES` a compiled loss is; None for all others."""
    if isinstance(loss, (list, tuple)) and len(loss) == 1:
        (loss,) = loss
    if isinstance(loss, str):
        loss = keras.losses.get(loss)
    if getattr(loss, "ignore_class", None) is not None:
        return None
    for kind, name in LOSSES.items():
        if type(loss) is kind or loss is getattr(keras.losses, name):
            return name
    return None
