"""Names wrong arguments of `fit`, `evaluate` and `predict`, which Keras meets with riddles."""

import numbers
from collections.abc import Sequence
from typing import Any

import keras

from keras_multigpu.checks import problem
from keras_multigpu.checks import real_number


def require_whole_numbers(**arguments: Any) -> None:
    """Raise a `ValueError` unless each argument is a whole number; None stands for a default."""
    for name, value in arguments.items():
        if value is not None:
            require_whole_number(name, value)


def require_whole_number(name: str, value: Any) -> None:
    """Raise a `ValueError` unless `value` is 0, 1, 2, ..."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 0:
        raise ValueError(
            problem(
                f"`{name}` is not a whole number.",
                "Expected 0, 1, 2, ...",
                f"Write `{name}={suggestion(value)}`, for example.",
                **{name: value},
            )
        )


def suggestion(value: Any) -> int:
    """A whole number near a value."""
    number = real_number(value)
    return round(number) if 0.5 < number < 1e15 else 1


def require_fraction(validation_split: Any) -> None:
    """Raise a `ValueError` unless this is a part of the examples, and not all of them."""
    if validation_split is not None and not 0 <= real_number(validation_split) < 1:
        raise ValueError(
            problem(
                "`validation_split` is not a part of the examples.",
                "Expected a number from 0 to less than 1.",
                "Pass 0.2 for the last fifth of them, for example.",
                validation_split=validation_split,
            )
        )


def require_class_weights(class_weight: Any) -> None:
    """Raise a `ValueError` unless class weights come as a dict."""
    if class_weight is not None and not isinstance(class_weight, dict):
        raise ValueError(
            problem(
                "`class_weight` is not a dict.",
                "Expected a weight for each class, by the class's number.",
                "Pass {0: 1.0, 1: 2.5}, for example.",
                class_weight=class_weight,
            )
        )


def require_batches(model: keras.Model, spec: Any) -> None:
    """Raise a `ValueError` where a dataset's elements are single examples.

    Args:
        model: The model. Only a functional or Sequential one tells what it takes.
        spec: The specs of an element: `(x, y, sample_weight)`.
    """
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    leaves = keras.tree.flatten(spec[0])
    if len(inputs) != len(leaves):
        return
    for wanted, leaf in zip(inputs, leaves, strict=True):
        if leaf is not None and lacks_batch_axis(leaf.shape.rank, wanted.shape):
            raise ValueError(
                problem(
                    "The dataset's elements are single examples.",
                    f"Expected batches of inputs of shape {tuple(wanted.shape)}.",
                    "Pass `dataset.batch(32)`, or make the data with "
                    "`kmg.data.from_dataset(dataset, global_batch_size=32)`.",
                    shape=tuple(leaf.shape),
                )
            )


def lacks_batch_axis(rank: int | None, wanted: Sequence[int | None]) -> bool:
    """Whether a tensor has one axis less than a model's input, which Keras does not add."""
    return rank is not None and rank == len(wanted) - 1 and wanted[-1] != 1
